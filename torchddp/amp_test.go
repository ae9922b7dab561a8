package torchddp

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// ampNet is a model under DDP with two optimizers, one a layer, and a scaler for both.
type ampNet struct {
	m      *nn.Sequential
	d      *DDP
	opts   []optim.Optimizer
	scaler *amp.GradScaler
}

func newAMPNet(pg *ProcessGroup, view bool) (*ampNet, error) {
	made, err := build(func() nn.Module { return nn.NewSequential(denseLayer(4, 8), denseLayer(8, 3)) }, gotch.Float)
	if err != nil {
		return nil, err
	}
	n := &ampNet{m: made.(*nn.Sequential)}
	if n.d, err = NewDDP(n.m, pg, DDPOptions{GradientAsBucketView: view}); err != nil {
		return nil, err
	}
	for i := range 2 {
		o, err := optim.NewSGD(n.m.At(i).NamedParameters(), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
		if err != nil {
			return nil, err
		}
		n.opts = append(n.opts, o)
	}
	n.scaler, err = amp.NewGradScaler(amp.ScalerOptions{InitScale: 1024, GrowthInterval: 100})
	return n, err
}

func (n *ampNet) close() error {
	return errors.Join(n.opts[0].Close(), n.opts[1].Close(), n.scaler.Close(), n.d.Close())
}

// step trains on x in bfloat16, with clipped gradients, and tells which optimizers stepped.
func (n *ampNet) step(x *ts.Tensor) (did [2]bool, err error) {
	for _, o := range n.opts {
		if err := o.ZeroGrad(true); err != nil {
			return did, err
		}
	}
	var loss *ts.Tensor
	err = amp.Autocast(amp.Options{}, func() error {
		out, err := n.d.Forward(x)
		if err != nil {
			return err
		}
		if info, err := tdp.Describe(out); err != nil || info.DType != gotch.BFloat16 {
			return fmt.Errorf("the output is not bfloat16: %v %v", info.DType, err)
		}
		loss = out.MustTotype(gotch.Float, true).MustPowTensorScalar(ts.FloatScalar(2), true).MustMean(gotch.Float, true)
		return nil
	})
	if err != nil {
		return did, err
	}
	scaled, err := n.scaler.Scale(loss)
	if err != nil {
		return did, err
	}
	if err := n.d.Backward(scaled); err != nil {
		return did, err
	}
	for _, o := range n.opts {
		if err := n.scaler.Unscale(o); err != nil {
			return did, err
		}
	}
	norm, err := optim.ClipGradNorm(slices.Collect(n.m.Parameters()), 0.05)
	if err != nil {
		return did, err
	}
	norm.MustDrop()
	for i, o := range n.opts {
		if did[i], err = n.scaler.Step(o); err != nil {
			return did, err
		}
	}
	return did, n.scaler.Update()
}

// TestMixedPrecisionTrainingUnderDDP: autocast, one scaler for two optimizers, and clipping give the same weights with and
// without bucket views, and on all ranks; an overflow on one rank skips the step on every rank and halves every scale.
func TestMixedPrecisionTrainingUnderDDP(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		a, err := newAMPNet(pg, false)
		if err != nil {
			return err
		}
		b, err := newAMPNet(pg, true)
		if err != nil {
			return err
		}
		for k := range 6 {
			xs, err := draws(uint64(10*k+pg.Rank()), []int64{5, 4})
			if err != nil {
				return err
			}
			x := xs[0].MustTotype(gotch.Float, true)
			overflow := k == 3
			if overflow && pg.Rank() == 1 {
				x = x.MustMulScalar(ts.FloatScalar(math.Inf(1)), true)
			}
			before := elements(a.m.At(0).(*nn.Linear).Weight)
			for _, n := range []*ampNet{a, b} {
				did, err := n.step(x)
				if err != nil {
					return err
				}
				scale, err := n.scaler.GetScale()
				if err != nil {
					return err
				}
				want := 1024.0
				if k >= 3 {
					want = 512
				}
				if did != [2]bool{!overflow, !overflow} || scale != want {
					return fmt.Errorf("step %d: stepped %v, scale %v", k, did, scale)
				}
			}
			if same := fmt.Sprint(before) == fmt.Sprint(elements(a.m.At(0).(*nn.Linear).Weight)); same != overflow {
				return fmt.Errorf("step %d: the weights stayed: %t", k, same)
			}
			other := collect(b.m.NamedParameters())
			for i, p := range collect(a.m.NamedParameters()) {
				if err := near(p.Name, p.Tensor, other[i].Tensor, 0); err != nil {
					return fmt.Errorf("step %d, with views: %w", k, err)
				}
			}
			if err := a.d.Audit(); err != nil {
				return err
			}
		}
		return errors.Join(a.close(), b.close())
	})
}
