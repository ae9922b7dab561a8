// Package optim has PyTorch's optimizers, learning rate schedules, gradient clipping and averages of weights, with
// PyTorch's numbers: from the same weights and gradients a Go optimizer and its Python original make the same bits, and
// either continues from the other's state dict.
//
// An optimizer owns the state of its parameters, in C++, and does a whole step in one call. Its options live in
// parameter groups, and are read at every step:
//
//	opt, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
//	defer opt.Close()
//	...
//	err = opt.ZeroGrad(true)
//	... forward, backward ...
//	err = opt.Step()
//
// Parameters come as a slice, as a sequence with names, or in groups that change some options:
//
//	decay, rest, err := optim.SplitDecay(model.NamedParameters())
//	opt, err := optim.NewAdamW([]optim.Group[optim.AdamWOptions]{
//		{Params: decay},
//		{Params: rest, Set: func(o *optim.AdamWOptions) { o.WeightDecay = 0 }},
//	}, optim.AdamWOptions{LR: 3e-4, WeightDecay: 0.05})
//
// A zero in the options that an optimizer is made with stands for Python's default where that is not zero, such as a
// learning rate or the decay of AdamW. Where a real zero is meant, write it in a group's Set, or in Options afterwards.
//
// Every optimizer exists in up to three implementations that differ in the last bits; see [Implementation]. Auto is
// what Python takes by itself. On the CPU that is one operation after another over each parameter; here the same
// operations run block by block in the cache, with the same result and in less than half of Python's time.
//
// An optimizer is for one goroutine at a time.
package optim
