package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"os"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Backend says which library carries a group's operations.
type Backend int32

// The backends that this library knows.
const (
	Gloo Backend = C.TDP_BACKEND_GLOO
	NCCL Backend = C.TDP_BACKEND_NCCL
)

// DeviceType is c10's.
type DeviceType int32

// The device types that groups serve.
const (
	CPU  DeviceType = 0
	CUDA DeviceType = 1
)

// ProcessGroup is c10d::ProcessGroup. A closed one gives errors.
type ProcessGroup struct{ h *C.tdp_pg }

// GlooOptions choose Gloo's addresses and threads.
type GlooOptions struct {
	Interfaces, Hostnames []string
	Threads               int
	Timeout               time.Duration
	GlobalRanks           []int64 // one a rank of the group
	// Helper, where there is one, is the store of a second Gloo group that compares every collective before it runs.
	Helper *Store
}

// NCCLOptions are NCCL's.
type NCCLOptions struct {
	Timeout      time.Duration
	HighPriority bool
	GlobalRanks  []int64
	Helper       *Store
	BoundDevice  int // < 0: none
}

// NewProcessGroup makes a group that has no backend yet.
func NewProcessGroup(store *Store, rank, size int, name, description string) (*ProcessGroup, error) {
	if err := Ready(); err != nil {
		return nil, err
	}
	n, d := C.CString(name), C.CString(description)
	defer C.free(unsafe.Pointer(n))
	defer C.free(unsafe.Pointer(d))
	var h *C.tdp_pg
	rec := C.tdp_pg_new(store.h, C.int32_t(rank), C.int32_t(size), n, d, &h)
	if err := done("process group", rec, store); err != nil {
		return nil, err
	}
	return &ProcessGroup{h: h}, nil
}

// FlightRecorderSize is how many entries libtorch's flight recorder keeps in this process; 0 when it is off.
//
// It is off unless TORCH_FR_BUFFER_SIZE asks for it, when the first group starts. libtorch 2.11 keeps one recorder a
// process, and every group's first collective writes to its table of groups before it takes the recorder's lock: two
// groups that start at the same time on two threads crashed 13 of 120 runs (so groups that share a recorder start
// their operations one after the other, see serialise). It also costs each collective a captured stack.
var FlightRecorderSize = sync.OnceValue(func() int {
	for _, name := range []string{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} {
		if text, set := os.LookupEnv(name); set {
			n, err := strconv.Atoi(text)
			if err != nil {
				return 0
			}
			return n
		}
	}
	_ = os.Setenv("TORCH_FR_BUFFER_SIZE", "0")
	return 0
})

func (p *ProcessGroup) serialise() error {
	return done("serialise", C.tdp_pg_serialise_starts(p.h, flag(FlightRecorderSize() > 0)), p)
}

func storeHandle(s *Store) *C.tdp_store {
	if s == nil {
		return nil
	}
	return s.h
}

// AddGloo connects to all peers and serves tensors on dev.
func (p *ProcessGroup) AddGloo(dev DeviceType, store *Store, o GlooOptions) error {
	_ = FlightRecorderSize()
	ifs, freeIfs := cstrings(o.Interfaces)
	defer freeIfs()
	hosts, freeHosts := cstrings(o.Hostnames)
	defer freeHosts()
	rec := C.tdp_pg_add_gloo(p.h, C.int32_t(dev), store.h, storeHandle(o.Helper), ints(o.GlobalRanks), millis(o.Timeout),
		ifs, C.int32_t(len(o.Interfaces)), hosts, C.int32_t(len(o.Hostnames)), C.int32_t(o.Threads))
	if err := done("gloo", rec, p, store, o.Helper); err != nil {
		return err
	}
	return p.serialise()
}

// AddNCCL serves CUDA tensors.
func (p *ProcessGroup) AddNCCL(store *Store, o NCCLOptions) error {
	rec := C.tdp_pg_add_nccl(p.h, store.h, storeHandle(o.Helper), ints(o.GlobalRanks), millis(o.Timeout),
		flag(o.HighPriority), C.int32_t(o.BoundDevice))
	if err := done("nccl", rec, p, store, o.Helper); err != nil {
		return err
	}
	return p.serialise()
}

// SplitNCCL makes p's NCCL backend a part of parent's. ranks are the parent's. p is nil on ranks that are in no part.
func (p *ProcessGroup) SplitNCCL(parent *ProcessGroup, store *Store, ranks []int32, timeout time.Duration) error {
	var h *C.tdp_pg
	if p != nil {
		h = p.h
	}
	rec := C.tdp_pg_split_nccl(h, parent.h, store.h, (*C.int32_t)(unsafe.SliceData(ranks)), C.int32_t(len(ranks)), millis(timeout))
	return done("split", rec, p, parent, store)
}

// ShareBackend lets the backend of other serve dev as well.
func (p *ProcessGroup) ShareBackend(dev, other DeviceType) error {
	return done("share backend", C.tdp_pg_share_backend(p.h, C.int32_t(dev), C.int32_t(other)), p)
}

