package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"

	"github.com/goddp/goddp/csrc"
)

// linked is never called: its only task is to fail at link time, with a name that says what to do, when the library
// was built from an incompatible header.
var linked = func() int { return int(C.TDP_ABI()) }

// Ready tells whether the C++ library that this program was linked with belongs to this version of the module.
var Ready = sync.OnceValue(func() error {
	_ = linked
	// What c10d logs at this level comes back as an error as well, there with a C++ stack. With CUDA the watchdog's
	// words have no other way out.
	if os.Getenv("TORCH_CPP_LOG_LEVEL") == "" && !BuiltWithCUDA() {
		const nothingButFatal = 3
		if err := done("log level", C.tdp_set_log_level(nothingButFatal)); err != nil {
			return err
		}
	}
	return checkKey(C.GoString(C.tdp_source_key()))
})

// checkKey compares the key in the library with that of the sources this program was compiled with.
func checkKey(built string) error {
	want := csrc.Key()
	if built == want {
		return nil
	}
	return fmt.Errorf("the C++ library (%.12s) was built from other sources than this program's (%.12s): run `goddp setup` (in the repository: `make setup`) and build again", built, want)
}

// TorchVersion is the version of libtorch that this program was built with.
func TorchVersion() string { return C.GoString(C.tdp_torch_version()) }

// BuiltWithCUDA tells the flavour.
func BuiltWithCUDA() bool { return C.tdp_built_with_cuda() != 0 }
