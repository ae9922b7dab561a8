package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// CopyAside copies tensors to a device on a stream that computations do not run on, and waits for the copies: the
// sources may be written again when it returns. Before a stream computes with the copies, RecordStream is to be called
// on its thread.
func CopyAside(dev gotch.Device, src []*ts.Tensor) ([]*ts.Tensor, error) {
	list := NewHandles(src)
	out := make([]C.tdp_tensor, len(src))
	if err := done("copy to the device", C.tdp_copy_aside(device(dev), list.ptr(), list.n(), unsafe.SliceData(out)), list); err != nil {
		return nil, err
	}
	copies := make([]*ts.Tensor, len(out))
	for i, t := range out {
		copies[i] = tensor(t)
	}
	return copies, nil
}

// RecordStream tells the allocator that the calling thread's current stream uses tensors that another stream made.
func RecordStream(tensors []*ts.Tensor) error {
	list := NewHandles(tensors)
	return done("record stream", C.tdp_record_stream(list.ptr(), list.n()), list)
}
