// Package models has networks that are torchvision's to the bit, and brings PyTorch's and gotch's own models to Go.
//
//   - [NewToyNet] and [NewSimpleNet] are the tutorials' small models; [NewResNet18] to [NewResNet152], the ResNeXt and wide
//     variants are torchvision's, with its names, its initialisation, and after the same seed its weights.
//   - [LoadScript] loads a TorchScript file: any PyTorch model, saved with torch.jit.save, trains here and goes back with
//     [ScriptModule.Save].
//   - [FromVarStore] wraps a model of gotch's nn package.
//
// All of them are modules of package nn: DDP, the optimizers and package checkpoint take each alike. A state dict of
// torchvision loads with checkpoint.LoadStateDict.
package models
