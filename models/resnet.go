package models

import (
	"fmt"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// ResNet is a residual network with torchvision's names, shapes and initialisation. Its fields may be assigned, for
// instance FC for another number of classes.
type ResNet struct {
	nn.Base
	Conv1, BN1, ReLU, MaxPool      nn.Module
	Layer1, Layer2, Layer3, Layer4 nn.Module
	AvgPool, FC                    nn.Module
	flatten                        *nn.Flatten
}

// ResNetOptions change a residual network from torchvision's defaults.
type ResNetOptions struct {
	NumClasses       int64 // 0: 1000
	ZeroInitResidual bool  // start every block as the identity
	Groups           int64 // of the 3x3 convolutions of bottlenecks; 0: 1
	WidthPerGroup    int64 // 0: 64
	// ReplaceStrideWithDilation keeps the resolution of layer2, layer3 and layer4.
	ReplaceStrideWithDilation [3]bool
	// NormLayer makes the normalisation for a number of channels; nil: BatchNorm2d.
	NormLayer func(channels int64) (nn.Module, error)
	// CIFARStem starts with a 3x3 convolution of stride 1 and no pooling, for images of 32x32 pixels.
	CIFARStem bool
}

// NewResNet18 makes torchvision's resnet18.
func NewResNet18(o ResNetOptions) (*ResNet, error) { return newResNet(false, [4]int{2, 2, 2, 2}, o) }

// NewResNet34 makes torchvision's resnet34.
func NewResNet34(o ResNetOptions) (*ResNet, error) { return newResNet(false, [4]int{3, 4, 6, 3}, o) }

// NewResNet50 makes torchvision's resnet50.
func NewResNet50(o ResNetOptions) (*ResNet, error) { return newResNet(true, [4]int{3, 4, 6, 3}, o) }

// NewResNet101 makes torchvision's resnet101.
func NewResNet101(o ResNetOptions) (*ResNet, error) { return newResNet(true, [4]int{3, 4, 23, 3}, o) }

// NewResNet152 makes torchvision's resnet152.
func NewResNet152(o ResNetOptions) (*ResNet, error) { return newResNet(true, [4]int{3, 8, 36, 3}, o) }

// NewResNeXt50x32x4d makes torchvision's resnext50_32x4d.
func NewResNeXt50x32x4d(o ResNetOptions) (*ResNet, error) {
	o.Groups, o.WidthPerGroup = 32, 4
	return NewResNet50(o)
}

// NewResNeXt101x32x8d makes torchvision's resnext101_32x8d.
func NewResNeXt101x32x8d(o ResNetOptions) (*ResNet, error) {
	o.Groups, o.WidthPerGroup = 32, 8
	return NewResNet101(o)
}

// NewResNeXt101x64x4d makes torchvision's resnext101_64x4d.
func NewResNeXt101x64x4d(o ResNetOptions) (*ResNet, error) {
	o.Groups, o.WidthPerGroup = 64, 4
	return NewResNet101(o)
}

// NewWideResNet50x2 makes torchvision's wide_resnet50_2.
func NewWideResNet50x2(o ResNetOptions) (*ResNet, error) {
	o.WidthPerGroup = 128
	return NewResNet50(o)
}

// NewWideResNet101x2 makes torchvision's wide_resnet101_2.
func NewWideResNet101x2(o ResNetOptions) (*ResNet, error) {
	o.WidthPerGroup = 128
	return NewResNet101(o)
}

// resNets are the networks by torchvision's function names.
var resNets = []struct {
	name string
	make func(ResNetOptions) (*ResNet, error)
}{
	{"resnet18", NewResNet18}, {"resnet34", NewResNet34}, {"resnet50", NewResNet50}, {"resnet101", NewResNet101},
	{"resnet152", NewResNet152}, {"resnext50_32x4d", NewResNeXt50x32x4d}, {"resnext101_32x8d", NewResNeXt101x32x8d},
	{"resnext101_64x4d", NewResNeXt101x64x4d}, {"wide_resnet50_2", NewWideResNet50x2},
	{"wide_resnet101_2", NewWideResNet101x2},
}

// ResNets are the names that NewResNet knows.
func ResNets() (names []string) {
	for _, r := range resNets {
		names = append(names, r.name)
	}
	return names
}

// NewResNet makes a network by torchvision's name, such as "resnet50".
func NewResNet(name string, o ResNetOptions) (*ResNet, error) {
	for _, r := range resNets {
		if r.name == name {
			return r.make(o)
		}
	}
	return nil, fmt.Errorf("%w: no network is called %q; there are %v", tdp.ErrValue, name, ResNets())
}

// builder makes the modules in the order in which torchvision does, so that the same random numbers are drawn.
type builder struct {
	bottleneck    bool
	inplanes      int64
	dilation      int64
	groups, width int64
	norm          func(int64) (nn.Module, error)
}

func newResNet(bottleneck bool, layers [4]int, o ResNetOptions) (*ResNet, error) {
	if o.NumClasses < 0 || o.Groups < 0 || o.WidthPerGroup < 0 {
		return nil, fmt.Errorf("ResNet: %w: negative option", tdp.ErrValue)
	}
	or := func(v, standard int64) int64 {
		if v == 0 {
			return standard
		}
		return v
	}
	b := &builder{bottleneck: bottleneck, inplanes: 64, dilation: 1, groups: or(o.Groups, 1),
		width: or(o.WidthPerGroup, 64), norm: o.NormLayer}
	if !bottleneck && (b.groups != 1 || b.width != 64) {
		return nil, fmt.Errorf("ResNet: %w: basic blocks have groups 1 and width 64", tdp.ErrValue)
	}
	if b.norm == nil {
		b.norm = func(channels int64) (nn.Module, error) {
			return nn.NewBatchNorm2d(channels, nn.BatchNormOptions{})
		}
	}
	return nn.Try(func() *ResNet {
		m := &ResNet{flatten: nn.NewFlatten()}
		if o.CIFARStem {
			m.Conv1 = conv(3, 64, 3, 1, 1, 1, 1)
		} else {
			m.Conv1 = conv(3, 64, 7, 2, 3, 1, 1)
		}
		m.BN1 = nn.Must(b.norm(64))
		m.ReLU = nn.NewReLUInplace()
		if o.CIFARStem {
			m.MaxPool = nn.NewIdentity()
		} else {
			m.MaxPool = nn.Must(nn.NewMaxPool2d(nn.Size{3}, nn.MaxPoolOptions{Stride: nn.Size{2}, Padding: nn.Size{1}}))
		}
		m.Layer1 = b.layer(64, layers[0], 1, false)
		m.Layer2 = b.layer(128, layers[1], 2, o.ReplaceStrideWithDilation[0])
		m.Layer3 = b.layer(256, layers[2], 2, o.ReplaceStrideWithDilation[1])
		m.Layer4 = b.layer(512, layers[3], 2, o.ReplaceStrideWithDilation[2])
		m.AvgPool = nn.Must(nn.NewAdaptiveAvgPool2d(nn.Size{1, 1}))
		m.FC = nn.Must(nn.NewLinear(512*b.expansion(), or(o.NumClasses, 1000), nn.LinearOptions{}))
		for _, c := range []struct {
			name string
			slot *nn.Module
		}{{"conv1", &m.Conv1}, {"bn1", &m.BN1}, {"relu", &m.ReLU}, {"maxpool", &m.MaxPool}, {"layer1", &m.Layer1},
			{"layer2", &m.Layer2}, {"layer3", &m.Layer3}, {"layer4", &m.Layer4}, {"avgpool", &m.AvgPool}, {"fc", &m.FC}} {
			nn.Check(nn.Register(m, c.name, c.slot))
		}
		nn.Check(m.initialise(o.ZeroInitResidual))
		return m
	})
}

// initialise draws the convolutions anew, as torchvision does at the end of the constructor.
func (m *ResNet) initialise(zeroResidual bool) error {
	for path, k := range nn.NamedModules(m) {
		var err error
		switch k := k.(type) {
		case *nn.Conv:
			err = nn.KaimingNormal(k.Weight, nn.KaimingOptions{FanOut: true})
		case *nn.BatchNorm:
			err = onesAndZeros(k.Weight, k.Bias)
		case *nn.GroupNorm:
			err = onesAndZeros(k.Weight, k.Bias)
		}
		if err != nil {
			return fmt.Errorf("initialise %s: %w", path, err)
		}
	}
	if !zeroResidual {
		return nil
	}
	for path, k := range nn.NamedModules(m) {
		var last nn.Module
		switch k := k.(type) {
		case *Bottleneck:
			last = k.BN3
		case *BasicBlock:
			last = k.BN2
		}
		var weight *ts.Tensor
		switch n := last.(type) {
		case *nn.BatchNorm:
			weight = n.Weight
		case *nn.GroupNorm:
			weight = n.Weight
		}
		if weight == nil {
			continue
		}
		if err := nn.Constant(weight, 0); err != nil {
			return fmt.Errorf("initialise %s: %w", path, err)
		}
	}
	return nil
}

func onesAndZeros(weight, bias *ts.Tensor) error {
	if weight == nil {
		return nil
	}
	if err := nn.Constant(weight, 1); err != nil || bias == nil {
		return err
	}
	return nn.Constant(bias, 0)
}

func conv(in, out, kernel, stride, padding, groups, dilation int64) *nn.Conv {
	return nn.Must(nn.NewConv2d(in, out, nn.Size{kernel}, nn.ConvOptions{Stride: nn.Size{stride},
		Padding: nn.Size{padding}, Groups: groups, Dilation: nn.Size{dilation}, NoBias: true}))
}

func conv3x3(in, out, stride, groups, dilation int64) *nn.Conv {
	return conv(in, out, 3, stride, dilation, groups, dilation)
}

func conv1x1(in, out, stride int64) *nn.Conv { return conv(in, out, 1, stride, 0, 1, 1) }

func (b *builder) expansion() int64 {
	if b.bottleneck {
		return 4
	}
	return 1
}

func (b *builder) layer(planes int64, blocks int, stride int64, dilate bool) nn.Module {
	before := b.dilation
	if dilate {
		b.dilation *= stride
		stride = 1
	}
	var downsample nn.Module
	if stride != 1 || b.inplanes != planes*b.expansion() {
		downsample = nn.NewSequential(conv1x1(b.inplanes, planes*b.expansion(), stride), nn.Must(b.norm(planes*b.expansion())))
	}
	chain := nn.NewSequential(b.block(planes, stride, downsample, before))
	b.inplanes = planes * b.expansion()
	for i := 1; i < blocks; i++ {
		nn.Check(chain.Append(fmt.Sprint(i), b.block(planes, 1, nil, b.dilation)))
	}
	return chain
}

func (b *builder) block(planes, stride int64, downsample nn.Module, dilation int64) nn.Module {
	if b.bottleneck {
		return b.newBottleneck(planes, stride, downsample, dilation)
	}
	return b.newBasicBlock(planes, stride, downsample, dilation)
}

// BasicBlock is the block of ResNet-18 and ResNet-34: two 3x3 convolutions.
type BasicBlock struct {
	nn.Base
	Conv1, BN1, ReLU, Conv2, BN2 nn.Module
	Downsample                   nn.Module // nil where the input fits as it is
}

func (b *builder) newBasicBlock(planes, stride int64, downsample nn.Module, dilation int64) *BasicBlock {
	if dilation > 1 {
		nn.Check(fmt.Errorf("ResNet: %w: basic blocks have no dilation", tdp.ErrUnsupported))
	}
	k := &BasicBlock{}
	k.Conv1 = conv3x3(b.inplanes, planes, stride, 1, 1)
	k.BN1 = nn.Must(b.norm(planes))
	k.ReLU = nn.NewReLUInplace()
	k.Conv2 = conv3x3(planes, planes, 1, 1, 1)
	k.BN2 = nn.Must(b.norm(planes))
	k.Downsample = downsample
	nn.Check(nn.Register(k, "conv1", &k.Conv1))
	nn.Check(nn.Register(k, "bn1", &k.BN1))
	nn.Check(nn.Register(k, "relu", &k.ReLU))
	nn.Check(nn.Register(k, "conv2", &k.Conv2))
	nn.Check(nn.Register(k, "bn2", &k.BN2))
	nn.Check(nn.Register(k, "downsample", &k.Downsample))
	return k
}

// ForwardT computes the block.
func (k *BasicBlock) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	train = train && k.Training()
	return residual(nn.Run(x, train, k.Conv1, k.BN1, k.ReLU, k.Conv2, k.BN2), x, k.Downsample, k.ReLU, train)
}

