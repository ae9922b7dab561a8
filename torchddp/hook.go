package torchddp

import (
	"strconv"
	"strings"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch/ts"
)

// GradBucket is a bucket of gradients that a communication hook is to reduce. Its Index counts buckets in the order
// of their reduction, Last marks the last one; Buffer is all its gradients as one flat tensor, Gradients gives them
// one by one as views of the buffer, with their parameters. It is valid during the hook's call.
type GradBucket = tdp.Bucket

// Future is a tensor that a communication hook promises.
type Future struct{ f *tdp.Future }

// CommHook reduces one bucket of gradients in place of DDP's own averaging. The bucket is not divided by the number
// of ranks. The future's tensor has the shape of the bucket's buffer, and becomes the gradients.
//
// It runs on a thread of autograd, several buckets possibly in flight at once: start a collective, and do not wait
// for it. Collectives are started in the same order on all ranks.
type CommHook func(bucket *GradBucket) (Future, error)

// ReadyFuture is a future that holds t already.
func ReadyFuture(t *ts.Tensor) (Future, error) {
	f, err := tdp.ReadyFuture(t)
	return Future{f}, err
}

// Future is the collective's tensor once it is done.
func (w *Work) Future() (Future, error) {
	f, err := w.w.Future()
	return Future{f}, err
}

// Then is the future of fn's result. fn runs on the thread that completes the first one; what it is given is its own.
func (f Future) Then(fn func(*ts.Tensor) (*ts.Tensor, error)) (Future, error) {
	next, err := f.f.Then(fn)
	return Future{next}, err
}

// BuiltinCommHook is a communication hook that is there already, in C++.
type BuiltinCommHook = tdp.BuiltinHook

// The hooks that are there already.
const (
	AllReduceHook    = tdp.HookAllReduce // divide, then all-reduce: what DDP does anyway
	FP16CompressHook = tdp.HookFP16      // send float16
	BF16CompressHook = tdp.HookBF16      // send bfloat16
)

// RegisterCommHook lets a Go function reduce the gradients. It can be done once, before the first backward. name
// stands in the logging data.
func (d *DDP) RegisterCommHook(name string, hook CommHook) error {
	if d.reducer == nil {
		return d.errorf("register communication hook", errClosedDDP)
	}
	if hook == nil {
		return d.errorf("register communication hook", valueErrorf("the hook is nil"))
	}
	err := d.reducer.Hook(func(b *tdp.Bucket) (*tdp.Future, error) {
		f, err := hook(b)
		return f.f, err
	}, name)
	if err != nil {
		return d.explain("register communication hook", err)
	}
	return nil
}

// RegisterBuiltinCommHook picks one of the hooks in C++. It can be done once, before the first backward.
func (d *DDP) RegisterBuiltinCommHook(hook BuiltinCommHook) error {
	if d.reducer == nil {
		return d.errorf("register communication hook", errClosedDDP)
	}
	name := map[BuiltinCommHook]string{AllReduceHook: "ALLREDUCE", FP16CompressHook: "FP16_COMPRESS", BF16CompressHook: "BF16_COMPRESS"}[hook]
	return d.pg.run("register communication hook", func(pg *tdp.ProcessGroup) error { return d.reducer.BuiltinHook(pg, hook, name) })
}

// LoggingData is what PyTorch's DDP tells of itself. Fields hold the numbers that programs look at; Raw has all that
// c10d gives, by its names.
type LoggingData struct {
	WorldSize, Rank, Iteration                           int
	NumParameterTensors, TotalParameterSizeBytes         int
	BackendName, ModuleName, CommHook                    string
	BucketCapBytes                                       int
	BucketSizes, RebuiltBucketSizes                      []int // bytes, in the order of reduction
	HasRebuiltBuckets, StaticGraph, FindUnusedParameters bool
	GradientAsBucketView, HasSyncBN, JoinUnevenInputs    bool
	NumBucketsReduced, UnusedParameterSize               int
	Error                                                string

	// Times in nanoseconds, of the last iteration that was measured and on average.
	ForwardComputeTime, BackwardComputeTime, BackwardCommTime, BackwardComputeCommOverlapTime             int64
	AvgForwardComputeTime, AvgBackwardComputeTime, AvgBackwardCommTime, AvgBackwardComputeCommOverlapTime int64

	Raw map[string]string
}

// LoggingData reads the reducer's record. It may be read at any time between iterations.
func (d *DDP) LoggingData() (LoggingData, error) {
	if d.reducer == nil {
		return LoggingData{}, d.errorf("logging data", errClosedDDP)
	}
	raw, err := d.reducer.LoggingData()
	if err != nil {
		return LoggingData{}, d.errorf("logging data", err)
	}
	num := func(name string) int64 {
		n, _ := strconv.ParseInt(raw[name], 10, 64)
		return n
	}
	list := func(name string) (out []int) {
		for _, field := range strings.FieldsFunc(raw[name], func(r rune) bool { return r == ',' || r == ' ' }) {
			if n, err := strconv.Atoi(field); err == nil {
				out = append(out, n)
			}
		}
		return out
	}
	return LoggingData{
		WorldSize: int(num("world_size")), Rank: int(num("rank")), Iteration: int(num("iteration")),
		NumParameterTensors: int(num("num_parameter_tensors")), TotalParameterSizeBytes: int(num("total_parameter_size_bytes")),
		BackendName: raw["backend_name"], ModuleName: raw["module_name"], CommHook: raw["comm_hook"],
		BucketCapBytes: int(num("bucket_cap_bytes")), BucketSizes: list("bucket_sizes"), RebuiltBucketSizes: list("rebuilt_bucket_sizes"),
		HasRebuiltBuckets: num("has_rebuilt_buckets") != 0, StaticGraph: num("static_graph") != 0,
		FindUnusedParameters: num("find_unused_parameters") != 0, GradientAsBucketView: num("gradient_as_bucket_view") != 0,
		HasSyncBN: num("has_sync_bn") != 0, JoinUnevenInputs: num("join_uneven_inputs") != 0,
		NumBucketsReduced: int(num("num_buckets_reduced")), UnusedParameterSize: int(num("unused_parameter_size")), Error: raw["error"],
		ForwardComputeTime: num("forward_compute_time"), BackwardComputeTime: num("backward_compute_time"),
		BackwardCommTime: num("backward_comm_time"), BackwardComputeCommOverlapTime: num("backward_compute_comm_overlap_time"),
		AvgForwardComputeTime: num("avg_forward_compute_time"), AvgBackwardComputeTime: num("avg_backward_compute_time"),
		AvgBackwardCommTime: num("avg_backward_comm_time"), AvgBackwardComputeCommOverlapTime: num("avg_backward_compute_comm_overlap_time"),
		Raw: raw,
	}, nil
}

// SetLoggingSampleRate says how often times are taken after the first 10 iterations; PyTorch's default is 100.
func (d *DDP) SetLoggingSampleRate(rate int) error {
	if d.reducer == nil {
		return d.errorf("logging sample rate", errClosedDDP)
	}
	if rate < 1 {
		return d.errorf("logging sample rate", valueErrorf("DDP runtime logging sample rate should be equal or greater than 1, got %d", rate))
	}
	return d.reducer.SetSampleRate(rate)
}
