package optim

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
)

// The shapes of testdata/trajectories.py: a matrix, a vector, a convolution in channels-last layout, one that needs
// several pieces and leaves a rest, a scalar, a single element, exactly one piece.
var shapes = [][]int64{{33, 17}, {5}, {4, 3, 5, 6}, {40001}, {}, {1, 1}, {16384}}

const (
	channelsLast = 2
	steps        = 100
	distinct     = 20 // gradients repeat after so many steps
)

// pyCase is one case for trajectories.py, with the Go side of it.
type pyCase struct {
	Name   string         `json:"name"`
	Algo   string         `json:"algo"`
	KW     map[string]any `json:"kw"`
	DType  string         `json:"dtype"`
	Save   int            `json:"save,omitempty"`
	Groups []pyGroup      `json:"groups,omitempty"`

	make func(p []*ts.Tensor) (Optimizer, error)
}

// late: the last parameter gets its first gradient in the fourth step. Python's fused SGD with momentum fails then.
func (c *pyCase) late() bool {
	m, ok := c.KW["momentum"]
	return !(c.Algo == "SGD" && c.KW["fused"] == true && ok && m != 0.0)
}

type pyGroup struct {
	Params []int          `json:"params"`
	KW     map[string]any `json:"kw,omitempty"`
}

type kw = map[string]any

func sgd(o SGDOptions) func([]*ts.Tensor) (Optimizer, error) {
	return func(p []*ts.Tensor) (Optimizer, error) { return NewSGD(p, o) }
}
func adam(o AdamOptions) func([]*ts.Tensor) (Optimizer, error) {
	return func(p []*ts.Tensor) (Optimizer, error) { return NewAdam(p, o) }
}
func adamw(o AdamWOptions) func([]*ts.Tensor) (Optimizer, error) {
	return func(p []*ts.Tensor) (Optimizer, error) { return NewAdamW(p, o) }
}
func rmsprop(o RMSpropOptions) func([]*ts.Tensor) (Optimizer, error) {
	return func(p []*ts.Tensor) (Optimizer, error) { return NewRMSprop(p, o) }
}
func adagrad(o AdagradOptions) func([]*ts.Tensor) (Optimizer, error) {
	return func(p []*ts.Tensor) (Optimizer, error) { return NewAdagrad(p, o) }
}

