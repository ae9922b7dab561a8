package torchddp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	gotchnn "github.com/sugarme/gotch/nn"
	"github.com/sugarme/gotch/ts"
)

// elements are those of a tensor of any dtype.
func elements(t *ts.Tensor) []float64 {
	return t.MustDetach(false).MustTotype(gotch.Double, true).Float64Values()
}

// near tells whether two tensors have the same shape and elements within tol.
func near(what string, got, want *ts.Tensor, tol float64) error {
	if g, w := got.MustSize(), want.MustSize(); !slices.Equal(g, w) {
		return fmt.Errorf("%s: shape %v, want %v", what, g, w)
	}
	a, b := elements(got), elements(want)
	for i := range a {
		if d := a[i] - b[i]; !(d <= tol && d >= -tol) {
			return fmt.Errorf("%s: element %d is %v, want %v", what, i, a[i], b[i])
		}
	}
	return nil
}

// share gives a rank's samples of the whole batch.
func share(all *ts.Tensor, shares []int64, rank int) *ts.Tensor {
	begin := int64(0)
	for _, n := range shares[:rank] {
		begin += n
	}
	return all.MustNarrow(0, begin, shares[rank], false)
}

// builds keeps the ranks of one process from drawing from the generator at the same time.
var builds sync.Mutex

func build(make func() nn.Module, dtype gotch.DType) (nn.Module, error) {
	builds.Lock()
	defer builds.Unlock()
	if err := ManualSeed(9); err != nil {
		return nil, err
	}
	m, err := nn.Try(make)
	if err != nil {
		return nil, err
	}
	return m, m.To(gotch.CPU, dtype)
}

// normCase is a model with batch norms, and a whole batch that ranks share out.
type normCase struct {
	name   string
	make   func() nn.Module
	layers int
	sample []int64     // the shape of one sample
	shares []int64     // samples a rank
	input  gotch.DType // zero: double
	last   bool        // channels-last input
	tol    float64     // 0: 1e-11
}

// normStep is one training step of the whole batch in one process.
type normStep struct {
	x, upstream, y, gx *ts.Tensor
	grads, state       []*ts.Tensor
}

func (c *normCase) paramDType() gotch.DType {
	if c.input == 0 {
		return gotch.Double
	}
	return gotch.Float
}

const normSteps = 5 // TorchScript would rewrite its graphs after the second

// random is a batch in the case's dtype and layout.
func (c *normCase) random(shape []int64) *ts.Tensor {
	x := ts.MustRandn(shape, gotch.Double, gotch.CPU)
	if c.input != 0 {
		x = x.MustTotype(c.input, true)
	}
	if c.last {
		if err := tdp.Move(x, nil, gotch.Invalid, tdp.ChannelsLast); err != nil {
			panic(err)
		}
	}
	return x
}

func gradOf(t *ts.Tensor) (*ts.Tensor, error) {
	g, err := tdp.Grad(t)
	if err == nil && g == nil {
		err = errors.New("no gradient")
	}
	return g, err
}

// descend is a step of plain SGD.
func descend(m Module, grads []*ts.Tensor) error {
	return NoGrad(func() error {
		i := 0
		for _, p := range m.NamedParameters() {
			d, err := grads[i].MustTotype(p.DType(), false).MulScalar(ts.FloatScalar(-0.1), true)
			if err != nil {
				return err
			}
			p.MustAdd_(d)
			d.MustDrop()
			i++
		}
		return nil
	})
}

// reference trains the model as one process with everything.
func (c *normCase) reference(t *testing.T) []normStep {
	m, err := build(c.make, gotch.Double)
	require.NoError(t, err)
	total := int64(0)
	for _, n := range c.shares {
		total += n
	}
	require.NoError(t, ManualSeed(5))
	var steps []normStep
	for range normSteps {
		s := normStep{x: c.random(append([]int64{total}, c.sample...))}
		x := s.x.MustTotype(gotch.Double, false).MustDetach(true)
		require.NoError(t, tdp.SetRequiresGrad(x, true))
		s.y = m.ForwardT(x, true)
		s.upstream = ts.MustRandn(s.y.MustSize(), gotch.Double, gotch.CPU)
		if c.input != 0 {
			s.upstream = s.upstream.MustTotype(c.input, true)
		}
		require.NoError(t, m.ZeroGrad())
		require.NoError(t, tdp.Backward(s.y, s.upstream.MustTotype(gotch.Double, false), false, nil))
		s.gx, err = gradOf(x)
		require.NoError(t, err)
		for _, p := range m.NamedParameters() {
			g, err := gradOf(p)
			require.NoError(t, err)
			s.grads = append(s.grads, g)
		}
		require.NoError(t, descend(m, s.grads))
		for _, p := range m.NamedState() {
			s.state = append(s.state, ts.MustOfSlice(elements(p)).MustView(p.MustSize(), true))
		}
		steps = append(steps, s)
	}
	return steps
}

