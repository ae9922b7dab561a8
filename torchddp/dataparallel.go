package torchddp

import (
	"fmt"
	"iter"
	"runtime"
	"sync"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
	"go.uber.org/multierr"
)

// DataParallel is PyTorch's nn.DataParallel: one process trains one model on several devices. Each forward copies the
// weights to all devices, gives each its share of the batch, and gathers the outputs on the first one; the backward adds
// up the gradients there.
//
// It is here for comparison, and for programs that cannot be several processes: DDP is faster even on one machine,
// because it copies no weights and its ranks are processes that need not wait for each other's threads. Devices may be the
// CPU several times.
type DataParallel struct {
	replicas []Module // the first is the module itself
	devices  []gotch.Device
}

// NewDataParallel trains module, which lies on the first of the devices, on all of them. replicate builds the same model
// on another device; its weights do not matter.
func NewDataParallel(module Module, devices []gotch.Device, replicate func(dev gotch.Device) (Module, error)) (*DataParallel, error) {
	const op = "DataParallel"
	switch {
	case module == nil:
		return nil, fmt.Errorf("%s: %w", op, valueErrorf("the module is nil"))
	case len(devices) == 0:
		return nil, fmt.Errorf("%s: %w", op, valueErrorf("there are no devices"))
	case len(devices) > 1 && replicate == nil:
		return nil, fmt.Errorf("%s: %w", op, valueErrorf("replicate is nil: it builds the model on the other devices"))
	}
	p := &DataParallel{replicas: []Module{module}, devices: devices}
	for _, dev := range devices[1:] {
		r, err := replicate(dev)
		if err != nil {
			return nil, fmt.Errorf("%s: the replica on %s: %w", op, deviceName(dev), err)
		}
		p.replicas = append(p.replicas, r)
	}
	for i := range p.replicas {
		if err := p.check(i); err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
	}
	return p, nil
}

// state is a module's parameters, then its buffers.
func state(m Module) (list []Named, params int) {
	for name, t := range m.NamedParameters() {
		list = append(list, Named{name, t})
	}
	params = len(list)
	for name, t := range m.NamedBuffers() {
		list = append(list, Named{name, t})
	}
	return list, params
}

// check compares a replica with the module, and both with their devices.
func (p *DataParallel) check(i int) error {
	want, wantParams := state(p.replicas[0])
	got, params := state(p.replicas[i])
	if len(got) != len(want) || params != wantParams {
		return valueErrorf("the replica on %s has %d parameters and %d buffers, the module %d and %d",
			deviceName(p.devices[i]), params, len(got)-params, wantParams, len(want)-wantParams)
	}
	for k, n := range got {
		shape, dev, err := describe(n)
		if err != nil {
			return err
		}
		ref, _, err := describe(want[k])
		if err != nil {
			return err
		}
		switch {
		case deviceName(dev) != deviceName(p.devices[i]):
			return valueErrorf("the module must have its parameters and buffers on %s, but %q is on %s", deviceName(p.devices[i]), n.Name, deviceName(dev))
		case n.Name != want[k].Name || fmt.Sprint(shape.Shape, shape.DType) != fmt.Sprint(ref.Shape, ref.DType):
			return valueErrorf("the replica on %s has %q of %v %v where the module has %q of %v %v", deviceName(dev),
				n.Name, shape.DType, shape.Shape, want[k].Name, ref.DType, ref.Shape)
		case i > 0 && tdp.Impl(n.Tensor) == tdp.Impl(want[k].Tensor):
			return valueErrorf("replicate gave the module's own %q: it must build a model of its own", n.Name)
		}
	}
	return nil
}

// Module is the model whose weights count.
func (p *DataParallel) Module() Module { return p.replicas[0] }

// NamedParameters are the module's.
func (p *DataParallel) NamedParameters() iter.Seq2[string, *ts.Tensor] {
	return p.replicas[0].NamedParameters()
}

// NamedBuffers are the module's. In training they become those of the first share, as in PyTorch.
func (p *DataParallel) NamedBuffers() iter.Seq2[string, *ts.Tensor] {
	return p.replicas[0].NamedBuffers()
}

// ForwardT is Forward with a panic for an error, which makes DataParallel a gotch ts.ModuleT.
func (p *DataParallel) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	out, err := p.Forward(x, train)
	if err != nil {
		panic(err)
	}
	return out
}

// Forward computes the output for a whole batch, which is split along its first dimension. Run Backward of p for the
// gradients, before the next training forward.
func (p *DataParallel) Forward(x *ts.Tensor, train bool) (*ts.Tensor, error) {
	shares, err := p.scatter(x)
	if err != nil {
		return nil, fmt.Errorf("DataParallel: scatter: %w", err)
	}
	defer drop(shares)
	if err := p.replicate(len(shares)); err != nil {
		return nil, fmt.Errorf("DataParallel: replicate: %w", err)
	}
	outputs, err := p.apply(shares, train)
	defer drop(outputs)
	if err != nil {
		return nil, fmt.Errorf("DataParallel: %w", err)
	}
	out, err := protect(func() (*ts.Tensor, error) { return p.gather(outputs), nil })
	if err != nil {
		return nil, fmt.Errorf("DataParallel: gather: %w", err)
	}
	return out, nil
}

