package torchddp

import (
	"os"

	"github.com/goddp/goddp/internal/tdp"
)

// NCCLOptions are options of the NCCL backend, beside NCCL's own NCCL_* variables and c10d's TORCH_NCCL_* ones, which
// libtorch reads itself.
//
// c10d watches NCCL's operations on a thread of its own, and by default that thread ends the process when one times
// out or fails. Here it does not, unless KeepWatchdog says so: it aborts the communicator, and the program gets an
// error from the next operation, barrier or [ProcessGroup.Health], after which [ProcessGroup.Rebuild] makes a new
// group. For that these variables are set before the first NCCL group starts, whatever torchrun has put there:
//
//	TORCH_NCCL_ASYNC_ERROR_HANDLING=2   abort the communicator, not the process
//	TORCH_NCCL_ENABLE_MONITORING=0      no second thread that ends the process when the first one hangs
//	TORCH_NCCL_RETHROW_CUDA_ERRORS=0    a CUDA error in the watchdog is the next operation's error
//	TORCH_NCCL_DUMP_ON_TIMEOUT=0        no dump of the flight recorder, for which the watchdog would wait
//	TORCH_NCCL_PROPAGATE_ERROR=1        the other ranks hear of a failure through the store
//
// Others of use, with their defaults: TORCH_NCCL_BLOCKING_WAIT=0 (1: Wait blocks the host and times out there),
// TORCH_NCCL_TRACE_BUFFER_SIZE=2000 (the flight recorder; goddp: 0 unless set), TORCH_NCCL_DESYNC_DEBUG=0,
// TORCH_NCCL_NAN_CHECK=0, TORCH_NCCL_ENABLE_TIMING=0, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=480,
// TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=15000, TORCH_NCCL_COORD_CHECK_MILSEC=1000, TORCH_NCCL_AVOID_RECORD_STREAMS,
// TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK, TORCH_NCCL_CUDA_EVENT_CACHE=1, TORCH_NCCL_RANKS_PER_ROOT.
type NCCLOptions struct {
	// HighPriority runs NCCL on streams of high priority (is_high_priority_stream).
	HighPriority bool
	// Eager binds the group to its device and connects at once instead of at the first collective, as device_id does
	// in Python. Split needs it.
	Eager bool
	// KeepWatchdog leaves the TORCH_NCCL_* variables as they are.
	KeepWatchdog bool
}

func (o NCCLOptions) prepare() {
	if o.KeepWatchdog {
		return
	}
	for _, v := range [][2]string{
		{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"},
		{"TORCH_NCCL_ENABLE_MONITORING", "0"},
		{"TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"},
		{"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},
		{"TORCH_NCCL_PROPAGATE_ERROR", "1"},
	} {
		_ = os.Setenv(v[0], v[1])
	}
}

// FlightRecorderOptions choose what a dump has.
type FlightRecorderOptions struct {
	// NCCL dumps NCCL's recorder instead of the one of CPU backends.
	NCCL bool
	// Pickle gives the format that PyTorch's analyser (torchfrtrace) reads, instead of JSON.
	Pickle bool
	// NoCollectives leaves the single operations out; OnlyActive leaves those out that are done.
	NoCollectives, OnlyActive bool
	// NoStacks leaves stacks out. JSON has none.
	NoStacks bool
}

// FlightRecorderDump gives libtorch's record of what this process's groups did. It is kept only where
// TORCH_FR_BUFFER_SIZE (or TORCH_NCCL_TRACE_BUFFER_SIZE) said how many entries before the first group started.
// The groups' own history, which every timeout prints, needs no such thing: see [ProcessGroup.History].
func FlightRecorderDump(o FlightRecorderOptions) ([]byte, error) {
	if tdp.FlightRecorderSize() <= 0 {
		return nil, &unsupportedError{"the flight recorder is off: set TORCH_FR_BUFFER_SIZE to the number of entries it shall keep, before the program starts"}
	}
	return tdp.FlightRecorderDump(o.NCCL, !o.Pickle, !o.NoCollectives, !o.NoStacks, o.OnlyActive)
}

type unsupportedError struct{ text string }

func (e *unsupportedError) Error() string { return e.text }
func (e *unsupportedError) Unwrap() error { return ErrUnsupported }