func (c *normCase) run(t *testing.T) {
	steps := c.reference(t)
	tol := orDefault(c.tol, 1e-11)
	group(t, len(c.shares), func(pg *ProcessGroup) error {
		m, err := build(c.make, c.paramDType())
		if err != nil {
			return err
		}
		if n, err := ConvertSyncBatchNorm(m, pg); err != nil || n != c.layers {
			return fmt.Errorf("converted %d layers of %d: %v", n, c.layers, err)
		}
		for i, s := range steps {
			x := share(s.x, c.shares, pg.Rank()).MustDetach(true)
			if !c.last {
				x = x.MustContiguous(true)
			}
			if err := tdp.SetRequiresGrad(x, true); err != nil {
				return err
			}
			y, err := nn.Forward(m, x, true)
			if err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
			at := func(what string) string { return fmt.Sprintf("step %d: %s", i, what) }
			if err := near(at("output"), y, share(s.y, c.shares, pg.Rank()), tol); err != nil {
				return err
			}
			if c.last {
				if stride := y.MustStride(); stride[1] != 1 {
					return fmt.Errorf("the output is not channels-last: strides %v", stride)
				}
			}
			if err := m.ZeroGrad(); err != nil {
				return err
			}
			if err := tdp.Backward(y, share(s.upstream, c.shares, pg.Rank()), false, nil); err != nil {
				return err
			}
			gx, err := gradOf(x)
			if err != nil {
				return err
			}
			if err := near(at("gradient of the input"), gx, share(s.gx, c.shares, pg.Rank()), tol); err != nil {
				return err
			}
			k := 0
			var sums []*ts.Tensor
			for name, p := range m.NamedParameters() {
				g, err := gradOf(p)
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				if err := pg.AllReduce(g, Sum); err != nil {
					return err
				}
				if err := near(at("gradient of "+name), g, s.grads[k], tol); err != nil {
					return err
				}
				sums = append(sums, g)
				k++
			}
			if err := descend(m, sums); err != nil {
				return err
			}
			k = 0
			for name, p := range m.NamedState() {
				// Instance norm stays each rank's own, as in Python.
				if !strings.Contains(name, "instance.running") {
					if err := near(at(name), p, s.state[k], tol); err != nil {
						return err
					}
				}
				k++
			}
		}
		return c.alone(m, pg, steps[0].x)
	})
}

// alone: evaluation, and training after a revert, do not communicate: one rank does them while the others have left.
func (c *normCase) alone(m nn.Module, pg *ProcessGroup, x *ts.Tensor) error {
	if pg.Rank() != 0 {
		return nil
	}
	if c.input != 0 {
		x = x.MustTotype(gotch.Float, false)
	}
	got, err := nn.Evaluate(m, x)
	if err != nil {
		return err
	}
	if n, err := RevertSyncBatchNorm(m); err != nil || n != c.layers {
		return fmt.Errorf("reverted %d layers of %d: %v", n, c.layers, err)
	}
	want, err := nn.Evaluate(m, x)
	if err != nil {
		return err
	}
	if err := near("evaluation", got, want, 0); err != nil {
		return err
	}
	_, err = nn.Forward(m, x, true)
	return err
}

func conv(in, out int64) nn.Module {
	return nn.Must(nn.NewConv2d(in, out, nn.Size{3}, nn.ConvOptions{}))
}

func norm2d(o nn.BatchNormOptions) nn.Module { return nn.Must(nn.NewBatchNorm2d(4, o)) }

