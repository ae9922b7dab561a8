package main

import (
	"github.com/goddp/goddp/cmd/rl/cartpole"
	"github.com/goddp/goddp/models/nn"
	"github.com/sugarme/gotch/ts"
)

// policy gives a score for each action. Its names are those of PyTorch's example reinforce.py.
type policy struct {
	nn.Base
	Affine1, Affine2 nn.Module
	relu             nn.Module
}

func newPolicy(hidden int64) (*policy, error) {
	return nn.Try(func() *policy {
		p := &policy{
			Affine1: nn.Must(nn.NewLinear(cartpole.Observations, hidden, nn.LinearOptions{})),
			Affine2: nn.Must(nn.NewLinear(hidden, cartpole.Actions, nn.LinearOptions{})),
			relu:    nn.NewReLUInplace(),
		}
		nn.Check(nn.Register(p, "affine1", &p.Affine1))
		nn.Check(nn.Register(p, "affine2", &p.Affine2))
		return p
	})
}

// ForwardT gives scores [n, 2] for observations [n, 4].
func (p *policy) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return nn.Run(x, train, p.Affine1, p.relu, p.Affine2)
}

func (p *policy) String() string { return nn.Repr(p) }
