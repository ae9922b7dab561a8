package torchddp

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
	"go.uber.org/multierr"
)

// Module is a model as DDP sees it. Package models has them; gotch models are adapted there.
type Module interface {
	// NamedParameters yields all parameters, in the order of their registration, shared ones once. Every rank must
	// yield the same order.
	NamedParameters() iter.Seq2[string, *ts.Tensor]
	// NamedBuffers yields all buffers, such as batch norm's running means, in the same way.
	NamedBuffers() iter.Seq2[string, *ts.Tensor]
	// ForwardT computes the output. Like gotch's Must functions it panics with an error.
	ForwardT(x *ts.Tensor, train bool) *ts.Tensor
}

// SparseModule is a Module some of whose parameters get sparse gradients, such as embeddings.
type SparseModule interface {
	// SparseParameters yields their names.
	SparseParameters() iter.Seq[string]
}

// Named is a tensor with its name in the model.
type Named struct {
	Name   string
	Tensor *ts.Tensor
}

// BufferMode says what becomes of a buffer before each training forward.
type BufferMode int

// The buffer modes.
const (
	BufferBroadcast BufferMode = iota // every rank gets rank 0's
	BufferAverage                     // every rank gets the mean of all (integers: rank 0's)
	BufferLocal                       // every rank keeps its own
)

// DDPOptions are the options of PyTorch's DistributedDataParallel. The zero value is PyTorch's default.
type DDPOptions struct {
	// BucketCapMB is the size of gradient buckets in MiB; 0 is 25, with a first bucket of 1 MiB.
	BucketCapMB float64
	// FirstBucketMB is the size of the bucket that is reduced first; 0 is 1 MiB, or BucketCapMB where that is set.
	FirstBucketMB float64
	// FindUnusedParameters looks in every forward for parameters that the outputs do not depend on, and does not
	// wait for their gradients. It costs a walk over the graph.
	FindUnusedParameters bool
	// GradientAsBucketView lets gradients be views of the buckets, which saves their memory once.
	GradientAsBucketView bool
	// StaticGraph promises that every iteration uses the same parameters in the same way, which allows unused
	// parameters, parameters used several times, and checkpointing inside the model.
	StaticGraph bool
	// Buffers is what becomes of buffers before each training forward, and BufferModes that of single ones by name.
	Buffers     BufferMode
	BufferModes map[string]BufferMode
	// Ignore names parameters and buffers that DDP leaves alone: neither checked nor broadcast nor reduced.
	Ignore []string
	// MixedPrecision lets the model compute in a smaller type.
	MixedPrecision *MixedPrecision
	// DelayAllReduce names parameters that are not reduced in buckets but all at once, when the backward has computed
	// the gradient of the parameter that DelayUntil names, which must be the last of them or a later one: it lets
	// PyTorch users reduce a shared embedding behind the rest. Their gradients are views of one buffer.
	DelayAllReduce []string
	DelayUntil     string
	// NoInitSync skips the check and the broadcast of weights. The caller answers for equal models.
	NoInitSync bool
	// AuditEvery compares parameters and buffers of all ranks by hash in every so many training forwards; 0 is never.
	// A difference is an [*AuditError].
	AuditEvery int
	// AuditAlso yields more tensors to compare, such as an optimizer's state.
	AuditAlso func() iter.Seq2[string, *ts.Tensor]
}

const (
	mib                  = 1 << 20
	defaultBucketMB      = 25
	defaultFirstBucketMB = 1
	broadcastBucketBytes = 250 * mib
	unlimitedBucket      = math.MaxInt64 // one bucket for all: Python's sys.maxsize
)

// pendingBackward is what the last forward expects of the next backward.
type pendingBackward int

const (
	noBackward     pendingBackward = iota // no forward since the last backward
	syncedBackward                        // the reducer is armed
	localBackward                         // the forward was in NoSync
)