func (k *BasicBlock) String() string { return nn.Repr(k) }

// Bottleneck is the block of the deeper networks: 1x1, 3x3 and 1x1 convolutions.
type Bottleneck struct {
	nn.Base
	Conv1, BN1, Conv2, BN2, Conv3, BN3, ReLU nn.Module
	Downsample                               nn.Module // nil where the input fits as it is
}

func (b *builder) newBottleneck(planes, stride int64, downsample nn.Module, dilation int64) *Bottleneck {
	k := &Bottleneck{}
	width := int64(float64(planes)*(float64(b.width)/64)) * b.groups
	k.Conv1 = conv1x1(b.inplanes, width, 1)
	k.BN1 = nn.Must(b.norm(width))
	k.Conv2 = conv3x3(width, width, stride, b.groups, dilation)
	k.BN2 = nn.Must(b.norm(width))
	k.Conv3 = conv1x1(width, planes*4, 1)
	k.BN3 = nn.Must(b.norm(planes * 4))
	k.ReLU = nn.NewReLUInplace()
	k.Downsample = downsample
	nn.Check(nn.Register(k, "conv1", &k.Conv1))
	nn.Check(nn.Register(k, "bn1", &k.BN1))
	nn.Check(nn.Register(k, "conv2", &k.Conv2))
	nn.Check(nn.Register(k, "bn2", &k.BN2))
	nn.Check(nn.Register(k, "conv3", &k.Conv3))
	nn.Check(nn.Register(k, "bn3", &k.BN3))
	nn.Check(nn.Register(k, "relu", &k.ReLU))
	nn.Check(nn.Register(k, "downsample", &k.Downsample))
	return k
}

