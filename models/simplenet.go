package models

import (
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// SimpleNet classifies MNIST's digits: 784 pixels, 256 hidden units, 10 classes.
type SimpleNet struct {
	nn.Base
	FC1, FC2 nn.Module
}

// NewSimpleNet makes the network with the weights that Python's would draw.
func NewSimpleNet() (*SimpleNet, error) {
	return nn.Try(func() *SimpleNet {
		n := &SimpleNet{
			FC1: nn.Must(nn.NewLinear(28*28, 256, nn.LinearOptions{})),
			FC2: nn.Must(nn.NewLinear(256, 10, nn.LinearOptions{})),
		}
		nn.Check(nn.Register(n, "fc1", &n.FC1))
		nn.Check(nn.Register(n, "fc2", &n.FC2))
		return n
	})
}

// ForwardT gives class scores for images of 784 pixels in any arrangement.
func (n *SimpleNet) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	train = train && n.Training()
	flat := nn.Must(tdp.Reshape(x, []int64{-1, 28 * 28}))
	hidden := n.FC1.ForwardT(flat, train)
	flat.MustDrop()
	active := nn.Must(tdp.Activate(tdp.ReLU, hidden, false))
	hidden.MustDrop()
	y := n.FC2.ForwardT(active, train)
	active.MustDrop()
	return y
}

func (n *SimpleNet) String() string { return nn.Repr(n) }