// DDP is PyTorch's DistributedDataParallel: it keeps a model equal on all ranks by averaging gradients in Backward.
//
// Construction, Forward and Backward are meeting points: every rank makes the same calls. Do not add, drop or freeze
// parameters afterwards. A DDP is used by one goroutine at a time.
type DDP struct {
	module  Module
	pg      *ProcessGroup
	options DDPOptions
	reducer *tdp.Reducer
	params  []Named // those that are trained, in the reducer's order
	delayed []Named // those that are trained, but not in its buckets
	handles *tdp.Handles
	device  gotch.Device

	delayedHandles *tdp.Handles

	syncGrads   bool // false inside NoSync
	syncBuffers bool // whether the next forward makes buffers equal
	breathed    time.Time
	pending     pendingBackward
	forwards    int     // training forwards so far, for AuditEvery
	weight      float64 // sum of BackwardWeighted's weights since the last synchronised backward
	join        *joinState
	optimizer   BackwardOptimizer // nil: the caller steps
}

// NewDDP wraps a model whose parameters already lie on the rank's device. All ranks must call it.
//
// Where the ranks' models differ, every rank gets the same [*MismatchError].
func NewDDP(module Module, pg *ProcessGroup, options DDPOptions) (*DDP, error) {
	d := &DDP{module: module, pg: pg, options: options, syncGrads: true, syncBuffers: true}
	if pg == nil {
		return nil, valueErrorf("DistributedDataParallel: the process group is nil")
	}
	fail := func(err error) (*DDP, error) {
		return nil, fmt.Errorf("rank %d: DistributedDataParallel: %w", pg.rank, err)
	}
	sig, err := d.inspect()
	if err != nil {
		if options.NoInitSync {
			return fail(err)
		}
		// The others are about to meet us: tell them instead of leaving them waiting.
		sig = signature{Problem: err.Error()}
	}
	if !options.NoInitSync {
		if err := pg.checkSameModel(sig, d.handles); err != nil {
			return fail(err)
		}
		if err := d.broadcastState(0); err != nil {
			return fail(err)
		}
	}
	if err := d.makeReducer(); err != nil {
		return fail(err)
	}
	wrapped.add(d)
	return d, nil
}

func (d *DDP) ignored(name string) bool { return slices.Contains(d.options.Ignore, name) }

// parameters yields the parameters that DDP looks after.
func (d *DDP) parameters() iter.Seq2[string, *ts.Tensor] {
	return d.without(d.module.NamedParameters())
}

// buffers yields the buffers that DDP looks after. They are read anew each time: a model may replace one.
func (d *DDP) buffers() iter.Seq2[string, *ts.Tensor] { return d.without(d.module.NamedBuffers()) }

func (d *DDP) without(seq iter.Seq2[string, *ts.Tensor]) iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		for name, t := range seq {
			if !d.ignored(name) && !yield(name, t) {
				return
			}
		}
	}
}

