package models

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/models/nn"
)

type parityCase struct {
	Name, Model, Loss string
	Input, Target     []any
	Steps, Quick      int
	Seed              uint64
}

// parityResult is what parity.py prints about a case.
type parityResult struct {
	Tree    []string
	Repr    string
	Init    []string
	InitSum float64 `json:"init_sum"`
	InitAbs float64 `json:"init_abs"`
	Output  string
	Losses  []float64
	Grads   []string
	XGrad   string `json:"x_grad"`
	Eval    string
	Final   []string
}

const parityRate = 0.05 // parity.py's LR

func parityCases(t *testing.T) []parityCase {
	text, err := os.ReadFile("testdata/cases.json")
	require.NoError(t, err)
	var cases []parityCase
	require.NoError(t, json.Unmarshal(text, &cases))
	names := map[string]bool{}
	for i := range cases {
		names[cases[i].Name] = true
		if cases[i].Steps == 0 {
			cases[i].Steps = 20
		}
	}
	for name := range parityModels {
		require.True(t, names[name], "testdata/cases.json has no case %q", name)
	}
	return cases
}

// full asks for 20 steps of every network, which takes minutes.
func full() bool { return os.Getenv("GODDP_FULL_PARITY") != "" }

// steps is how long a case trains: networks that take long train less, unless all is asked for.
func (c parityCase) steps() int {
	if c.Quick > 0 && !full() {
		return c.Quick
	}
	return c.Steps
}

// TestLayersAndNetworksLikePython trains every layer and network beside live Python and holds weights, outputs,
// gradients, losses and what is printed bit for bit.
func TestLayersAndNetworksLikePython(t *testing.T) {
	python := testenv.Python(t)
	cases := parityCases(t)
	oneThread(t)
	args := []string{"testdata/parity.py", "testdata/cases.json"}
	if full() {
		args = append(args, "--full")
	} else {
		t.Log("networks train a few steps only; GODDP_FULL_PARITY=1 trains each for 20")
	}
	if testing.Short() {
		t.Log("-short: layers and SimpleNet only")
		for _, c := range cases {
			if c.Quick == 0 {
				args = append(args, c.Name)
			}
		}
	}
	want := map[string]parityResult{}
	cmd := exec.Command(python, args...)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(out, &want))
	for _, c := range cases {
		w, ok := want[c.Name]
		if !ok && testing.Short() {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			got := c.run(t, c.steps())
			require.Equal(t, w.Tree, got.Tree)
			require.Equal(t, w.Repr, got.Repr)
			require.Equal(t, w.Init, got.Init, "initial state")
			require.Equal(t, w.Output, got.Output, "first output")
			require.Equal(t, w.Grads, got.Grads, "gradients")
			require.Equal(t, w.XGrad, got.XGrad, "gradient of the input")
			require.Len(t, got.Losses, c.steps())
			require.Equal(t, w.Losses, got.Losses, "losses")
			require.Equal(t, w.Final, got.Final, "final state")
			require.Equal(t, w.Eval, got.Eval, "output in evaluation")
		})
	}
}

// TestLayersAndNetworksLikeGoldens does the same where there is no Python, against what parity.py --golden printed.
// Other CPUs take other kernels, so figures are held within rounding.
func TestLayersAndNetworksLikeGoldens(t *testing.T) {
	text, err := os.ReadFile("testdata/golden.json")
	require.NoError(t, err)
	var golden map[string]struct {
		Tree, Repr string
		InitSum    float64 `json:"init_sum"`
		InitAbs    float64 `json:"init_abs"`
		Losses     []float64
	}
	require.NoError(t, json.Unmarshal(text, &golden))
	oneThread(t)
	for _, c := range parityCases(t) {
		if c.Quick > 0 && !full() { // the live comparison has them; one network stays for machines without Python
			if testing.Short() || c.Name != "resnet18_cifar" {
				continue
			}
		}
		t.Run(c.Name, func(t *testing.T) {
			w, ok := golden[c.Name]
			require.True(t, ok, "make it with testdata/parity.py --golden")
			got := c.run(t, min(c.steps(), len(w.Losses)))
			require.Equal(t, w.Tree, digest(strings.Join(got.Tree, "\n")))
			require.Equal(t, w.Repr, digest(got.Repr))
			require.InEpsilon(t, 1+w.InitAbs, 1+got.InitAbs, 1e-6)
			require.InDelta(t, w.InitSum, got.InitSum, 1e-6*(1+w.InitAbs))
			for i, loss := range got.Losses {
				if math.Abs(loss-w.Losses[i]) > 1e-3*(1+math.Abs(w.Losses[i])) {
					t.Fatalf("loss of step %d: %v, the golden is %v", i, loss, w.Losses[i])
				}
			}
		})
	}
}

