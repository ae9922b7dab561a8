package checkpoint_test

import (
	"encoding/json"
	"iter"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/torchddp/optim"
)

// mlp is torch.nn.Sequential(Linear(4, 8), ReLU(), Linear(8, 1)).
type mlp struct{ sd *checkpoint.StateDict }

func newMLP(t *testing.T) *mlp {
	m := &mlp{checkpoint.NewStateDict()}
	for _, p := range []struct {
		name  string
		shape []int64
	}{{"0.weight", []int64{8, 4}}, {"0.bias", []int64{8}}, {"2.weight", []int64{1, 8}}, {"2.bias", []int64{1}}} {
		n := int64(1)
		for _, s := range p.shape {
			n *= s
		}
		x, err := tdp.FromSlice(make([]float32, n), p.shape, gotch.CPU)
		require.NoError(t, err)
		require.NoError(t, tdp.SetRequiresGrad(x, true))
		m.sd.Set(p.name, x)
	}
	return m
}

func (m *mlp) NamedParameters() iter.Seq2[string, *ts.Tensor] { return m.sd.All() }
func (m *mlp) NamedBuffers() iter.Seq2[string, *ts.Tensor] {
	return func(func(string, *ts.Tensor) bool) {}
}
func (m *mlp) ModuleVersions() iter.Seq2[string, int64] {
	return func(yield func(string, int64) bool) {
		for _, p := range []string{"", "0", "1", "2"} {
			if !yield(p, 1) {
				return
			}
		}
	}
}

func (m *mlp) params() []*ts.Tensor {
	var out []*ts.Tensor
	for _, p := range m.sd.All() {
		out = append(out, p)
	}
	return out
}

// step is one iteration on the batch of its number, and gives the loss.
func (m *mlp) step(t *testing.T, opt optim.Optimizer, number int) float64 {
	x := make([]float32, 16*4)
	y := make([]float32, 16)
	for i := range x {
		x[i] = float32((i*7+number*13)%11)/8 - 0.5
	}
	for i := range y {
		y[i] = float32((i*5+number*3)%7) / 4
	}
	in, err := tdp.FromSlice(x, []int64{16, 4}, gotch.CPU)
	require.NoError(t, err)
	want, err := tdp.FromSlice(y, []int64{16, 1}, gotch.CPU)
	require.NoError(t, err)
	p := m.params()
	require.NoError(t, opt.ZeroGrad(true))
	out := ts.MustLinear(ts.MustLinear(in, p[0], p[1]).MustRelu(true), p[2], p[3])
	loss := out.MustMseLoss(want, 1, true)
	require.NoError(t, loss.Backward())
	require.NoError(t, opt.Step())
	v, err := tdp.ToSlice[float32](loss)
	require.NoError(t, err)
	return float64(v[0])
}

const pyMLP = `
import json, sys, torch
torch.manual_seed(3)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
make = {"sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)}
opt = make[sys.argv[1]]()
def step(number):
    x = torch.tensor([((i * 7 + number * 13) % 11) / 8 - 0.5 for i in range(64)]).reshape(16, 4)
    y = torch.tensor([((i * 5 + number * 3) % 7) / 4 for i in range(16)]).reshape(16, 1)
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.item()
`

// Python trains three steps and saves, Go goes on for three and saves, Python goes on for three more: the losses are
// those of nine steps in one process, to the last bit.
func TestTrainingMovesBetweenPythonAndGo(t *testing.T) {
	for _, name := range []string{"sgd", "adamw"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			fromPython, fromGo := filepath.Join(dir, "python.pt"), filepath.Join(dir, "go.pt")
			var want []float64
			require.NoError(t, json.Unmarshal([]byte(testenv.RunPython(t, pyMLP+`
losses = [step(i) for i in range(3)]
torch.save({"iter_no": 3, "model": model.state_dict(), "optimizer": opt.state_dict()}, sys.argv[2])
losses += [step(i) for i in range(3, 9)]
print(json.dumps(losses))`, name, fromPython)), &want))

			v, err := checkpoint.Load(fromPython, checkpoint.LoadOptions{})
			require.NoError(t, err)
			s, err := checkpoint.SnapshotOf(v)
			require.NoError(t, err)
			require.EqualValues(t, 3, s.Step)
			m := newMLP(t)
			var opt optim.Optimizer
			if name == "sgd" {
				opt, err = optim.NewSGD(m.params(), optim.SGDOptions{LR: 0.5})
			} else {
				opt, err = optim.NewAdamW(m.params(), optim.AdamWOptions{LR: 0.5})
			}
			require.NoError(t, err)
			defer opt.Close()
			require.NoError(t, s.Restore(m, opt, nil, nil, nil))
			var got []float64
			for i := 3; i < 6; i++ {
				got = append(got, m.step(t, opt, i))
			}
			require.Equal(t, want[3:6], got, "Go goes on where Python stopped")

			next, err := checkpoint.Capture(0, 6, m, opt, nil, nil, nil)
			require.NoError(t, err)
			require.NoError(t, checkpoint.Save(fromGo, next.Value()))
			var last []float64
			require.NoError(t, json.Unmarshal([]byte(testenv.RunPython(t, pyMLP+`
ckpt = torch.load(sys.argv[2])
model.load_state_dict(ckpt["model"])
opt.load_state_dict(ckpt["optimizer"])
print(json.dumps([step(i) for i in range(ckpt["step"], 9)]))`, name, fromGo)), &last))
			require.Equal(t, want[6:], last, "Python goes on where Go stopped")
		})
	}
}