// inspect reads the model and the options, and fills in what the reducer needs.
func (d *DDP) inspect() (signature, error) {
	d.handles = tdp.NewHandles(nil)
	o := d.options
	sig := signature{Options: fmt.Sprintf("bucket_cap_mb=%v first_bucket_mb=%v find_unused_parameters=%t gradient_as_bucket_view=%t static_graph=%t buffers=%d%v ignore=%q mixed_precision=%v delay=%q until=%q",
		o.BucketCapMB, o.FirstBucketMB, o.FindUnusedParameters, o.GradientAsBucketView, o.StaticGraph, o.Buffers, o.BufferModes, o.Ignore,
		o.MixedPrecision, o.DelayAllReduce, o.DelayUntil)}
	if d.module == nil {
		return sig, valueErrorf("the module is nil")
	}
	switch {
	case !(o.BucketCapMB >= 0) || math.IsInf(o.BucketCapMB, 0):
		return sig, valueErrorf("BucketCapMB must not be negative, got %v", o.BucketCapMB)
	case !(o.FirstBucketMB >= 0) || math.IsInf(o.FirstBucketMB, 0):
		return sig, valueErrorf("FirstBucketMB must not be negative, got %v", o.FirstBucketMB)
	case o.AuditEvery < 0:
		return sig, valueErrorf("AuditEvery must not be negative, got %d", o.AuditEvery)
	}
	if err := o.MixedPrecision.check(o); err != nil {
		return sig, err
	}
	known := map[string]bool{}
	first := map[string]string{} // device -> the first parameter on it
	var devices []string
	for name, t := range d.module.NamedParameters() {
		if known[name] {
			return sig, valueErrorf("two parameters are named %q", name)
		}
		known[name] = true
		if d.ignored(name) {
			continue
		}
		shape, device, err := describe(Named{name, t})
		if err != nil {
			return sig, err
		}
		if where := deviceName(device); first[where] == "" {
			first[where] = name
			devices = append(devices, where)
			d.device = device
		}
		if shape.RequiresGrad && slices.Contains(o.DelayAllReduce, name) {
			// Compared with the frozen ones: the reducer's own collectives do not know it.
			sig.Frozen = append(sig.Frozen, shape)
			d.delayed = append(d.delayed, Named{name, t})
		} else if shape.RequiresGrad {
			sig.Params = append(sig.Params, shape)
			d.params = append(d.params, Named{name, t})
		} else {
			sig.Frozen = append(sig.Frozen, shape)
		}
	}
	for name, t := range d.module.NamedBuffers() {
		known[name] = true
		if d.ignored(name) {
			continue
		}
		shape, _, err := describe(Named{name, t})
		if err != nil {
			return sig, err
		}
		sig.Buffers = append(sig.Buffers, shape)
	}
	for _, name := range o.Ignore {
		if !known[name] {
			return sig, valueErrorf("Ignore names %q, which the model does not have", name)
		}
	}
	for name := range o.BufferModes {
		if !known[name] {
			return sig, valueErrorf("BufferModes names %q, which the model does not have", name)
		}
	}
	if err := d.checkDelay(known); err != nil {
		return sig, err
	}
	if len(d.params) == 0 {
		return sig, valueErrorf("DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient")
	}
	if len(devices) > 1 {
		return sig, valueErrorf("the module's parameters lie on several devices: %q on %s, %q on %s; move the whole module to one",
			first[devices[0]], devices[0], first[devices[1]], devices[1])
	}
	d.handles, d.delayedHandles = handlesOf(d.params), handlesOf(d.delayed)
	return sig, nil
}

func handlesOf(list []Named) *tdp.Handles {
	tensors := make([]*ts.Tensor, len(list))
	for i, p := range list {
		tensors[i] = p.Tensor
	}
	return tdp.NewHandles(tensors)
}

func deviceName(d gotch.Device) string {
	if d.Name == "CUDA" {
		return "cuda:" + strconv.Itoa(d.Value)
	}
	return "cpu"
}

func (d *DDP) bufferMode(name string) BufferMode {
	if m, ok := d.options.BufferModes[name]; ok {
		return m
	}
	return d.options.Buffers
}

// broadcastState gives all ranks root's parameters, frozen ones too, and the buffers that are not local.
func (d *DDP) broadcastState(root int) error {
	var tensors []*ts.Tensor
	for _, t := range d.parameters() {
		tensors = append(tensors, t)
	}
	for name, t := range d.buffers() {
		if d.bufferMode(name) != BufferLocal {
			tensors = append(tensors, t)
		}
	}
	return d.pg.run("broadcasting the model", func(pg *tdp.ProcessGroup) error {
		return pg.BroadcastCoalesced(tdp.NewHandles(tensors), broadcastBucketBytes, root)
	})
}