func digest(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])[:16]
}

func oneThread(t *testing.T) {
	before, err := tdp.NumThreads()
	require.NoError(t, err)
	require.NoError(t, tdp.SetNumThreads(1))
	t.Cleanup(func() { require.NoError(t, tdp.SetNumThreads(before)) })
}

// run trains the case's model as parity.py does.
//
// It keeps to one thread: autograd numbers operations by thread and runs a backward in the order of those numbers, so
// a forward that moved between threads may sum the gradients of shared weights in another order.
func (c parityCase) run(t *testing.T, steps int) parityResult {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, tdp.SetNumThreads(1)) // OpenMP keeps the number by thread, and this may be another than oneThread's
	build, ok := parityModels[c.Name]
	require.True(t, ok, "there is no Go model for case %q", c.Name)
	loss, ok := parityLosses[c.Loss]
	require.True(t, ok, "there is no Go loss for %s", c.Loss)
	require.NoError(t, tdp.ManualSeed(c.Seed))
	warm := empty(t, 7)
	require.NoError(t, tdp.Uniform(warm, 0, 1))
	warm.MustDrop()

	model, err := nn.Try(build)
	require.NoError(t, err)
	x, y := fill(t, c.Input), fill(t, c.Target)
	defer x.MustDrop()
	defer y.MustDrop()
	var r parityResult
	r.Repr = nn.Repr(model)
	for name, p := range model.NamedParameters() {
		r.Tree = append(r.Tree, fmt.Sprintf("P %s %s", name, pyList(p)))
	}
	for name, p := range model.NamedBuffers() {
		r.Tree = append(r.Tree, fmt.Sprintf("B %s %s", name, pyList(p)))
	}
	for name, p := range model.NamedState() {
		r.Tree = append(r.Tree, fmt.Sprintf("S %s %s", name, pyList(p)))
		r.Init = append(r.Init, sha(t, p))
		sum, abs := sums(t, p)
		r.InitSum += sum
		r.InitAbs += abs
	}
	for name, v := range model.ModuleVersions() {
		r.Tree = append(r.Tree, fmt.Sprintf("V %s %d", name, v))
	}
	for name, m := range nn.NamedModules(model) {
		kind, _, _ := strings.Cut(nn.Repr(m), "(")
		r.Tree = append(r.Tree, fmt.Sprintf("M %s %s", name, kind))
	}

	opt, err := tdp.NewOptim(tdp.SGD)
	require.NoError(t, err)
	defer func() { require.NoError(t, opt.Close()) }()
	var params []*ts.Tensor
	for p := range model.Parameters() {
		params = append(params, p)
	}
	require.NoError(t, opt.AddGroup(params, tdp.OptimOptions{LR: parityRate, Implementation: tdp.ImplSingle}))
	if c.Input[0] == "normal" {
		require.NoError(t, tdp.SetRequiresGrad(x, true))
	}
	for step := range steps {
		require.NoError(t, tdp.SetGrad(x, nil))
		require.NoError(t, model.ZeroGrad())
		out, err := nn.Forward(model, x, true)
		require.NoError(t, err)
		l, err := nn.Try(func() *ts.Tensor { return loss.Forward(out, y) })
		require.NoError(t, err)
		if l.Dim() > 0 {
			l = l.MustMean(gotch.Float, true)
		}
		require.NoError(t, tdp.Backward(l, nil, false, nil))
		if step == 0 {
			r.Output = sha(t, out)
		}
		var grads []string
		for _, p := range params {
			g, err := tdp.Grad(p)
			require.NoError(t, err)
			if g == nil {
				grads = append(grads, "-")
				continue
			}
			grads = append(grads, sha(t, g))
			g.MustDrop()
		}
		r.Grads = append(r.Grads, digest(strings.Join(grads, " ")))
		if g, err := tdp.Grad(x); err == nil && g != nil {
			r.XGrad = sha(t, g)
			g.MustDrop()
		}
		require.NoError(t, opt.Step(nil, nil))
		value, err := tdp.ToSlice[float32](l)
		require.NoError(t, err)
		r.Losses = append(r.Losses, float64(value[0]))
		out.MustDrop()
		l.MustDrop()
	}
	out, err := nn.Evaluate(model, x)
	require.NoError(t, err)
	r.Eval = sha(t, out)
	out.MustDrop()
	for _, p := range model.NamedState() {
		r.Final = append(r.Final, sha(t, p))
	}
	model.Drop()
	return r
}