// cases are the options whose trajectories must be Python's, for every implementation that has them.
func cases() []pyCase {
	var out []pyCase
	each := func(name, algo string, k kw, impls []Implementation, make func(i Implementation) func([]*ts.Tensor) (Optimizer, error)) {
		for _, i := range impls {
			full := kw{}
			for key, v := range k {
				full[key] = v
			}
			switch i {
			case ForLoop:
				full["foreach"] = false
			case Foreach:
				full["foreach"] = true
			case Fused:
				full["fused"] = true
			}
			dtypes := []string{"float32"}
			if len(k) > 2 {
				dtypes = []string{"float32", "float64", "bfloat16"}
			}
			for _, dtype := range dtypes {
				out = append(out, pyCase{Name: fmt.Sprintf("%s-%s-%s", name, i, dtype), Algo: algo, KW: full, DType: dtype, make: make(i)})
			}
		}
	}
	all := []Implementation{Auto, ForLoop, Foreach, Fused}
	sgdCase := func(name string, k kw, o SGDOptions) {
		each("sgd-"+name, "SGD", k, all, func(i Implementation) func([]*ts.Tensor) (Optimizer, error) {
			o := o
			o.Implementation = i
			return sgd(o)
		})
	}
	sgdCase("plain", kw{"lr": 1e-3}, SGDOptions{})
	sgdCase("decay", kw{"lr": 0.1, "weight_decay": 1e-2}, SGDOptions{LR: 0.1, WeightDecay: 1e-2})
	sgdCase("momentum", kw{"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}, SGDOptions{LR: 0.01, Momentum: 0.9, WeightDecay: 1e-4})
	sgdCase("maximize", kw{"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": true},
		SGDOptions{LR: 0.01, Momentum: 0.9, Dampening: 0.1, WeightDecay: 0.1, Maximize: true})
	sgdCase("nesterov", kw{"lr": 0.01, "momentum": 0.7, "nesterov": true}, SGDOptions{LR: 0.01, Momentum: 0.7, Nesterov: true})

	adamCase := func(name string, k kw, o AdamOptions) {
		each("adam-"+name, "Adam", k, all, func(i Implementation) func([]*ts.Tensor) (Optimizer, error) {
			o := o
			o.Implementation = i
			return adam(o)
		})
	}
	adamCase("plain", kw{}, AdamOptions{})
	adamCase("decay", kw{"lr": 0.01, "weight_decay": 0.1, "betas": []float64{0.8, 0.95}, "eps": 1e-6},
		AdamOptions{LR: 0.01, WeightDecay: 0.1, Betas: [2]float64{0.8, 0.95}, Eps: 1e-6})
	adamCase("amsgrad", kw{"amsgrad": true, "maximize": true, "weight_decay": 0.01}, AdamOptions{AMSGrad: true, Maximize: true, WeightDecay: 0.01})
	adamCase("smallbeta", kw{"betas": []float64{0.3, 0.9}}, AdamOptions{Betas: [2]float64{0.3, 0.9}})

	adamwCase := func(name string, k kw, o AdamWOptions) {
		each("adamw-"+name, "AdamW", k, all, func(i Implementation) func([]*ts.Tensor) (Optimizer, error) {
			o := o
			o.Implementation = i
			return adamw(o)
		})
	}
	adamwCase("plain", kw{}, AdamWOptions{})
	adamwCase("amsgrad", kw{"amsgrad": true, "lr": 0.003, "weight_decay": 0.1, "maximize": true},
		AdamWOptions{AMSGrad: true, LR: 0.003, WeightDecay: 0.1, Maximize: true})

	rmsCase := func(name string, k kw, o RMSpropOptions) {
		each("rmsprop-"+name, "RMSprop", k, []Implementation{Auto, ForLoop, Foreach}, func(i Implementation) func([]*ts.Tensor) (Optimizer, error) {
			o := o
			o.Implementation = i
			return rmsprop(o)
		})
	}
	rmsCase("plain", kw{}, RMSpropOptions{})
	rmsCase("all", kw{"lr": 0.003, "alpha": 0.9, "momentum": 0.9, "centered": true, "weight_decay": 0.01, "maximize": true},
		RMSpropOptions{LR: 0.003, Alpha: 0.9, Momentum: 0.9, Centered: true, WeightDecay: 0.01, Maximize: true})

	adagradCase := func(name string, k kw, o AdagradOptions) {
		each("adagrad-"+name, "Adagrad", k, all, func(i Implementation) func([]*ts.Tensor) (Optimizer, error) {
			o := o
			o.Implementation = i
			return adagrad(o)
		})
	}
	adagradCase("plain", kw{}, AdagradOptions{})
	adagradCase("all", kw{"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.5, "maximize": true},
		AdagradOptions{LR: 0.1, LRDecay: 0.01, WeightDecay: 0.02, InitialAccumulatorValue: 0.5, Maximize: true})
	return out
}

var dtypes = map[string]gotch.DType{"float32": gotch.Float, "float64": gotch.Double, "bfloat16": gotch.BFloat16}

// pyData is what a run of trajectories.py left.
type pyData struct {
	dir     string
	device  gotch.Device   // of the steps
	params  []*ts.Tensor   // float64
	grads   [][]*ts.Tensor // float64
	digests map[string][]string
}

var trajectories = struct {
	sync.Once
	data *pyData
	dir  string
}{}

func TestMain(m *testing.M) {
	code := m.Run()
	if trajectories.dir != "" {
		_ = os.RemoveAll(trajectories.dir)
	}
	os.Exit(code)
}

// largeBatchCases are held against the formulas in testdata/trajectories.py: Python's torch.optim has no LARS and LAMB.
func largeBatchCases() []pyCase {
	return []pyCase{
		{Name: "lars", Algo: "LARS", DType: "float32",
			KW: kw{"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4, "trust": 0.02, "eps": 1e-8},
			make: func(p []*ts.Tensor) (Optimizer, error) {
				return NewLARS(p, LARSOptions{LR: 0.5, Momentum: 0.9, WeightDecay: 1e-4, Trust: 0.02})
			}},
		{Name: "lamb", Algo: "LAMB", DType: "float32", KW: kw{"lr": 0.01, "weight_decay": 0.01, "eps": 1e-6},
			make: func(p []*ts.Tensor) (Optimizer, error) {
				return NewLAMB(p, LAMBOptions{LR: 0.01, WeightDecay: 0.01})
			}},
	}
}

// runPython steps every case in Python, once for all tests.
func runPython(t *testing.T) *pyData {
	t.Helper()
	testenv.Python(t)
	trajectories.Do(func() {
		dir, err := os.MkdirTemp("", "goddp-optim")
		require.NoError(t, err)
		trajectories.dir = dir
		all := append(cases(), savedCases()...)
		trajectories.data = stepInPython(t, dir, "run", append(all, largeBatchCases()...))
	})
	if trajectories.data == nil {
		t.Fatal("the run of Python failed in an earlier test")
	}
	return trajectories.data
}

// stepInPython steps cases in Python. what is "run", or "cuda" to do it on a GPU.
func stepInPython(t *testing.T, dir, what string, all []pyCase) *pyData {
	t.Helper()
	j, err := json.Marshal(all)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cases.json"), j, 0o644))
	script, err := os.ReadFile("testdata/trajectories.py")
	require.NoError(t, err)
	testenv.RunPython(t, string(script), dir, what)
	d := &pyData{dir: dir, device: gotch.CPU}
	raw, err := os.ReadFile(filepath.Join(dir, "data.bin"))
	require.NoError(t, err)
	next := func() []*ts.Tensor {
		list := make([]*ts.Tensor, len(shapes))
		for i, s := range shapes {
			n := int64(1)
			for _, x := range s {
				n *= x
			}
			list[i] = tensorOf(t, raw[:8*n], s, i == channelsLast)
			raw = raw[8*n:]
		}
		return list
	}
	d.params = next()
	for range distinct {
		d.grads = append(d.grads, next())
	}
	require.Empty(t, raw)
	text, err := os.ReadFile(filepath.Join(dir, what+".json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &d.digests))
	return d
}

// tensorOf makes a float64 tensor of row-major bytes, in channels-last layout where asked.
func tensorOf(t testing.TB, raw []byte, shape []int64, last bool) *ts.Tensor {
	t.Helper()
	x, err := tdp.FromBytes(raw, shape, gotch.Double, gotch.CPU)
	require.NoError(t, err)
	if !last {
		return x
	}
	return toLayout(t, x, gotch.Double, gotch.CPU, true)
}

// toLayout copies x into a tensor of another dtype, device and layout.
func toLayout(t testing.TB, x *ts.Tensor, dtype gotch.DType, device gotch.Device, last bool) *ts.Tensor {
	t.Helper()
	info, err := tdp.Describe(x)
	require.NoError(t, err)
	var out *ts.Tensor
	if last {
		s := info.Shape
		base, err := tdp.Empty([]int64{s[0] * s[1] * s[2] * s[3]}, dtype, device, false)
		require.NoError(t, err)
		out, err = tdp.ViewStorage(base, dtype, s, []int64{s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]}, 0)
		require.NoError(t, err)
	} else {
		out, err = tdp.Empty(info.Shape, dtype, device, false)
		require.NoError(t, err)
	}
	require.NoError(t, tdp.Copy(out, x, false))
	return out
}

// start copies the first parameters in the dtype of a case.
func (d *pyData) start(t testing.TB, dtype string) []*ts.Tensor {
	t.Helper()
	params := make([]*ts.Tensor, len(shapes))
	for i, p := range d.params {
		params[i] = toLayout(t, p, dtypes[dtype], d.device, i == channelsLast)
		require.NoError(t, tdp.SetRequiresGrad(params[i], true))
	}
	return params
}

// setGrads gives the parameters the gradients of a step, as the Python side does.
func (d *pyData) setGrads(t testing.TB, params []*ts.Tensor, step int, dtype string, late bool) {
	t.Helper()
	for i, p := range params {
		if late && i == len(params)-1 && step < 3 || i == 1 && step%7 == 6 {
			require.NoError(t, tdp.SetGrad(p, nil))
			continue
		}
		g := toLayout(t, d.grads[step%distinct][i], dtypes[dtype], d.device, i == channelsLast)
		require.NoError(t, tdp.SetGrad(p, g))
		g.MustDrop()
	}
}

func rawBytes(t testing.TB, tensors []*ts.Tensor) []byte {
	t.Helper()
	var out []byte
	for _, p := range tensors {
		info, err := tdp.Describe(p)
		require.NoError(t, err)
		b := make([]byte, info.Numel*int64(info.ElementSize))
		require.NoError(t, tdp.ToBytes(p, b))
		out = append(out, b...)
	}
	return out
}

func digest(t testing.TB, params []*ts.Tensor) string {
	t.Helper()
	sum := sha256.Sum256(rawBytes(t, params))
	return hex.EncodeToString(sum[:])
}

// follow steps o and requires Python's bits after every step from the given one on.
func (d *pyData) follow(t *testing.T, c *pyCase, o Optimizer, params []*ts.Tensor, from int) {
	t.Helper()
	if c.DType == "bfloat16" {
		// Half precision kernels round the rest of a vector differently: the number of threads shows in the result,
		// in Python as well. Python has one here. OpenMP keeps the number by thread.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		n, err := tdp.NumThreads()
		require.NoError(t, err)
		require.NoError(t, tdp.SetNumThreads(1))
		defer func() { require.NoError(t, tdp.SetNumThreads(n)) }()
	}
	want := d.digests[c.Name]
	require.Len(t, want, steps, "Python has no case %s", c.Name)
	for s := from; s < steps; s++ {
		d.setGrads(t, params, s, c.DType, c.late())
		require.NoError(t, o.Step())
		if digest(t, params) != want[s] {
			t.Fatalf("the parameters differ from Python's after step %d", s+1)
		}
	}
}

func TestTrajectoriesArePythons(t *testing.T) {
	d := runPython(t)
	seen := map[string]string{}
	for _, c := range append(cases(), largeBatchCases()...) {
		t.Run(c.Name, func(t *testing.T) {
			params := d.start(t, c.DType)
			o, err := c.make(params)
			require.NoError(t, err)
			defer func() { require.NoError(t, o.Close()) }()
			d.follow(t, &c, o, params, 0)
			seen[c.Name] = digest(t, params)
		})
	}
	// The comparison would be empty if options did nothing.
	require.NotEqual(t, seen["sgd-momentum-auto-float32"], seen["sgd-nesterov-auto-float32"])
	require.NotEqual(t, seen["adam-plain-fused-float32"], seen["adam-plain-foreach-float32"])
}