// A run that is stopped and resumed from its snapshot is the run that was never stopped, random numbers included.
func TestResumeIsBitIdentical(t *testing.T) {
	noisy := func(t *testing.T, m *mlp, opt optim.Optimizer, from, to int) []float64 {
		var out []float64
		for i := from; i < to; i++ {
			g, err := tdp.DefaultGenerator(gotch.CPU)
			require.NoError(t, err)
			r, err := g.Random64()
			require.NoError(t, err)
			out = append(out, float64(r), m.step(t, opt, int(uint64(r)%100)))
		}
		return out
	}
	start := func(t *testing.T) (*mlp, optim.Optimizer) {
		m := newMLP(t)
		for i, p := range m.params() {
			b, err := tdp.HostBytes(p)
			require.NoError(t, err)
			for k := range b {
				if k%4 == 2 {
					b[k] = byte(k + 40*i)
				} else if k%4 == 3 {
					b[k] = 0x3d
				}
			}
			runtime.KeepAlive(p)
		}
		opt, err := optim.NewAdam(m.params(), optim.AdamOptions{LR: 0.01})
		require.NoError(t, err)
		return m, opt
	}
	require.NoError(t, tdp.ManualSeed(7))
	m, opt := start(t)
	want := noisy(t, m, opt, 0, 10)
	require.NoError(t, opt.Close())

	require.NoError(t, tdp.ManualSeed(7))
	m, opt = start(t)
	got := noisy(t, m, opt, 0, 5)
	snapshot, err := checkpoint.Capture(1, 5, m, opt, nil, nil, nil)
	require.NoError(t, err)
	rng, err := checkpoint.CaptureRNG()
	require.NoError(t, err)
	snapshot.RNG = []*checkpoint.RNGState{rng}
	snapshot.Extra = checkpoint.NewDict().Set("run", "a")
	path := filepath.Join(t.TempDir(), "s.pt")
	require.NoError(t, checkpoint.Save(path, snapshot.Value()))
	require.NoError(t, opt.Close())
	require.NoError(t, tdp.ManualSeed(1234))

	v, err := checkpoint.Load(path, checkpoint.LoadOptions{})
	require.NoError(t, err)
	s, err := checkpoint.SnapshotOf(v)
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Epoch)
	run, err := checkpoint.Get[string](s.Extra, "run")
	require.NoError(t, err)
	require.Equal(t, "a", run)
	m = newMLP(t)
	opt, err = optim.NewAdam(m.params(), optim.AdamOptions{LR: 0.5})
	require.NoError(t, err)
	defer opt.Close()
	require.NoError(t, s.Restore(m, opt, nil, nil, nil))
	require.NoError(t, s.RNG[0].Restore())
	require.Equal(t, want, slices.Concat(got, noisy(t, m, opt, int(s.Step), 10)))
	require.Error(t, s.Restore(m, opt, opt, nil, nil), "a part that is not in the snapshot")

	require.Equal(t, "ok\n", testenv.RunPython(t, `
import sys, torch
s = torch.load(sys.argv[1])
torch.set_rng_state(s["rng"][0]["cpu"])
assert s["epoch"] == 1 and s["step"] == 5 and s["run"] == "a" and s["rng"][0]["cuda"] == [], s.keys()
print("ok")`, path))
}
