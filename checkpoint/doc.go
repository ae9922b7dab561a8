// Package checkpoint saves and loads the files of PyTorch: torch.load reads what Save writes, with its safe default
// weights_only=True, and Load reads what torch.save writes, without ever running anything that a file names.
//
// # The model
//
// A checkpoint is one value: dicts, lists, numbers, strings and tensors. In Go that is a tree of [*Dict], [*List],
// [*Tuple] and plain Go values with *ts.Tensor leaves. A module's state_dict is a [*StateDict], ordered as the module
// is. Tensors that share memory are saved once, and share it again when they are loaded.
//
//	checkpoint.Save("model.pt", checkpoint.ModuleState(model))
//	sd, err := checkpoint.LoadStateDictFile("model.pt", checkpoint.LoadOptions{})
//	_, err = checkpoint.LoadStateDict(model, sd, true)
//
// A file comes into being under another name and takes its own when all of it is on the disk, so there is never half a
// checkpoint: not after a crash, not on a full disk, not for a reader that comes at the wrong moment.
//
// # Devices
//
// Every tensor knows where it was saved from. Without [LoadOptions].MapLocation it goes back there, and a device that
// is not there is an error before anything is allocated. In a job of several GPUs each rank moves the file of rank 0 to
// its own device; bytes go there through a small host buffer:
//
//	opt := checkpoint.LoadOptions{MapLocation: checkpoint.MapDevices(map[string]string{"cuda:0": "cuda:3"})}
//
// # In a job
//
// [Manager] keeps a run's checkpoints: by step, the last few and the best, written by rank 0, beside training if
// wanted. With [AgreeBy] no rank runs ahead of a save, and an error of rank 0's reaches all of them. [Snapshot] is all
// that a run needs to go on bit for bit: optimizers, schedules, grad scalers and data loaders are its parts as they are.
// [WatchPreemption] notes SIGTERM.
//
// # What goes wrong elsewhere
//
//   - Checksums are verified; torch.load does not look at them. A mapped file ([LoadOptions].Mmap) is read through once for
//     that, unless [LoadOptions].SkipCRC says otherwise.
//   - A file saved as ddp.state_dict() has "module." before every name: [StateDict.StripPrefix].
//   - Saving copies nothing, so the tensors must not change meanwhile. [AsyncSaver] takes a copy first.
//   - Python saves whole modules as code. Such a file is refused; save its state_dict().
//
// The format itself, without libtorch, is in the packages ptfile, pickle and safetensors.
package checkpoint
