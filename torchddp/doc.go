// Package torchddp is PyTorch's distributed data-parallel training for Go: process groups, collectives and DDP over
// libtorch's own C++ (c10d and the Reducer), on gotch tensors.
//
// # The model
//
// A job is a set of ranks, usually one process a GPU. Each rank joins a [ProcessGroup] through [InitProcessGroup],
// holds the same model, and feeds it another part of the data. [DDP] wraps the model: it checks that all ranks hold
// the same one, gives all ranks rank 0's weights, and averages the gradients during [DDP.Backward], overlapped with
// the rest of the backward.
//
// Results are Python's to the bit where the kernels are the same, and Go ranks and Python ranks can stand in one
// group: store keys, the order of collectives and buckets are Python's.
//
// # Collectives
//
// A group's collectives wait; their Async twins give a [Work]. Options of one call are [WithTimeout], [WithTag] and
// [WithFactor]. Go values travel by [AllGatherObject] and its relatives, with the [Pickle] codec also to and from Python
// ranks. When a collective times out or loses a peer, its error ([CollectiveError]) shows what every rank of the group
// did last and names those that did not come or ran something else, with the program's lines;
// [ProcessGroup.Rebuild] then makes a new world of those that are left.
//
// # Threads
//
// libtorch keeps modes such as "record gradients" per OS thread, while goroutines move between threads. Run a rank's
// training on one goroutine locked to its thread (package launch does that) and do not hand single operations to
// others. [NoGrad] locks the thread for its scope.
//
// # Errors
//
// A failed collective is an error, never the end of the process: use errors.Is with [ErrTimeout], [ErrPeer] and the
// others to tell what happened.
package torchddp
