// Package libtorch is set-up: it makes sure that libtorch, what is compiled against it, and the Go modules that link
// it are on this machine, whole and of the right version.
//
// # What it makes
//
// Everything lies in one cache folder (CacheDir), shared by all clones, modules and users' programs of one account:
//
//	downloads/                 wheels, while they are needed
//	libtorch/2.11.0-cpu/       headers and libraries of libtorch; -cuda likewise, with NVIDIA's libraries
//	obj/                       compiled C++ files, named by a hash of all that went in
//	gotch/KEY/                 gotch, prepared for this libtorch, and its compiled C++ (libtch.a)
//	tdp/KEY/                   our own compiled C++ (libtdp.a) and a Go module that holds the linker flags
//	python/2.11.0/             a Python with torch, for tests that compare with it
//	work/                      workspace files for modules that cannot hold one
//	locks/                     one set-up at a time makes a thing; the others wait
//
// A Go module reaches it by two replacements in a go.work file: gotch by the prepared gotch, and the empty module
// goddp.local/link, which the prepared gotch imports, by the folder of libtdp.a. Because link flags hold for a whole
// program, no package needs flags of its own, and because the flags live apart from gotch, a change of our C++
// recompiles none of gotch's 50 seconds of cgo.
//
// # How it stays whole
//
// A thing is made in a folder beside its place, with a manifest of every file's hash written last, flushed to disk,
// and renamed. So a folder that has its name is whole, whenever the set-up that made it was killed. Each later run
// compares the manifest's names and sizes (Verify: the hashes) and makes anew what does not fit. Names hold a hash of
// all inputs, so nothing is ever changed in place, and two versions live side by side.
package libtorch
