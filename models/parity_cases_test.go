package models

import (
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// The models of testdata/cases.json, as Go makes them.
var parityModels = map[string]func() nn.Module{
	"linear":         func() nn.Module { return nn.Must(NewToyNet()) },
	"linear_no_bias": func() nn.Module { return nn.Must(nn.NewLinear(20, 3, nn.LinearOptions{NoBias: true})) },
	"conv1d": func() nn.Module {
		return nn.NewSequential(
			nn.Must(nn.NewConv1d(3, 8, nn.Size{3}, nn.ConvOptions{Stride: nn.Size{2}, Padding: nn.Size{1}})),
			nn.Must(nn.NewBatchNorm1d(8, nn.BatchNormOptions{})),
			nn.NewReLU(),
			nn.Must(nn.NewMaxPool1d(nn.Size{2}, nn.MaxPoolOptions{})),
			nn.Must(nn.NewConv1d(8, 4, nn.Size{3}, nn.ConvOptions{Same: true, PaddingMode: nn.Replicate})),
			nn.Must(nn.NewAvgPool1d(nn.Size{2}, nn.AvgPoolOptions{})),
			nn.Must(nn.NewAdaptiveAvgPool1d(nn.Size{2})),
			nn.NewFlatten(),
			linear(8, 5),
		)
	},
	"conv2d": func() nn.Module {
		return nn.NewSequential(
			nn.Must(nn.NewConv2d(4, 8, nn.Size{3}, nn.ConvOptions{Padding: nn.Size{2}, Dilation: nn.Size{2}, Groups: 2})),
			nn.Must(nn.NewBatchNorm2d(8, nn.BatchNormOptions{})),
			nn.NewGELU(),
			nn.Must(nn.NewAvgPool2d(nn.Size{2}, nn.AvgPoolOptions{})),
			nn.Must(nn.NewConv2d(8, 6, nn.Size{3, 5}, nn.ConvOptions{Same: true})),
			nn.NewSiLUInplace(),
			nn.Must(nn.NewAdaptiveAvgPool2d(nn.Size{2, -1})),
			nn.NewFlatten(),
			linear(96, 10),
		)
	},
	"conv2d_reflect": func() nn.Module {
		return nn.NewSequential(
			nn.Must(nn.NewConv2d(3, 6, nn.Size{3}, nn.ConvOptions{Padding: nn.Size{1}, PaddingMode: nn.Reflect, NoBias: true})),
			nn.Must(nn.NewGroupNorm(3, 6, nn.GroupNormOptions{})),
			nn.NewSigmoid(),
			nn.Must(nn.NewConv2d(6, 6, nn.Size{3}, nn.ConvOptions{Padding: nn.Size{1}, PaddingMode: nn.Circular})),
			nn.NewGELUTanh(),
			nn.Must(nn.NewMaxPool2d(nn.Size{3}, nn.MaxPoolOptions{Stride: nn.Size{2}, Padding: nn.Size{1}, CeilMode: true})),
			nn.NewFlatten(),
			linear(150, 4),
		)
	},
	"conv3d": func() nn.Module {
		return nn.NewSequential(
			nn.Must(nn.NewConv3d(2, 4, nn.Size{3}, nn.ConvOptions{Padding: nn.Size{1}})),
			nn.Must(nn.NewBatchNorm3d(4, nn.BatchNormOptions{Eps: 1e-3, Momentum: 0.2})),
			nn.NewSiLU(),
			nn.Must(nn.NewMaxPool3d(nn.Size{2}, nn.MaxPoolOptions{})),
			nn.Must(nn.NewAvgPool3d(nn.Size{2}, nn.AvgPoolOptions{Padding: nn.Size{1}, ExcludePad: true})),
			nn.Must(nn.NewAdaptiveAvgPool3d(nn.Size{1})),
			nn.NewFlatten(),
			linear(4, 3),
		)
	},
	"layer_norm": func() nn.Module {
		return nn.NewSequential(
			linear(12, 16),
			nn.Must(nn.NewLayerNorm([]int64{16}, nn.LayerNormOptions{})),
			nn.NewTanh(),
			nn.Must(nn.NewLayerNorm([]int64{16}, nn.LayerNormOptions{NoAffine: true})),
			nn.Must(nn.NewLayerNorm([]int64{16}, nn.LayerNormOptions{NoBias: true})),
			linear(16, 5),
			nn.NewLogSoftmax(1),
		)
	},
	"softmax": func() nn.Module {
		return nn.NewSequential(linear(6, 4), nn.NewSoftmax(-1), nn.NewIdentity())
	},
	"smooth_l1": func() nn.Module { return linear(6, 4) },
	"embedding": func() nn.Module {
		return nn.NewSequential(nn.Must(nn.NewEmbedding(11, 6, nn.EmbeddingOptions{PaddingIdx: new(int64(-2))})), nn.NewFlatten(),
			linear(24, 3))
	},
	"embedding_scaled": func() nn.Module {
		return nn.NewSequential(nn.Must(nn.NewEmbedding(7, 5, nn.EmbeddingOptions{ScaleGradByFreq: true})), linear(5, 2))
	},
	"dropout": func() nn.Module {
		return nn.NewSequential(linear(10, 32), nn.Must(nn.NewDropout(0.3)), nn.NewReLUInplace(), linear(32, 8),
			nn.Must(nn.NewDropoutInplace(0.5)), linear(8, 3))
	},
	"bce_weight": func() nn.Module { return linear(10, 3) },
	"batch_norm_cumulative": func() nn.Module {
		return nn.NewSequential(linear(6, 4),
			nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{Cumulative: true})),
			nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{NoAffine: true})),
			nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{NoRunningStats: true})))
	},
	"batch_norm_3d_input": func() nn.Module { return nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{})) },
	"batch_norm_frozen":   func() nn.Module { return newFrozen() },
	"tied":                func() nn.Module { return newTied() },
	"named_and_lists": func() nn.Module {
		return nn.Must(nn.NewNamedSequential(
			nn.Named{Name: "first", Module: linear(6, 6)},
			nn.Named{Name: "rest", Module: nn.NewSequential(nn.NewTanh(), nn.NewFlattenDims(0, 1))},
			nn.Named{Name: "last", Module: linear(6, 2)},
		))
	},
	"simplenet": func() nn.Module { return nn.Must(NewSimpleNet()) },
	"resnet18":  resNet("resnet18"),
	"resnet18_cifar": func() nn.Module {
		return nn.Must(NewResNet18(ResNetOptions{NumClasses: 10, ZeroInitResidual: true, CIFARStem: true}))
	},
	"resnet34": resNet("resnet34"), "resnet50": resNet("resnet50"), "resnet101": resNet("resnet101"),
	"resnet152": resNet("resnet152"), "resnext50_32x4d": resNet("resnext50_32x4d"),
	"resnext101_32x8d": resNet("resnext101_32x8d"), "resnext101_64x4d": resNet("resnext101_64x4d"),
	"wide_resnet50_2": resNet("wide_resnet50_2"), "wide_resnet101_2": resNet("wide_resnet101_2"),
	"resnet50_dilated_group_norm": func() nn.Module {
		return nn.Must(NewResNet50(ResNetOptions{NumClasses: 7, ReplaceStrideWithDilation: [3]bool{false, true, true},
			NormLayer: func(c int64) (nn.Module, error) { return nn.NewGroupNorm(4, c, nn.GroupNormOptions{}) }}))
	},
}

