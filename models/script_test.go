package models

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/models/nn"
)

type scriptResult struct {
	Parameters, Buffers, State, Modules []string
	Versions                            map[string]int64
	Repr                                string
	Values, Final                       []string
	Losses                              []float64
	Eval                                string
}

func scriptPython(t *testing.T, what, dir string) map[string]scriptResult {
	cmd := exec.Command(testenv.Python(t), "testdata/script.py", what, dir)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	var r map[string]scriptResult
	require.NoError(t, json.Unmarshal(out, &r))
	return r
}

// scriptData is script.py's data.
func scriptData(t *testing.T, classes int64, shape ...int64) (x, y *ts.Tensor) {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(i*37%101)/50 - 1
	}
	labels := make([]int64, shape[0])
	for i := range labels {
		labels[i] = int64(i) * 7 % classes
	}
	x, err := tdp.FromSlice(v, shape, gotch.CPU)
	require.NoError(t, err)
	y, err = tdp.FromSlice(labels, shape[:1], gotch.CPU)
	require.NoError(t, err)
	return x, y
}

func keys[V any](s func(func(string, V) bool)) []string {
	out := []string{}
	for name := range s {
		out = append(out, name)
	}
	return out
}

func stateDigests(t *testing.T, m nn.Module) (out []string) {
	for _, p := range m.NamedState() {
		out = append(out, sha(t, p))
	}
	return out
}

// trainScript is script.py's train.
func trainScript(t *testing.T, m nn.Module, x, y *ts.Tensor, steps int) (losses []float64, eval string) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	require.NoError(t, tdp.SetNumThreads(1)) // OpenMP keeps the number by thread, and this may be another than oneThread's
	opt, err := tdp.NewOptim(tdp.SGD)
	require.NoError(t, err)
	defer func() { require.NoError(t, opt.Close()) }()
	var params []*ts.Tensor
	for p := range m.Parameters() {
		params = append(params, p)
	}
	require.NoError(t, opt.AddGroup(params, tdp.OptimOptions{LR: 0.05, Implementation: tdp.ImplSingle}))
	for range steps {
		require.NoError(t, m.ZeroGrad())
		out, err := nn.Forward(m, x, true)
		require.NoError(t, err)
		loss, err := nn.Try(func() *ts.Tensor { return nn.CrossEntropyLoss{}.Forward(out, y) })
		require.NoError(t, err)
		require.NoError(t, tdp.Backward(loss, nil, false, nil))
		require.NoError(t, opt.Step(nil, nil))
		v, err := tdp.ToSlice[float32](loss)
		require.NoError(t, err)
		losses = append(losses, float64(v[0]))
		out.MustDrop()
		loss.MustDrop()
	}
	out, err := nn.Evaluate(m, x)
	require.NoError(t, err)
	defer out.MustDrop()
	return losses, sha(t, out)
}

func TestScript(t *testing.T) {
	dir := t.TempDir()
	want := scriptPython(t, "make", dir)
	t.Run("trains and goes back", func(t *testing.T) { scriptTrains(t, dir, want) })
	t.Run("values", func(t *testing.T) { scriptValues(t, dir) })
	t.Run("modes", func(t *testing.T) { scriptModes(t, dir) })
}