func shape(t *ts.Tensor) []int64 {
	info, err := tdp.Describe(t)
	nn.Check(err)
	return info.Shape
}

// pyList prints a shape as Python prints a list.
func pyList(t *ts.Tensor) string { return strings.ReplaceAll(fmt.Sprint(shape(t)), " ", ", ") }

func empty(t testing.TB, shape ...int64) *ts.Tensor {
	x, err := tdp.Empty(shape, gotch.Float, gotch.CPU, false)
	require.NoError(t, err)
	return x
}

func floats(v ...float32) *ts.Tensor {
	return nn.Must(tdp.FromSlice(v, []int64{int64(len(v))}, gotch.CPU))
}

// fill makes an input or target as parity.py does.
func fill(t *testing.T, spec []any) *ts.Tensor {
	var n []int64
	for _, v := range spec[1:] {
		n = append(n, int64(v.(float64)))
	}
	count := func(shape []int64) int64 {
		c := int64(1)
		for _, d := range shape {
			c *= d
		}
		return c
	}
	switch spec[0] {
	case "normal", "prob":
		x := empty(t, n...)
		require.NoError(t, tdp.Normal(x, 0, 1))
		if spec[0] == "normal" {
			return x
		}
		defer x.MustDrop()
		y, err := tdp.Softmax(x, 1, false)
		require.NoError(t, err)
		return y
	case "index", "class":
		factor := int64(5)
		if spec[0] == "class" {
			factor = 7
		}
		v := make([]int64, count(n[1:]))
		for i := range v {
			v[i] = int64(i) * factor % n[0]
		}
		x, err := tdp.FromSlice(v, n[1:], gotch.CPU)
		require.NoError(t, err)
		return x
	case "binary":
		v := make([]float32, count(n))
		for i := range v {
			if i%3 == 0 {
				v[i] = 1
			}
		}
		x, err := tdp.FromSlice(v, n, gotch.CPU)
		require.NoError(t, err)
		return x
	}
	t.Fatalf("unknown kind of tensor %v", spec[0])
	return nil
}

func contents(t *testing.T, x *ts.Tensor) ([]byte, tdp.TensorInfo) {
	info, err := tdp.Describe(x)
	require.NoError(t, err)
	b := make([]byte, info.Numel*int64(info.ElementSize))
	require.NoError(t, tdp.ToBytes(x, b))
	return b, info
}

func sha(t *testing.T, x *ts.Tensor) string {
	b, _ := contents(t, x)
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])[:16]
}

func sums(t *testing.T, x *ts.Tensor) (sum, abs float64) {
	info, err := tdp.Describe(x)
	require.NoError(t, err)
	if info.DType == gotch.Int64 {
		v, err := tdp.ToSlice[int64](x)
		require.NoError(t, err)
		for _, n := range v {
			sum += float64(n)
			abs += math.Abs(float64(n))
		}
		return sum, abs
	}
	v, err := tdp.ToSlice[float32](x)
	require.NoError(t, err)
	for _, f := range v {
		sum += float64(f)
		abs += math.Abs(float64(f))
	}
	return sum, abs
}