// ForwardT computes the block.
func (k *Bottleneck) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	train = train && k.Training()
	y := nn.Run(x, train, k.Conv1, k.BN1, k.ReLU, k.Conv2, k.BN2, k.ReLU, k.Conv3, k.BN3)
	return residual(y, x, k.Downsample, k.ReLU, train)
}

func (k *Bottleneck) String() string { return nn.Repr(k) }

// residual ends a block: it adds x, or what downsample makes of it, to y, which it takes over.
func residual(y, x *ts.Tensor, downsample, relu nn.Module, train bool) *ts.Tensor {
	identity := x
	if downsample != nil {
		identity = downsample.ForwardT(x, train)
	}
	sum := nn.Must(tdp.Add(y, identity, true))
	y.MustDrop()
	if identity != x {
		identity.MustDrop()
	}
	out := relu.ForwardT(sum, train)
	sum.MustDrop()
	return out
}

// ForwardT gives class scores for images [N, 3, H, W].
func (m *ResNet) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return nn.Run(x, train && m.Training(), m.Conv1, m.BN1, m.ReLU, m.MaxPool, m.Layer1, m.Layer2, m.Layer3, m.Layer4,
		m.AvgPool, m.flatten, m.FC)
}

func (m *ResNet) String() string { return nn.Repr(m) }