// SetDefaultBackend names the backend of operations without a device.
func (p *ProcessGroup) SetDefaultBackend(b Backend) error {
	return done("default backend", C.tdp_pg_set_default_backend(p.h, C.int32_t(b)), p)
}

// SetTimeout changes the timeout of later operations.
func (p *ProcessGroup) SetTimeout(d time.Duration) error {
	return done("set timeout", C.tdp_pg_set_timeout(p.h, millis(d)), p)
}

// Health tells what NCCL's watchdog saw.
func (p *ProcessGroup) Health() error {
	var out C.int32_t
	if err := done("health", C.tdp_pg_health(p.h, &out), p); err != nil {
		return err
	}
	switch out {
	case 0:
		return nil
	case 1:
		return &Error{Message: "the watchdog saw an operation time out", kind: ErrTimeout}
	case 3:
		return &Error{Message: "a peer reported a failure", kind: ErrPeer}
	}
	return &Error{Message: "the communicator failed", kind: ErrBackend}
}

// Abort ends operations in flight with an error, where the backend can.
func (p *ProcessGroup) Abort() error { return done("abort", C.tdp_pg_abort(p.h), p) }

// Shutdown waits for operations in flight and closes the connections.
func (p *ProcessGroup) Shutdown() error { return done("shutdown", C.tdp_pg_shutdown(p.h), p) }

// Close joins the backend's threads and closes its connections.
func (p *ProcessGroup) Close() error {
	h := p.h
	p.h = nil
	return done("close process group", C.tdp_pg_free(h), p)
}

// Handles is a list of tensors prepared for C. It keeps the tensors alive.
type Handles struct {
	tensors []*ts.Tensor
	c       []C.tdp_tensor
}

// NewHandles prepares a list once for many calls.
func NewHandles(tensors []*ts.Tensor) *Handles {
	h := &Handles{tensors: tensors, c: make([]C.tdp_tensor, len(tensors))}
	for i, t := range tensors {
		h.c[i] = handle(t)
	}
	return h
}

// Tensors gives the list.
func (h *Handles) Tensors() []*ts.Tensor { return h.tensors }

func (h *Handles) ptr() *C.tdp_tensor { return unsafe.SliceData(h.c) }
func (h *Handles) n() C.int32_t       { return C.int32_t(len(h.c)) }

// State of an operation in a group's history.
type State int32

// What became of an operation.
const (
	Issued State = C.TDP_HISTORY_ISSUED // started; nobody has waited for it yet
	Done   State = C.TDP_HISTORY_DONE
	Failed State = C.TDP_HISTORY_FAILED
)

// OpMonitoredBarrier is the number of monitored_barrier, which c10d gives none.
const OpMonitoredBarrier = C.TDP_OP_MONITORED_BARRIER

// HistoryEntry is an operation that a group started.
type HistoryEntry struct {
	Seq     uint64 // counts collectives from 1, and apart from them sends and receives
	Site    uintptr
	Age     time.Duration
	Op      int // c10d::OpType
	State   State
	DType   gotch.DType // of the first tensor; < 0: there is none
	Shape   []int64     // of the first tensor; at most six dimensions
	Dims    int
	Tensors int
	Peer    int // root, source or destination; < 0: none
}

// History gives the group's last operations, oldest first.
func (p *ProcessGroup) History() ([]HistoryEntry, error) {
	buf := make([]C.tdp_history_entry, C.TDP_HISTORY_SIZE)
	var n C.int32_t
	if err := done("history", C.tdp_pg_history(p.h, &buf[0], &n), p); err != nil {
		return nil, err
	}
	list := make([]HistoryEntry, n)
	for i := range list {
		e := &buf[i]
		list[i] = HistoryEntry{
			Seq: uint64(e.seq), Site: uintptr(e.site), Age: time.Duration(e.age_us) * time.Microsecond, Op: int(e.op),
			State: State(e.state), DType: gotch.DType(e.dtype), Dims: int(e.ndim), Tensors: int(e.tensors), Peer: int(e.peer),
		}
		for d := range min(int(e.ndim), C.TDP_HISTORY_DIMS) {
			list[i].Shape = append(list[i].Shape, int64(e.sizes[d]))
		}
	}
	return list, nil
}

// FlightRecorderDump is libtorch's flight recorder of this process: JSON, or the pickle its analyser reads.
func FlightRecorderDump(nccl, json, collectives, stacks, onlyActive bool) ([]byte, error) {
	var b C.tdp_bytes
	rec := C.tdp_flight_recorder_dump(flag(nccl), flag(json), flag(collectives), flag(stacks), flag(onlyActive), &b)
	if err := done("flight recorder", rec); err != nil {
		return nil, err
	}
	return take(&b), nil
}

// SetDebugLevel is c10d's: 0 off, 1 info, 2 detail.
func SetDebugLevel(level int) error {
	return done("debug level", C.tdp_set_debug_level(C.int32_t(level)))
}