// scriptTrains loads what Python saved, trains it like Python, saves it, and has Python load and train that.
func scriptTrains(t *testing.T, dir string, want map[string]scriptResult) {
	back := t.TempDir()
	oneThread(t)
	shapes := map[string]struct {
		classes int64
		shape   []int64
	}{"mixed": {6, []int64{8, 6}}, "resnet": {5, []int64{2, 3, 32, 32}}, "traced": {3, []int64{8, 6}}}
	got := map[string]scriptResult{}
	for name, w := range want {
		t.Run(name, func(t *testing.T) {
			m, err := LoadScript(filepath.Join(dir, name+".pt"), gotch.CPU)
			require.NoError(t, err)
			require.Equal(t, w.Parameters, keys(m.NamedParameters()))
			require.Equal(t, w.Buffers, keys(m.NamedBuffers()))
			require.Equal(t, w.State, keys(m.NamedState()))
			for path, v := range m.ModuleVersions() {
				require.Equal(t, w.Versions[path], v, path)
			}
			require.Equal(t, w.Repr, m.String())
			require.Equal(t, w.Values, stateDigests(t, m))
			x, y := scriptData(t, shapes[name].classes, shapes[name].shape...)
			var r scriptResult
			r.Losses, r.Eval = trainScript(t, m, x, y, len(w.Losses))
			require.Equal(t, w.Losses, r.Losses)
			require.Equal(t, w.Eval, r.Eval)
			r.Values = stateDigests(t, m)
			require.Equal(t, w.Final, r.Values)
			require.NoError(t, m.Save(filepath.Join(back, name+".pt")))

			var buffer bytes.Buffer
			_, err = m.WriteTo(&buffer)
			require.NoError(t, err)
			again, err := ReadScript(&buffer, gotch.CPU)
			require.NoError(t, err)
			require.Equal(t, r.Values, stateDigests(t, again))
			got[name] = r
			if name == "mixed" { // what is shared stays shared on the way through a file
				var first, tied *ts.Tensor
				for name, p := range again.NamedState() {
					switch name {
					case "child.weight":
						first = p
					case "other.weight":
						tied = p
					}
				}
				require.Equal(t, nn.Must(tdp.Describe(first)).Impl, nn.Must(tdp.Describe(tied)).Impl)
			}
		})
	}
	entries, err := os.ReadDir(back)
	require.NoError(t, err)
	require.Len(t, entries, len(want), "no temporary file may stay")
	for name, r := range scriptPython(t, "check", back) {
		require.Equal(t, got[name].Values, r.Values, name)
		require.Equal(t, got[name].Eval, r.Eval, name)
		require.Equal(t, want[name].Parameters, r.Parameters, name)
		require.False(t, math.IsNaN(r.Losses[0]))
		require.LessOrEqual(t, r.Losses[0], want[name].Losses[0], "it must go on from where Go was")
	}
}

// scriptValues passes every kind of value in and out.
func scriptValues(t *testing.T, dir string) {
	m, err := LoadScript(filepath.Join(dir, "many.pt"), gotch.CPU)
	require.NoError(t, err)
	for _, p := range m.NamedState() {
		require.NoError(t, tdp.Fill(p, 1))
	}
	x, z := floats(1, 2, 3), floats(1, 10)
	call := func(extra any, ints any) (any, error) {
		return m.Call(true, x, []*ts.Tensor{x, x}, map[string]*ts.Tensor{"k": z}, Tuple{z, 3}, 0.5, true, "né", extra, ints)
	}
	out, err := call(nil, []int64{4, 5})
	require.NoError(t, err)
	tuple := out.(Tuple)
	require.Len(t, tuple, 9)
	y := []float32{7*3 + 1 + 3, 7*3 + 10 + 30}
	value := func(v any) []float32 { return nn.Must(tdp.ToSlice[float32](v.(*ts.Tensor))) }
	require.Equal(t, y, value(tuple[0]))
	dict := tuple[1].(Dict)
	require.Equal(t, "b", dict[0].Key)
	require.Equal(t, "a", dict[1].Key)
	require.Equal(t, []float32{y[0] + 1, y[1] + 1}, value(dict[1].Value))
	list := tuple[2].([]any)
	require.Equal(t, []float32{3 * y[0], 3 * y[1]}, value(list[1]))
	named := tuple[3].(NamedTuple)
	require.Equal(t, "y", named[0].Name)
	require.Equal(t, Field{Name: "n", Value: int64(2)}, named[1])
	require.Nil(t, tuple[4])
	require.Equal(t, "né!", tuple[5])
	require.Equal(t, 0.5, tuple[6])
	require.Equal(t, true, tuple[7])
	require.Equal(t, []any{int64(4), int64(5)}, tuple[8])

	// the outputs carry gradients back to the parameters
	require.NoError(t, m.ZeroGrad())
	require.NoError(t, tdp.Backward(tuple[0].(*ts.Tensor), floats(1, 1), false, nil))
	for name, p := range m.NamedParameters() {
		require.NotNil(t, nn.Must(tdp.Grad(p)), name)
	}
	DropValue(out)

	out, err = call(z, []any{})
	require.NoError(t, err)
	require.Equal(t, []float32{y[0] + 1, y[1] + 10}, value(out.(Tuple)[0]))
	DropValue(out)
	twice, err := m.CallMethod("double", false, x)
	require.NoError(t, err)
	require.Equal(t, []float32{2, 4, 6}, value(twice))

	for what, f := range map[string]func() error{
		"has no counterpart":     func() error { _, err := m.Call(true, 3+4i); return err },
		"has no method":          func() error { _, err := m.CallMethod("none", true); return err },
		"missing value":          func() error { _, err := m.Call(true, x); return err },
		"element 0 of a list is": func() error { _, err := call(nil, []string{"a"}); return err },
		"a tuple of 3": func() error {
			_, err := m.Call(true, x, []*ts.Tensor{x}, Dict{{Key: "k", Value: z}}, Tuple{z, 3, 4})
			return err
		},
		"a dict entry is": func() error { _, err := m.Call(true, x, []*ts.Tensor{x}, Dict{{Key: int64(1), Value: z}}); return err },
		"type 'Tensor'":   func() error { _, err := m.CallMethod("double", true, "text"); return err },
	} {
		require.ErrorContains(t, f(), what)
	}
	_, err = nn.Forward(m, x, true)
	var e *nn.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []int64{3}, e.Input)

	// a tuple for one tensor
	mixed, err := LoadScript(filepath.Join(dir, "mixed.pt"), gotch.CPU)
	require.NoError(t, err)
	_, err = nn.Forward(mixed, x, true)
	require.ErrorAs(t, err, &e)
	for path, k := range nn.NamedModules(mixed) {
		if path == "child" {
			_, err = nn.Forward(k, x, true)
			require.ErrorIs(t, err, tdp.ErrUnsupported)
			require.ErrorContains(t, err, "child: Linear")
		}
	}

	frozen, err := LoadScript(filepath.Join(dir, "frozen.pt"), gotch.CPU)
	require.NoError(t, err)
	require.Empty(t, keys(frozen.NamedParameters()))
	in, _ := scriptData(t, 6, 8, 6)
	_, err = nn.Forward(frozen, in, true) // no training attribute is left
	require.NoError(t, err)
}

