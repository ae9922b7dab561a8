// Package pickle reads and writes the part of Python's pickle format that torch.save uses, without ever running
// anything that a file names.
//
// A pickle is a small program for a stack machine. Most of its instructions build plain values; a few name a Python
// function and call it. Here the plain values become Go values (see the table), and a call is allowed only when the
// caller's [Options].Call knows the function. Everything else is an [UnsafeGlobalError].
//
//	Python                     Go
//	None, bool                 nil, bool
//	int                        int64, or *big.Int where it needs more than 64 bits
//	float, complex             float64, complex128
//	str, bytes, bytearray      string, []byte, ByteArray
//	list, tuple, set           *List, *Tuple, *Set
//	dict, OrderedDict, Counter *Dict
//	a function or class        Global
//	the result of a call       whatever Options.Call gives, or *Object
//
// Pickle writes an object that is met twice once, by identity. Containers are therefore pointers in Go, and the
// encoder keeps their identity, and that of strings and byte slices (their memory), as Python's pickler does: a tree
// that was read and is written again gives the same bytes.
package pickle
