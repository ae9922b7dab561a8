// Package amp is mixed precision training as torch.amp has it: autocast chooses the dtype of every operation, and a
// gradient scaler keeps float16 gradients from vanishing.
//
// Autocast is a property of an operating system thread. [Autocast] therefore runs a function: it keeps the goroutine on
// its thread, sets the mode, and restores what was before, also after a panic. Work that other goroutines do is not
// affected, so do not start any inside. Run the forward pass and the loss in it, and backward after it: operations of
// backward run in the dtypes that forward chose.
//
// bfloat16 has the range of float32 and needs no scaler. With float16:
//
//	scaler, err := amp.NewGradScaler(amp.ScalerOptions{Device: gotch.CudaBuilder(0)})
//	...
//	err = amp.Autocast(amp.Options{Device: gotch.CudaBuilder(0)}, func() error { loss = forward(); return nil })
//	scaled, err := scaler.Scale(loss)
//	err = backward(scaled)
//	err = scaler.Unscale(optimizer)                   // only to look at the gradients, or to clip them
//	norm, err := optim.ClipGradNorm(params, 1)
//	stepped, err := scaler.Step(optimizer)            // no step if there were infinities or NaNs
//	err = scaler.Update()
//
// With data parallel training the gradients are reduced before they are unscaled, so all ranks find the same, and the
// scales stay equal without communication.
package amp