// scriptModes: train is of the call, Eval keeps a part in evaluation, and To moves what the script uses.
func scriptModes(t *testing.T, dir string) {
	m, err := LoadScript(filepath.Join(dir, "mixed.pt"), gotch.CPU)
	require.NoError(t, err)
	x, _ := scriptData(t, 6, 8, 6)
	count := func() int64 {
		for name, b := range m.NamedBuffers() {
			if name == "bn.num_batches_tracked" {
				return nn.Must(tdp.ToSlice[int64](b))[0]
			}
		}
		t.Fatal("no counter")
		return 0
	}
	step := func(train bool) {
		y, err := nn.Forward(m, x, train)
		require.NoError(t, err)
		y.MustDrop()
	}
	step(true)
	step(false)
	require.EqualValues(t, 1, count())
	for path, k := range nn.NamedModules(m) {
		if path == "bn" {
			k.Eval()
		}
	}
	step(true)
	require.EqualValues(t, 1, count())
	m.Train()
	step(true)
	require.EqualValues(t, 2, count())

	keyed := map[string]bool{}
	for name, key := range m.BatchNormKeys() {
		keyed[name] = key != nil
	}
	require.Equal(t, map[string]bool{"bn": true}, keyed)
	require.NoError(t, m.PrepareSyncBatchNorm())
	was, err := tdp.ScriptOptimize(true)
	require.NoError(t, err)
	require.False(t, was)
	was, err = tdp.ScriptOptimize(true)
	require.NoError(t, err)
	require.True(t, was)

	require.NoError(t, m.To(gotch.CPU, gotch.Double))
	wide, err := tdp.FromSlice(make([]float64, 48), []int64{8, 6}, gotch.CPU)
	require.NoError(t, err)
	y, err := nn.Forward(m, wide, true)
	require.NoError(t, err)
	require.Equal(t, gotch.Double, nn.Must(tdp.Describe(y)).DType)
}

func TestScriptFileErrors(t *testing.T) {
	_, err := LoadScript("testdata/none.pt", gotch.CPU)
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = LoadScript("testdata/cases.json", gotch.CPU)
	require.ErrorContains(t, err, "testdata/cases.json")
	_, err = ReadScript(bytes.NewReader([]byte("no zip")), gotch.CPU)
	require.Error(t, err)
	broken := errors.New("broken")
	_, err = ReadScript(brokenReader{broken}, gotch.CPU)
	require.ErrorIs(t, err, broken)
}

type brokenReader struct{ err error }

func (r brokenReader) Read([]byte) (int, error) { return 0, r.err }
