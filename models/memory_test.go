package models

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// resident is the process's memory without Go's heap: what libtorch holds.
func resident(t *testing.T) int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skipf("no /proc/self/statm on this system: %v", err)
	}
	var total, pages int64
	_, err = fmt.Sscan(string(text), &total, &pages)
	require.NoError(t, err)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return pages*int64(os.Getpagesize()) - int64(m.HeapSys-m.HeapReleased)
}

// trainer gives a function that trains a step.
func trainer(t *testing.T, m nn.Module, x, y *ts.Tensor) func() {
	opt, err := tdp.NewOptim(tdp.SGD)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, opt.Close()) })
	var params []*ts.Tensor
	for p := range m.Parameters() {
		params = append(params, p)
	}
	require.NoError(t, opt.AddGroup(params, tdp.OptimOptions{LR: 0.001, Momentum: 0.9}))
	return func() {
		nn.Check(opt.ZeroGrad(true))
		out := m.ForwardT(x, true)
		loss := nn.CrossEntropyLoss{}.Forward(out, y)
		out.MustDrop()
		nn.Check(tdp.Backward(loss, nil, false, nil))
		loss.MustDrop()
		nn.Check(opt.Step(nil, nil))
		out, err := nn.Evaluate(m, x)
		nn.Check(err)
		out.MustDrop()
	}
}

// TestStepsFreeWhatTheyMade trains and evaluates without Go's collector: whatever a forward did not drop itself would
// pile up.
func TestStepsFreeWhatTheyMade(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	oneThread(t)
	layers, err := nn.Try(func() nn.Module {
		return nn.NewSequential(
			nn.Must(nn.NewConv2d(3, 16, nn.Size{3}, nn.ConvOptions{Padding: nn.Size{1}, PaddingMode: nn.Reflect})),
			nn.Must(nn.NewBatchNorm2d(16, nn.BatchNormOptions{})), nn.NewReLU(), nn.NewIdentity(), nn.Must(nn.NewDropout(0.1)),
			nn.NewSequential(nn.NewGELU(), nn.Must(nn.NewGroupNorm(4, 16, nn.GroupNormOptions{}))),
			nn.Must(nn.NewMaxPool2d(nn.Size{2}, nn.MaxPoolOptions{})), nn.Must(nn.NewAvgPool2d(nn.Size{2}, nn.AvgPoolOptions{})),
			nn.NewFlatten(), linear(16*8*8, 10))
	})
	require.NoError(t, err)
	simple, err := NewSimpleNet()
	require.NoError(t, err)
	blocks, err := nn.Try(func() nn.Module {
		b := &builder{inplanes: 16, dilation: 1, groups: 1, width: 64,
			norm: func(c int64) (nn.Module, error) { return nn.NewBatchNorm2d(c, nn.BatchNormOptions{}) }}
		basic := b.layer(24, 1, 1, false)
		b.bottleneck, b.inplanes = true, 24
		return nn.NewSequential(conv3x3(3, 16, 1, 1, 1), basic, b.layer(8, 2, 1, false),
			nn.Must(nn.NewAdaptiveAvgPool2d(nn.Size{1})), nn.NewFlatten(), linear(32, 10))
	})
	require.NoError(t, err)
	for _, c := range []struct {
		name  string
		model nn.Module
		shape []int64
		steps int
	}{
		{"layers", layers, []int64{4, 3, 32, 32}, 20},
		{"SimpleNet", simple, []int64{64, 1, 28, 28}, 20},
		{"blocks", blocks, []int64{4, 3, 32, 32}, 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, y := scriptData(t, 10, c.shape...)
			step := trainer(t, c.model, x, y)
			defer debug.SetGCPercent(debug.SetGCPercent(-1))
			// Counted, not weighed: resident memory goes up and down with the allocator by more than an activation, while
			// every tensor that a step makes and does not drop stays in this count, with the collector off.
			for range 3 {
				step() // the optimizer's and the reducer's own tensors are made by now
			}
			before := ts.LiveTensors()
			for range c.steps {
				step()
			}
			require.Equal(t, before, ts.LiveTensors(), "live tensors before and after %d steps", c.steps)
		})
	}
}

// TestThousandStepsKeepMemoryFlat trains for a while as a user does.
func TestThousandStepsKeepMemoryFlat(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	oneThread(t)
	m, err := NewSimpleNet()
	require.NoError(t, err)
	x, y := scriptData(t, 10, 64, 1, 28, 28)
	step := trainer(t, m, x, y)
	measure := func() int64 {
		debug.FreeOSMemory()
		return resident(t)
	}
	for range 200 {
		step()
	}
	before := measure()
	for range 1000 {
		step()
	}
	grown := measure() - before
	require.Less(t, grown, int64(4<<20), "bytes grown in 1000 steps; the weights take 0.8 MB, an activation 64 kB")
}