func linear(in, out int64) *nn.Linear { return nn.Must(nn.NewLinear(in, out, nn.LinearOptions{})) }

func resNet(name string) func() nn.Module {
	return func() nn.Module { return nn.Must(NewResNet(name, ResNetOptions{})) }
}

// Frozen has a batch norm that stays in evaluation while the rest trains.
type Frozen struct {
	nn.Base
	fc *nn.Linear
	bn *nn.BatchNorm
}

func newFrozen() *Frozen {
	m := &Frozen{fc: linear(6, 4), bn: nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{}))}
	nn.Check(nn.Register(m, "fc", &m.fc))
	nn.Check(nn.Register(m, "bn", &m.bn))
	m.bn.Eval()
	return m
}

// ForwardT runs the layers.
func (m *Frozen) ForwardT(x *ts.Tensor, train bool) *ts.Tensor { return nn.Run(x, train, m.fc, m.bn) }

// Tied has two layers with one weight, and one layer in two places.
type Tied struct {
	nn.Base
	a, b, again *nn.Linear
}

func newTied() *Tied {
	m := &Tied{a: linear(6, 6), b: linear(6, 6)}
	m.b.Weight.MustDrop()
	m.b.Weight = nn.Must(tdp.Share(m.a.Weight))
	m.again = m.b
	nn.Check(nn.Register(m, "a", &m.a))
	nn.Check(nn.Register(m, "b", &m.b))
	nn.Check(nn.Register(m, "again", &m.again))
	return m
}

// ForwardT runs the layers.
func (m *Tied) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	relu := nn.NewReLU()
	return nn.Run(x, train, m.a, relu, m.b, relu, m.again)
}

// The losses of testdata/cases.json.
var parityLosses = map[string]nn.Loss{
	"nn.MSELoss()":                             nn.MSELoss{},
	"nn.MSELoss(reduction='none')":             nn.MSELoss{Reduction: nn.None},
	"nn.L1Loss()":                              nn.L1Loss{},
	"nn.L1Loss(reduction='sum')":               nn.L1Loss{Reduction: nn.Sum},
	"nn.SmoothL1Loss()":                        nn.SmoothL1Loss{},
	"nn.SmoothL1Loss(beta=0.5)":                nn.SmoothL1Loss{Beta: 0.5},
	"nn.CrossEntropyLoss()":                    nn.CrossEntropyLoss{},
	"nn.CrossEntropyLoss(label_smoothing=0.1)": nn.CrossEntropyLoss{LabelSmoothing: 0.1},
	"nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=1)": nn.CrossEntropyLoss{
		Weight: floats(1, 2, 3), IgnoreIndex: new(int64(1))},
	"nn.CrossEntropyLoss(reduction='sum', weight=torch.tensor([0.1, 0.2, 0.3]))": nn.CrossEntropyLoss{
		Weight: floats(0.1, 0.2, 0.3), Reduction: nn.Sum},
	"nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), ignore_index=2)": nn.NLLLoss{
		Weight: floats(1, 2, 3, 4, 5), IgnoreIndex: new(int64(2))},
	"nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))": nn.BCEWithLogitsLoss{PosWeight: floats(1, 2, 3)},
	"nn.BCEWithLogitsLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction='sum')": nn.BCEWithLogitsLoss{
		Weight: floats(1, 2, 3), Reduction: nn.Sum},
}
