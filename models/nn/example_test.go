package nn_test

import (
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/models/nn"
)

// Net is a model as one writes it.
type Net struct {
	nn.Base
	FC1, FC2 nn.Module
}

func NewNet() (*Net, error) {
	return nn.Try(func() *Net {
		n := &Net{
			FC1: nn.Must(nn.NewLinear(784, 256, nn.LinearOptions{})),
			FC2: nn.Must(nn.NewLinear(256, 10, nn.LinearOptions{})),
		}
		nn.Check(nn.Register(n, "fc1", &n.FC1))
		nn.Check(nn.Register(n, "fc2", &n.FC2))
		return n
	})
}

func (n *Net) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return nn.Run(x, train && n.Training(), n.FC1, nn.NewReLU(), n.FC2)
}

func Example() {
	n, err := NewNet()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(nn.Repr(n))
	for name, p := range n.NamedParameters() {
		fmt.Println(name, p.MustSize())
	}

	images := ts.MustOnes([]int64{32, 784}, gotch.Float, gotch.CPU)
	scores, err := nn.Evaluate(n, images)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer scores.MustDrop()
	fmt.Println("scores", scores.MustSize())

	_, err = nn.Evaluate(n, ts.MustOnes([]int64{32, 28}, gotch.Float, gotch.CPU))
	fmt.Println(err)
	// Output:
	// Net(
	//   (fc1): Linear(in_features=784, out_features=256, bias=True)
	//   (fc2): Linear(in_features=256, out_features=10, bias=True)
	// )
	// fc1.weight [256 784]
	// fc1.bias [256]
	// fc2.weight [10 256]
	// fc2.bias [10]
	// scores [32 10]
	// fc1: Linear(in_features=784, out_features=256, bias=True) got an input of shape [32 28], its weight has shape [256 784]: linear: mat1 and mat2 shapes cannot be multiplied (32x28 and 784x256)
}

func ExampleSummarize() {
	m := nn.NewSequential(
		nn.Must(nn.NewConv2d(1, 8, nn.Size{3}, nn.ConvOptions{Padding: nn.Size{1}})),
		nn.Must(nn.NewBatchNorm2d(8, nn.BatchNormOptions{})),
		nn.NewReLU(),
	)
	s, err := nn.Summarize(m)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(s.Parameters, "parameters,", s.Bytes(), "bytes")
	// Output: 96 parameters, 456 bytes
}