// TestSyncBatchNormOfModels: our models on ranks give the outputs, gradients, weights and running statistics of one
// process with the whole batch, over several steps.
func TestSyncBatchNormOfModels(t *testing.T) {
	one := func(o nn.BatchNormOptions) func() nn.Module {
		return func() nn.Module { return nn.NewSequential(conv(3, 4), norm2d(o), nn.NewReLU(), conv(4, 2)) }
	}
	image, even := []int64{3, 6, 6}, []int64{2, 3}
	for _, c := range []normCase{
		{name: "affine", make: one(nn.BatchNormOptions{}), layers: 1, sample: image, shares: even},
		{name: "no affine", make: one(nn.BatchNormOptions{NoAffine: true}), layers: 1, sample: image, shares: even},
		{name: "no running statistics", make: one(nn.BatchNormOptions{NoRunningStats: true}), layers: 1, sample: image, shares: even},
		{name: "neither", make: one(nn.BatchNormOptions{NoRunningStats: true, NoAffine: true}), layers: 1, sample: image, shares: even},
		{name: "cumulative", make: one(nn.BatchNormOptions{Cumulative: true}), layers: 1, sample: image, shares: []int64{1, 2, 1}},
		{name: "an empty share", make: one(nn.BatchNormOptions{Eps: 1e-3, Momentum: 0.3}), layers: 1, sample: image, shares: []int64{3, 0}},
		{name: "channels last", make: one(nn.BatchNormOptions{}), layers: 1, sample: image, shares: even, last: true},
		{name: "one value a rank", layers: 2, sample: []int64{5}, shares: []int64{1, 1, 1}, make: func() nn.Module {
			return nn.NewSequential(nn.Must(nn.NewLinear(5, 4, nn.LinearOptions{})), nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{})),
				nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{NoRunningStats: true, NoAffine: true})))
		}},
		{name: "1d of sequences", layers: 1, sample: []int64{4, 3}, shares: even, make: func() nn.Module {
			return nn.NewSequential(nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{})))
		}},
		{name: "3d", layers: 1, sample: []int64{2, 3, 4, 3}, shares: even, make: func() nn.Module {
			return nn.NewSequential(nn.Must(nn.NewBatchNorm3d(2, nn.BatchNormOptions{})), nn.NewSigmoid())
		}},
		{name: "half", layers: 1, sample: []int64{4, 3, 3}, shares: even, input: gotch.Half, tol: 3e-2,
			make: func() nn.Module { return nn.NewSequential(norm2d(nn.BatchNormOptions{})) }},
		{name: "bfloat16, an empty share", layers: 1, sample: []int64{4, 3, 3}, shares: []int64{0, 4}, input: gotch.BFloat16, tol: 2e-1,
			make: func() nn.Module { return nn.NewSequential(norm2d(nn.BatchNormOptions{})) }},
		{name: "half, neither", layers: 1, sample: []int64{2, 4}, shares: even, input: gotch.Half, tol: 3e-2, make: func() nn.Module {
			return nn.NewSequential(nn.Must(nn.NewBatchNorm1d(2, nn.BatchNormOptions{NoRunningStats: true, NoAffine: true})))
		}},
	} {
		t.Run(c.name, c.run)
	}
}

// TestSyncBatchNormOfScripts does it with TorchScript models, of which one stands inside one of ours.
func TestSyncBatchNormOfScripts(t *testing.T) {
	dir := t.TempDir()
	_, err := startPython(t, t.Context(), "norms.py", nil, "make", dir)()
	require.NoError(t, err)
	load := func() nn.Module { return nn.Must(models.LoadScript(dir+"/net.pt", gotch.CPU)) }
	image := []int64{3, 6, 6}
	for _, c := range []normCase{
		{name: "alone", make: load, layers: 5, sample: image, shares: []int64{2, 3}},
		{name: "inside", make: func() nn.Module { return nn.NewSequential(load(), nn.NewTanh()) }, layers: 5, sample: image, shares: []int64{1, 2, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Each time as a program has it that never converted anything.
			_, err := tdp.ScriptOptimize(true)
			require.NoError(t, err)
			c.run(t)
		})
	}
	t.Run("neither", func(t *testing.T) {
		group(t, 2, func(pg *ProcessGroup) error {
			m, err := models.LoadScript(dir+"/bare.pt", gotch.CPU)
			if err != nil {
				return err
			}
			if _, err = ConvertSyncBatchNorm(m, pg); !errors.Is(err, ErrValue) || !strings.Contains(err.Error(), `the layer "1" has neither`) {
				return fmt.Errorf("got %v", err)
			}
			return nil
		})
	})
}