func (d *DDP) makeReducer() error {
	o := d.options
	bucketMB := orDefault(o.BucketCapMB, defaultBucketMB)
	firstMB := o.FirstBucketMB
	if firstMB == 0 {
		firstMB = defaultFirstBucketMB
		if o.BucketCapMB > 0 {
			firstMB = bucketMB
		}
	}
	bytes := func(mb float64) int64 { return max(1, int64(mb*mib)) }
	// In the first iteration the order of gradients is not known yet. Python begins with one bucket, unless unused
	// parameters are looked for: then it never cuts anew.
	limits := []int64{unlimitedBucket}
	if o.FindUnusedParameters && !o.StaticGraph {
		limits = []int64{bytes(firstMB), bytes(bucketMB)}
		if firstMB == bucketMB {
			limits = limits[1:]
		}
	}
	var sparse []bool
	if m, ok := d.module.(SparseModule); ok {
		sparse = make([]bool, len(d.params))
		for name := range m.SparseParameters() {
			if i := slices.IndexFunc(d.params, func(p Named) bool { return p.Name == name }); i >= 0 {
				sparse[i] = true
			}
		}
	}
	names := make([]string, len(d.params))
	for i, p := range d.params {
		names[i] = p.Name
	}
	index := -1
	if d.device.Name == "CUDA" {
		index = d.device.Value
	}
	err := d.pg.run("making the reducer", func(pg *tdp.ProcessGroup) (err error) {
		d.reducer, err = tdp.NewReducer(pg, d.handles, tdp.ReducerOptions{
			Names: names, ExpectSparse: sparse, BucketLimits: limits, BucketBytes: bytes(bucketMB), FirstBucketBytes: bytes(firstMB),
			FindUnused: o.FindUnusedParameters, BucketView: o.GradientAsBucketView, StaticGraph: o.StaticGraph,
			DeviceIndex: index, ModuleName: strings.TrimPrefix(fmt.Sprintf("%T", d.module), "*"),
			BroadcastBuffers: o.Buffers != BufferLocal, HasSyncBN: hasSyncBatchNorm(d.module),
		})
		return err
	})
	if err != nil {
		return err
	}
	if err = d.startMixed(); err == nil {
		err = d.startDelay()
	}
	if err != nil {
		return multierr.Append(err, d.reducer.Close())
	}
	return nil
}

// Module is the wrapped model. Save its state, and evaluate with it: it never communicates.
func (d *DDP) Module() Module { return d.module }

// ProcessGroup is the group whose ranks hold the model.
func (d *DDP) ProcessGroup() *ProcessGroup { return d.pg }

// NamedParameters are the model's.
func (d *DDP) NamedParameters() iter.Seq2[string, *ts.Tensor] { return d.module.NamedParameters() }

// NamedBuffers are the model's.
func (d *DDP) NamedBuffers() iter.Seq2[string, *ts.Tensor] { return d.module.NamedBuffers() }

func (d *DDP) errorf(op string, err error) error {
	return &RankError{Rank: d.pg.rank, Op: op, Err: err}
}

var errClosedDDP = valueErrorf("the DDP module is closed")