// drop frees the tensors that are there.
func drop(list []*ts.Tensor) {
	for _, t := range list {
		if t != nil {
			t.MustDrop()
		}
	}
}

// scatter gives each device its share, the first ones one more where the batch does not divide; small batches need fewer
// devices.
func (p *DataParallel) scatter(x *ts.Tensor) (shares []*ts.Tensor, err error) {
	return protect(func() ([]*ts.Tensor, error) {
		if x.Dim() == 0 {
			return nil, valueErrorf("a batch of no dimensions cannot be split")
		}
		chunks := x.MustChunk(int64(len(p.devices)), 0, false)
		defer drop(chunks)
		for i, c := range chunks {
			shares = append(shares, c.MustTo(p.devices[i], false))
		}
		return shares, nil
	})
}

// replicate copies the module's state to the first n devices.
func (p *DataParallel) replicate(n int) error {
	if n < 2 {
		return nil
	}
	from, _ := state(p.replicas[0])
	return NoGrad(func() error {
		for _, r := range p.replicas[1:n] {
			to, _ := state(r)
			for i := range from {
				if err := tdp.Copy(to[i].Tensor, from[i].Tensor, true); err != nil {
					return fmt.Errorf("%s: %w", from[i].Name, err)
				}
			}
		}
		return nil
	})
}

// apply runs all replicas, each on a thread of its own, in the modes of the calling one.
func (p *DataParallel) apply(shares []*ts.Tensor, train bool) ([]*ts.Tensor, error) {
	run := func(i int) (*ts.Tensor, error) {
		out, err := protect(func() (*ts.Tensor, error) { return p.replicas[i].ForwardT(shares[i], train), nil })
		if err != nil {
			return nil, fmt.Errorf("the replica on %s: %w", deviceName(p.devices[i]), err)
		}
		return out, nil
	}
	outputs, errs := make([]*ts.Tensor, len(shares)), make([]error, len(shares))
	if len(shares) == 1 {
		outputs[0], errs[0] = run(0)
		return outputs, errs[0]
	}
	modes, err := currentModes(p.devices[0].Name == "CUDA")
	if err != nil {
		return nil, err
	}
	var wg sync.WaitGroup
	for i := range shares {
		wg.Go(func() {
			// Not unlocked: the thread has modes that other goroutines must not inherit, and ends with this one.
			runtime.LockOSThread()
			errs[i] = modes.in(func() (err error) {
				outputs[i], err = run(i)
				return err
			})
		})
	}
	wg.Wait()
	return outputs, multierr.Combine(errs...)
}

// modes are what a thread's computations depend on besides their arguments.
type modes struct {
	cuda     bool
	grad     bool
	autocast tdp.AutocastState
}

func currentModes(cuda bool) (m modes, err error) {
	m.cuda = cuda
	if m.grad, err = tdp.GradEnabled(); err == nil {
		m.autocast, err = tdp.Autocast(cuda)
	}
	return m, err
}

// in runs fn on the calling thread in these modes.
func (m modes) in(fn func() error) error {
	if _, err := tdp.SetGradMode(m.grad); err != nil {
		return err
	}
	before, err := tdp.EnterAutocast(m.cuda, m.autocast)
	if err != nil {
		return err
	}
	return multierr.Append(fn(), tdp.ExitAutocast(m.cuda, before))
}

// gather puts the outputs together on the first device; scalars become a vector.
func (p *DataParallel) gather(outputs []*ts.Tensor) *ts.Tensor {
	if len(outputs) == 1 {
		return outputs[0].MustShallowClone()
	}
	parts := make([]*ts.Tensor, len(outputs))
	defer drop(parts)
	for i, o := range outputs {
		parts[i] = o.MustTo(p.devices[0], false)
		if o.Dim() == 0 {
			parts[i] = parts[i].MustView([]int64{1}, true)
		}
	}
	return ts.MustCat(parts, 0)
}

// Backward computes the gradients of loss and adds up those of all devices in the module's.
func (p *DataParallel) Backward(loss *ts.Tensor) error {
	if err := tdp.Backward(loss, nil, false, nil); err != nil {
		return fmt.Errorf("DataParallel: backward: %w", err)
	}
	sums, params := state(p.replicas[0])
	err := NoGrad(func() error {
		for _, r := range p.replicas[1:] {
			list, _ := state(r)
			for i, n := range list[:params] {
				if err := moveGrad(sums[i].Tensor, n.Tensor, p.devices[0]); err != nil {
					return fmt.Errorf("the gradient of %s: %w", n.Name, err)
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("DataParallel: backward: %w", err)
	}
	return nil
}

// moveGrad adds from's gradient to to's and drops it.
func moveGrad(to, from *ts.Tensor, dev gotch.Device) error {
	g, err := tdp.Grad(from)
	if err != nil || g == nil {
		return err
	}
	defer g.MustDrop()
	here, err := protect(func() (*ts.Tensor, error) { return g.MustTo(dev, false), nil })
	if err != nil {
		return err
	}
	defer here.MustDrop()
	sum, err := tdp.Grad(to)
	if err != nil {
		return err
	}
	if sum == nil {
		err = tdp.SetGrad(to, here)
	} else {
		defer sum.MustDrop()
		_, err = protect(func() (struct{}, error) { sum.MustAdd_(here); return struct{}{}, nil })
	}
	if err != nil {
		return err
	}
	return tdp.SetGrad(from, nil)
}