// gotchNet is a model of gotch's own layers.
func gotchNet() nn.Module {
	vs := gotchnn.NewVarStore(gotch.CPU)
	root := vs.Root()
	a := gotchnn.NewConv2D(root.Sub("a"), 3, 4, 3, gotchnn.DefaultConv2DConfig())
	z := gotchnn.BatchNorm2D(root.Sub("z_first"), 4, gotchnn.DefaultBatchNormConfig())
	b := gotchnn.BatchNorm2D(root.Sub("b_last"), 4, gotchnn.DefaultBatchNormConfig())
	f := gotchnn.NewFuncT(func(x *ts.Tensor, train bool) *ts.Tensor {
		return b.ForwardT(z.ForwardT(a.ForwardT(x, train), train).MustTanh(true), train)
	})
	return nn.Must(models.FromVarStore(vs, &f))
}

// TestSyncBatchNormOfVarStores does it with gotch's own layers.
func TestSyncBatchNormOfVarStores(t *testing.T) {
	c := normCase{layers: 2, sample: []int64{3, 6, 6}, shares: []int64{2, 3}, make: gotchNet}
	c.run(t)
}

// TestSyncBatchNormUnderDDP: converted, wrapped and trained, models of every kind hold the weights that one process with
// the whole batch gets. A TorchScript model is saved after that, and Python goes on with it.
func TestSyncBatchNormUnderDDP(t *testing.T) {
	dir := t.TempDir()
	script := dir + "/net.pt"
	c := normCase{sample: []int64{3, 7, 7}, shares: []int64{2, 2}}
	t.Run("ours", func(t *testing.T) {
		c.make = func() nn.Module {
			return nn.NewSequential(conv(3, 4), norm2d(nn.BatchNormOptions{}), nn.NewReLU(),
				nn.NewSequential(conv(4, 4), norm2d(nn.BatchNormOptions{NoRunningStats: true, NoAffine: true})), conv(4, 2))
		}
		c.trainDDP(t)
	})
	t.Run("gotch", func(t *testing.T) {
		c.make = gotchNet
		c.trainDDP(t)
	})
	t.Run("TorchScript", func(t *testing.T) {
		_, err := startPython(t, t.Context(), "norms.py", nil, "make", dir)()
		require.NoError(t, err)
		c.make = func() nn.Module { return nn.Must(models.LoadScript(script, gotch.CPU)) }
		m := c.trainDDP(t).(*models.ScriptModule)
		require.NoError(t, m.Save(script))
		out, err := startPython(t, t.Context(), "norms.py", nil, "check", dir)()
		require.NoError(t, err)
		want := lines(out)
		for name, p := range m.NamedState() {
			sum := p.MustDetach(false).MustTotype(gotch.Double, true).MustSum(gotch.Double, true).Float64Values()[0]
			require.Equal(t, want[0], fmt.Sprintf("%s %.17g", name, sum))
			want = want[1:]
		}
		require.Equal(t, []string{"trained"}, want)
	})
}

// trainDDP trains the case's model on two ranks and gives rank 0's.
func (c *normCase) trainDDP(t *testing.T) (first nn.Module) {
	steps := c.reference(t)
	group(t, 2, func(pg *ProcessGroup) error {
		m, err := build(c.make, gotch.Double)
		if err != nil {
			return err
		}
		if pg.Rank() == 0 {
			first = m
		}
		if _, err := ConvertSyncBatchNorm(m, pg); err != nil {
			return err
		}
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		for i, s := range steps {
			y, err := d.Forward(share(s.x, c.shares, pg.Rank()))
			if err != nil {
				return err
			}
			if err := m.ZeroGrad(); err != nil {
				return err
			}
			// The reference sums over its batch, DDP averages over two ranks.
			loss := y.MustMul(share(s.upstream, c.shares, pg.Rank()), false).MustSum(gotch.Double, true)
			if err := d.Backward(loss.MustMulScalar(ts.FloatScalar(2), true)); err != nil {
				return err
			}
			var grads []*ts.Tensor
			for name, p := range m.NamedParameters() {
				g, err := gradOf(p)
				if err != nil {
					return err
				}
				if err := near(fmt.Sprintf("step %d: gradient of %s", i, name), g, s.grads[len(grads)], 1e-11); err != nil {
					return err
				}
				grads = append(grads, g)
			}
			if err := descend(m, grads); err != nil {
				return err
			}
		}
		data, err := d.LoggingData()
		if err == nil && !data.HasSyncBN {
			err = errors.New("the logging data does not tell of SyncBatchNorm")
		}
		return err
	})
	return first
}