// Forward computes the model's output for a training step: all ranks call it. Panics of the model become errors.
func (d *DDP) Forward(x *ts.Tensor) (*ts.Tensor, error) {
	x, free, err := d.lowered(x)
	if err != nil {
		return nil, err
	}
	defer free()
	var out *ts.Tensor
	_, err = d.Run(func() ([]*ts.Tensor, error) {
		out = d.module.ForwardT(x, true)
		return []*ts.Tensor{out}, nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// Run is Forward for models with several inputs or outputs: forward computes the outputs that the loss will use, by
// whatever methods the model has. Panics in it become errors.
func (d *DDP) Run(forward func() ([]*ts.Tensor, error)) ([]*ts.Tensor, error) {
	if d.reducer == nil {
		return nil, d.errorf("forward", errClosedDDP)
	}
	outputs, backward, err := d.run(forward)
	if err != nil || !backward {
		// What MixedPrecision lowered is otherwise restored after the backward.
		err = multierr.Append(err, d.reducer.Restore())
	}
	if err != nil {
		return nil, err
	}
	return outputs, nil
}

// run tells whether a backward is to follow.
func (d *DDP) run(forward func() ([]*ts.Tensor, error)) (outputs []*ts.Tensor, backward bool, err error) {
	grad, err := d.preForward()
	if err != nil {
		return nil, false, err
	}
	if outputs, err = protect(forward); err != nil {
		return nil, false, d.errorf("forward of the model", err)
	}
	// The flag is Python's: a forward without a synchronised backward lets the next one leave the buffers.
	d.syncBuffers = grad && d.syncGrads
	switch {
	case d.syncBuffers:
		var watched []*ts.Tensor // others need not know of the backward
		if d.options.FindUnusedParameters || d.options.StaticGraph {
			watched = outputs
		}
		if err := d.reducer.PostForward(watched); err != nil {
			return nil, false, d.explain("forward", err)
		}
		d.pending = syncedBackward
	case grad:
		d.pending = localBackward
	}
	return outputs, grad, nil
}

func (d *DDP) preForward() (grad bool, err error) {
	err = d.pg.run("forward", func(pg *tdp.ProcessGroup) error {
		join := tdp.Join{Device: d.device}
		if d.join != nil {
			join.Group, join.DivideBySize = pg, !d.join.options.DivideByActive
		}
		grad, _, err = d.reducer.PreForward(d.syncGrads, join)
		return err
	})
	if err != nil {
		return false, d.explain("forward", err)
	}
	if err := d.join.checkEarlyEnd(d); err != nil {
		return false, err
	}
	if err := d.equalizeBuffers(); err != nil {
		return false, err
	}
	if err := d.join.tellSync(d, d.syncGrads); err != nil {
		return false, err
	}
	if every := d.options.AuditEvery; every > 0 && grad {
		if d.forwards++; d.forwards%every == 0 {
			if err := d.Audit(); err != nil {
				return false, err
			}
		}
	}
	return grad, nil
}

// ForwardT makes DDP a gotch ts.ModuleT. Training it is Forward, with a panic for an error; otherwise it is the
// model's own forward, without communication: one rank alone may evaluate.
func (d *DDP) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	if !train {
		return d.module.ForwardT(x, false)
	}
	out, err := d.Forward(x)
	if err != nil {
		panic(err)
	}
	return out
}

// equalizeBuffers makes the buffers equal where that is due.
func (d *DDP) equalizeBuffers() error {
	if !d.syncBuffers {
		return nil
	}
	return d.equalizeBuffersFrom(func() (int, error) { return d.join.bufferRoot(d) })
}

// buffersByMode lists the buffers to make equal.
func (d *DDP) buffersByMode() (broadcast, average []*ts.Tensor) {
	// In every step: without names where the options have none and the model can.
	m, quick := d.module.(interface{ Buffers() iter.Seq[*ts.Tensor] })
	if quick && len(d.options.Ignore) == 0 && len(d.options.BufferModes) == 0 {
		var all []*ts.Tensor
		if d.options.Buffers != BufferLocal {
			all = slices.Collect(m.Buffers())
		}
		if d.options.Buffers == BufferAverage {
			return nil, all
		}
		return all, nil
	}
	for name, t := range d.buffers() {
		switch d.bufferMode(name) {
		case BufferBroadcast:
			broadcast = append(broadcast, t)
		case BufferAverage:
			average = append(average, t)
		}
	}
	return broadcast, average
}

// equalizeBuffersFrom gives all ranks the buffers of the rank that root finds.
func (d *DDP) equalizeBuffersFrom(findRoot func() (int, error)) error {
	broadcast, average := d.buffersByMode()
	if len(broadcast)+len(average) == 0 {
		return nil
	}
	root, err := findRoot()
	if err != nil {
		return err
	}
	return d.pg.run("making buffers equal", func(pg *tdp.ProcessGroup) error {
		for i, list := range [][]*ts.Tensor{broadcast, average} {
			if len(list) == 0 {
				continue
			}
			if err := pg.SyncBuffers(tdp.NewHandles(list), i == 1, broadcastBucketBytes, root); err != nil {
				return err
			}
		}
		return nil
	})
}

// ErrSync is wrapped by errors about a backward whose gradients PyTorch would silently leave unaveraged, or average
// although NoSync was asked for.
var ErrSync = errors.New("forward and backward do not belong together")

// checkPending refuses a backward that does not fit the last forward.
func (d *DDP) checkPending() error {
	switch {
	case d.reducer == nil:
		return errClosedDDP
	case d.syncGrads && d.pending == localBackward:
		return fmt.Errorf("%w: the forward ran inside NoSync and the backward outside, so its gradients would stay this rank's own; put both on the same side", ErrSync)
	case d.syncGrads && d.pending == noBackward:
		return fmt.Errorf("%w: there was no forward through DDP since the last backward, whose reduction is over: the gradients of this one would be added without averaging. Sum the losses and run one backward, or accumulate inside NoSync", ErrSync)
	case !d.syncGrads && d.pending == syncedBackward:
		return fmt.Errorf("%w: the forward ran outside NoSync and the backward inside, so its gradients would be averaged; put both on the same side", ErrSync)
	}
	return nil
}

// Backward computes the gradients of loss, averaged over all ranks (in NoSync: this rank's own). After an error the
// gradients are not to be used.
func (d *DDP) Backward(loss *ts.Tensor) error { return Backward(loss, d) }

// Backward computes the gradients of a loss that several DDP modules took part in.
func Backward(loss *ts.Tensor, modules ...*DDP) error {
	for _, d := range modules {
		if err := d.checkPending(); err != nil {
			return d.errorf("backward", err)
		}
	}
	for _, d := range modules {
		if d.optimizer == nil || !d.syncGrads {
			continue
		}
		if _, err := d.optimizer.ForReducer(); err != nil {
			return d.errorf("backward", fmt.Errorf("the optimizer that steps in it: %w", err))
		}
	}
	var failed error
	for i, d := range modules {
		d.pending = noBackward
		var err error
		switch {
		case failed != nil:
			err = d.reducer.Restore()
		case i == 0:
			// The first call computes; the further ones only look whether their reducer has finished.
			err = tdp.Backward(loss, nil, false, d.reducer)
		default:
			err = d.reducer.EndBackward()
		}
		if err != nil && failed == nil {
			failed = d.explain("backward", err)
		}
	}
	for _, d := range modules {
		d.breathe()
	}
	return failed
}

// breathe gives Go's scheduler a turn every few milliseconds. A goroutine that goes from one call of C to the next for
// 10 ms without one looks stuck to the runtime's monitor, which then wakes up 2,000 times a second to take the processor
// away from it, on the core that trains if the rank has only that: 4 to 5 % of a short iteration.
func (d *DDP) breathe() {
	if now := time.Now(); now.Sub(d.breathed) > 6*time.Millisecond {
		d.breathed = now
		runtime.Gosched()
	}
}

// BackwardWeighted is Backward for batches of unequal weight, such as numbers of samples or tokens: loss is the mean
// over this rank's batch, and the gradients become the mean over the batches of all ranks, and of all NoSync steps
// since the last synchronised backward, by weight. Use it for every backward of an accumulation or for none.
func (d *DDP) BackwardWeighted(loss *ts.Tensor, weight float64) error {
	if !(weight >= 0) || math.IsInf(weight, 0) {
		return d.errorf("backward", valueErrorf("the weight must be a finite number that is not negative, got %v", weight))
	}
	if d.optimizer != nil {
		return d.errorf("backward", valueErrorf("BackwardWeighted scales gradients after the backward, where StepInBackward has used them: choose one"))
	}
	scaled, err := protect(func() (*ts.Tensor, error) { return loss.MulScalar(ts.FloatScalar(weight), false) })
	if err != nil {
		return d.errorf("backward", err)
	}
	defer scaled.MustDrop()
	sync := d.syncGrads
	if err := d.Backward(scaled); err != nil {
		return err
	}
	d.weight += weight
	if !sync {
		return nil
	}
	total, err := reduceOne(d.pg, "adding up", d.weight, Sum)
	d.weight = 0
	if err != nil {
		return err
	}
	if total == 0 {
		return d.errorf("backward", valueErrorf("the weights of all ranks are 0"))
	}
	// DDP has divided the sum by the number of ranks; it is to be divided by the sum of weights.
	for _, list := range []*tdp.Handles{d.handles, d.delayedHandles} {
		if err := tdp.ScaleGradients(list, float64(d.pg.size)/total); err != nil {
			return d.errorf("backward", err)
		}
	}
	return nil
}

// reduceOne reduces one number over all ranks.
func reduceOne[T tdp.Element](p *ProcessGroup, what string, v T, op ReduceOp) (T, error) {
	t, err := tdp.FromSlice([]T{v}, []int64{1}, p.device)
	if err != nil {
		return v, err
	}
	defer t.MustDrop()
	out := []T{v}
	err = p.run(what, func(pg *tdp.ProcessGroup) error {
		if _, err := pg.AllReduce(t, op, 0, false); err != nil {
			return err
		}
		out, err = tdp.ToSlice[T](t)
		return err
	})
	if err != nil {
		return v, err
	}
	return out[0], nil
}

// NoSync runs fn without averaging gradients: each rank accumulates its own, and the first synchronised backward
// after it averages the sum. Forward and backward both have to be inside.
func (d *DDP) NoSync(fn func() error) error {
	before := d.syncGrads
	d.syncGrads = false
	defer func() { d.syncGrads = before }()
	return fn()
}

// UpdateProcessGroup goes on with another group of the same ranks or of fewer, for instance after a failure. All of
// its ranks call it. What was begun is forgotten.
func (d *DDP) UpdateProcessGroup(pg *ProcessGroup) error {
	if d.reducer == nil {
		return d.errorf("update process group", errClosedDDP)
	}
	err := pg.run("update process group", func(h *tdp.ProcessGroup) error { return d.reducer.UpdateGroup(h) })
	if err != nil {
		return err
	}
	d.pg, d.pending, d.syncBuffers, d.weight = pg, noBackward, true, 0
	return d.broadcastState(0)
}

// Close takes DDP's hooks off the parameters. The model and its gradients stay usable.
func (d *DDP) Close() error {
	r := d.reducer
	d.reducer = nil
	if r == nil {
		return nil
	}
	wrapped.remove(d)
	return r.Close()
}

var unusedIndices = regexp.MustCompile(`did not receive grad for rank \d+:((?: \d+)+)`)

// explain gives the reducer's errors the names of parameters.
func (d *DDP) explain(op string, err error) error {
	if m := unusedIndices.FindStringSubmatch(err.Error()); m != nil {
		unused := &UnusedParametersError{Rank: d.pg.rank, FindUnused: d.options.FindUnusedParameters}
		for field := range strings.FieldsSeq(m[1]) {
			if i, convErr := strconv.Atoi(field); convErr == nil && i < len(d.params) {
				unused.Names = append(unused.Names, d.params[i].Name)
			}
		}
		return unused
	}
	var already *RankError
	if errors.As(err, &already) {
		return err
	}
	// A collective that failed shows what all ranks did.
	d.pg.mu.RLock()
	defer d.pg.mu.RUnlock()
	if d.pg.pg == nil {
		return d.errorf(op, err)
	}
	return d.pg.failed(op, err)
}

// PanicError is a panic of a model's forward.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprint(e.Value) }

// Unwrap gives the error that the panic carried, if it did.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// protect turns a panic of fn into an error.
func protect[T any](fn func() (T, error)) (out T, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn()
}

// NoGrad runs fn without recording gradients, on one thread, and restores the mode that was. Do not start goroutines
// inside that compute: they would record.
func NoGrad(fn func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := tdp.SetGradMode(false)
	if err != nil {
		return err
	}
	defer func() {
		if _, restoreErr := tdp.SetGradMode(before); err == nil {
			err = restoreErr
		}
	}()
	return fn()
}

// ManualSeed seeds the default generators of every device, as torch.manual_seed does.
func ManualSeed(seed uint64) error { return tdp.ManualSeed(seed) }

// SetNumThreads sets how many threads one operation may use in this process, as torch.set_num_threads does.
func SetNumThreads(n int) error { return tdp.SetNumThreads(n) }
