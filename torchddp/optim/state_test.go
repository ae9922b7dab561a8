package optim

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
)

// savedCases are saved by either side after 50 steps and continued by the other.
func savedCases() []pyCase {
	list := []pyCase{
		{Name: "save-sgd", Algo: "SGD", KW: kw{"lr": 0.01}, make: sgd(SGDOptions{LR: 0.01})},
		{Name: "save-sgd-momentum", Algo: "SGD", KW: kw{"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4},
			make: sgd(SGDOptions{LR: 0.01, Momentum: 0.9, WeightDecay: 1e-4})},
		{Name: "save-sgd-foreach", Algo: "SGD", KW: kw{"lr": 0.01, "momentum": 0.9, "nesterov": true, "foreach": true},
			make: sgd(SGDOptions{LR: 0.01, Momentum: 0.9, Nesterov: true, Implementation: Foreach})},
		{Name: "save-adam", Algo: "Adam", KW: kw{"amsgrad": true}, make: adam(AdamOptions{AMSGrad: true})},
		{Name: "save-adamw-fused", Algo: "AdamW", KW: kw{"fused": true}, make: adamw(AdamWOptions{Implementation: Fused})},
		{Name: "save-rmsprop", Algo: "RMSprop", KW: kw{"momentum": 0.9, "centered": true, "foreach": false},
			make: rmsprop(RMSpropOptions{Momentum: 0.9, Centered: true, Implementation: ForLoop})},
		{Name: "save-adagrad", Algo: "Adagrad", KW: kw{"lr_decay": 0.01, "initial_accumulator_value": 0.5},
			make: adagrad(AdagradOptions{LRDecay: 0.01, InitialAccumulatorValue: 0.5})},
		{Name: "save-groups", Algo: "SGD", KW: kw{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
			Groups: []pyGroup{{Params: []int{0, 2, 3}}, {Params: []int{1, 4, 5, 6}, KW: kw{"lr": 0.01, "weight_decay": 0}}},
			make: func(p []*ts.Tensor) (Optimizer, error) {
				return NewSGD([]Group[SGDOptions]{
					{Params: []*ts.Tensor{p[0], p[2], p[3]}},
					{Params: []*ts.Tensor{p[1], p[4], p[5], p[6]}, Set: func(o *SGDOptions) { o.LR, o.WeightDecay = 0.01, 0 }},
				}, SGDOptions{LR: 0.1, Momentum: 0.9, WeightDecay: 0.01})
			}},
	}
	for i := range list {
		list[i].DType, list[i].Save = "float32", 50
	}
	return list
}

// flatten gives a state dict's layout without its tensors, as testdata/trajectories.py does.
func flatten(t *testing.T, v any) any {
	t.Helper()
	items := func(list []any) []any {
		out := []any{}
		for _, x := range list {
			out = append(out, flatten(t, x))
		}
		return out
	}
	switch x := v.(type) {
	case *pickle.Dict:
		out := []any{}
		for k, v := range x.All() {
			if n, ok := k.(int64); ok {
				k = float64(n)
			}
			out = append(out, []any{k, flatten(t, v)})
		}
		return out
	case *pickle.List:
		return []any{"list", items(x.Items)}
	case *pickle.Tuple:
		return []any{"tuple", items(x.Items)}
	case *ts.Tensor:
		info, err := tdp.Describe(x)
		require.NoError(t, err)
		shape := []any{}
		for _, n := range info.Shape {
			shape = append(shape, float64(n))
		}
		return []any{map[gotch.DType]string{gotch.Float: "float32", gotch.Double: "float64"}[info.DType], shape}
	case nil:
		return []any{"NoneType", nil}
	case bool:
		return []any{"bool", x}
	case int64:
		return []any{"int", float64(x)}
	case float64:
		return []any{"float", x}
	}
	return []any{fmt.Sprintf("%T", v), v}
}

// loadRaw fills parameters with bytes that a side left.
func loadRaw(t *testing.T, params []*ts.Tensor, path string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, p := range params {
		info, err := tdp.Describe(p)
		require.NoError(t, err)
		n := info.Numel * int64(info.ElementSize)
		x, err := tdp.FromBytes(raw[:n], info.Shape, info.DType, gotch.CPU)
		require.NoError(t, err)
		require.NoError(t, tdp.Copy(p, x, false))
		raw = raw[n:]
	}
	require.Empty(t, raw)
}

func TestStateCrossesToPythonAndBack(t *testing.T) {
	d := runPython(t)
	for _, c := range savedCases() {
		t.Run(c.Name, func(t *testing.T) {
			params := d.start(t, c.DType)
			o, err := c.make(params)
			require.NoError(t, err)
			defer func() { require.NoError(t, o.Close()) }()
			for s := range c.Save {
				d.setGrads(t, params, s, c.DType, c.late())
				require.NoError(t, o.Step())
			}
			state, err := o.StateDict()
			require.NoError(t, err)
			var want any
			text, err := os.ReadFile(filepath.Join(d.dir, "py-"+c.Name+".json"))
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &want))
			got := flatten(t, state)
			if len(c.Groups) == 0 {
				require.Equal(t, want, got, "layout and order of the state dict")
			}
			require.NoError(t, checkpoint.Save(filepath.Join(d.dir, "go-"+c.Name+".pt"), state))
			require.NoError(t, os.WriteFile(filepath.Join(d.dir, "go-"+c.Name+".params"), rawBytes(t, params), 0o644))

			// A fresh optimizer continues from Python's file.
			params = d.start(t, c.DType)
			loadRaw(t, params, filepath.Join(d.dir, "py-"+c.Name+".params"))
			o2, err := c.make(params)
			require.NoError(t, err)
			defer func() { require.NoError(t, o2.Close()) }()
			require.NoError(t, o2.LoadStateDict(loadDict(t, filepath.Join(d.dir, "py-"+c.Name+".pt"))))
			again, err := o2.StateDict()
			require.NoError(t, err)
			require.Equal(t, want, flatten(t, again), "what was loaded is saved as it came")
			d.follow(t, &c, o2, params, c.Save)
		})
	}
	if t.Failed() {
		return
	}
	script, err := os.ReadFile("testdata/trajectories.py")
	require.NoError(t, err)
	testenv.RunPython(t, string(script), d.dir, "resume")
	text, err := os.ReadFile(filepath.Join(d.dir, "resume.json"))
	require.NoError(t, err)
	var resumed map[string][]string
	require.NoError(t, json.Unmarshal(text, &resumed))
	for _, c := range savedCases() {
		require.Equal(t, d.digests[c.Name][c.Save:], resumed[c.Name], "Python, continued from Go: %s", c.Name)
	}
}