// TestSyncBatchNormOfSubgroups: a layer of two ranks takes nothing from the other two, in nested modules too.
func TestSyncBatchNormOfSubgroups(t *testing.T) {
	for _, o := range []nn.BatchNormOptions{{}, {NoRunningStats: true, NoAffine: true}} {
		group(t, 4, func(pg *ProcessGroup) error {
			mine, _, err := pg.NewSubgroups(context.Background(), 2, GroupOptions{})
			if err != nil {
				return err
			}
			m, err := build(func() nn.Module {
				return nn.NewSequential(nn.NewIdentity(), nn.NewSequential(nn.Must(nn.NewBatchNorm1d(2, o))))
			}, gotch.Float)
			if err != nil {
				return err
			}
			if _, err := ConvertSyncBatchNorm(m, mine); err != nil {
				return err
			}
			// Ranks 0 and 1 have 0 and 2, ranks 2 and 3 have 10 and 30: normalised, each pair is -1 and 1.
			v := []float32{0, 2, 10, 30}[pg.Rank()]
			y, err := nn.Forward(m, tensorOf(gotch.Float, float64(v), float64(v)).MustView([]int64{1, 2}, true), true)
			if err != nil {
				return err
			}
			want := float64(2*(pg.Rank()%2) - 1)
			return near("output", y, tensorOf(gotch.Float, want, want).MustView([]int64{1, 2}, true), 1e-4)
		})
	}
}

// TestSyncBatchNormOfOneRank is ordinary batch norm: one value a channel is an error, as in Python.
func TestSyncBatchNormOfOneRank(t *testing.T) {
	group(t, 1, func(pg *ProcessGroup) error {
		for _, o := range []nn.BatchNormOptions{{}, {NoRunningStats: true}, {NoRunningStats: true, NoAffine: true}} {
			m := nn.Must(nn.NewBatchNorm1d(2, o))
			if _, err := ConvertSyncBatchNorm(m, pg); err != nil {
				return err
			}
			_, err := nn.Forward(m, ts.MustOnes([]int64{1, 2}, gotch.Float, gotch.CPU), true)
			if !errors.Is(err, tdp.ErrValue) || !strings.Contains(err.Error(), "more than 1 value per channel") {
				return fmt.Errorf("got %v", err)
			}
		}
		return nil
	})
}

// TestSyncBatchNormRefuses what Python's refuses, and a group that is gone.
func TestSyncBatchNormRefuses(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		for _, o := range []nn.BatchNormOptions{{}, {NoRunningStats: true, NoAffine: true}} {
			m := nn.Must(nn.NewBatchNorm1d(0, o))
			if _, err := ConvertSyncBatchNorm(m, pg); err != nil {
				return err
			}
			_, err := nn.Forward(m, ts.MustOnes([]int64{2, 0}, gotch.Float, gotch.CPU), true)
			if err == nil || !strings.Contains(err.Error(), "number of input channels should be non-zero") {
				return fmt.Errorf("no channels: %v", err)
			}
			empty := nn.Must(nn.NewBatchNorm1d(3, o))
			if _, err := ConvertSyncBatchNorm(empty, pg); err != nil {
				return err
			}
			_, err = nn.Forward(empty, ts.MustOnes([]int64{0, 3}, gotch.Float, gotch.CPU), true)
			if err == nil || !strings.Contains(err.Error(), "every rank's batch is empty") {
				return fmt.Errorf("nothing anywhere: %v", err)
			}
			if err := pg.Barrier(); err != nil {
				return err
			}
		}
		bare := nn.Must(nn.NewBatchNorm1d(3, nn.BatchNormOptions{NoRunningStats: true, NoAffine: true}))
		if _, err := ConvertSyncBatchNorm(bare, pg); err != nil {
			return err
		}
		if err := pg.Destroy(); err != nil {
			return err
		}
		if _, err := nn.Forward(bare, ts.MustOnes([]int64{2, 3}, gotch.Float, gotch.CPU), true); err == nil {
			return errors.New("a destroyed group was used")
		}
		return nil
	})
}
