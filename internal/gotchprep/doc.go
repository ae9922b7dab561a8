// Package gotchprep makes the copy of gotch that goddp builds with.
//
// gotch v0.9.1 (github.com/sugarme/gotch) was written for libtorch 2.1. Unmodified it does not compile with 2.11, loses most
// errors when several goroutines work, leaks a tensor for each in-place operator, ends the process on any error, and spends
// ten times the time of a small operator around it. None of its code is kept in this repository: the module comes from the
// module proxy, and Prepare takes it through a list of rules that rewrite it mechanically.
//
// A rule finds its places by syntax where there is one (go/ast), makes its edits in the text, counts them, and fails with a
// [RuleError] when gotch's text is not what it was written for. What no rule can mend is replaced, one declaration at a
// time and guarded by a hash of the old text, by files of ours in the folder files.
//
// # Errors
//
// gotch's C functions caught exceptions and kept the message in a thread-local, which Go fetched in a second call, by then
// often on another thread. Now they let exceptions out, and each has a shim that calls it, catches everything, and returns
// the result and the error together:
//
//	gd_out1 gd_atg_add(tensor self, tensor other);   // { tensor out[1]; char *err; }
//
// The functions of libtch return that error, those of ts wrap it, and the Must functions panic with it. errors.As finds a
// *ts.TorchError, errors.Is a kind such as ts.ErrOutOfMemory.
//
// # Tensors
//
// A ts.Tensor was 100 KB of zeroes, a name in a locked map, and a finalizer. Now it is a name, a number and a pointer to a
// cell that owns the C++ handle. Dropping takes the cell's number away, so a second Drop does nothing, a copy of the struct
// is dropped with it, and an operator on it says ts.ErrDropped. The cell keeps its finalizer and goes back to a pool. A small
// add with its Drop is faster than Python's (BenchmarkAddAgainstPython holds them side by side: a ratio of about 0.75 on an
// idle machine); what Go adds to the operator is about 0.4 of the whole, in two C calls and one small object of 32 bytes.
//
// # What stays as it is
//
// Known and not mended, for nothing here builds on it: VarStore.ToDevice and ToDType replace leaves by tensors with a
// history, and match a path anywhere in a name; VarStore is in the order of names, not of registration; dutil's samplers seed
// from the clock; package pickle skips weights without data and makes lists of scalars; the C++ optimizers' momentum setter
// for one group fails for all but SGD; a goroutine that calls MustGradSetEnabled must have locked its thread. Operators whose
// name begins with an underscore are not exported by gotch.
package gotchprep
