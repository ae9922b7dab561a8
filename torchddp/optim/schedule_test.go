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

const (
	scheduleSteps = 150
	scheduleSave  = 60
)

// stepper is a Scheduler, or a ReduceLROnPlateau with the metric of testdata/schedules.py.
type stepper interface {
	step(i int) error
	StateDict() (*pickle.Dict, error)
	LoadStateDict(*pickle.Dict) error
	LastLR() []float64
}

type plain struct{ Scheduler }

func (p plain) step(int) error { return p.Step() }

type plateau struct{ *ReduceLROnPlateau }

func (p plateau) step(i int) error { return p.Step(1 / (1 + float64(min(i, 40+i%7)))) }

func asStepper[S Scheduler](s S, err error) (stepper, error) { return plain{s}, err }

// chain keeps the first error of schedules that are parts of another.
type chain struct{ err error }

func part[S Scheduler](c *chain, s S, err error) Scheduler {
	if c.err == nil {
		c.err = err
	}
	return s
}

func scheduleMakers() map[string]func(o Optimizer) (stepper, error) {
	return map[string]func(o Optimizer) (stepper, error){
		"lambda": func(o Optimizer) (stepper, error) {
			return asStepper(NewLambdaLR(o, func(e int) float64 { return tdp.Pow(0.95, float64(e)) }, func(e int) float64 { return 1 / float64(1+e) }))
		},
		"step":        func(o Optimizer) (stepper, error) { return asStepper(NewStepLR(o, 7, 0.7)) },
		"multistep":   func(o Optimizer) (stepper, error) { return asStepper(NewMultiStepLR(o, []int{80, 30, 30, 100}, 0.3)) },
		"constant":    func(o Optimizer) (stepper, error) { return asStepper(NewConstantLR(o, 0.3, 20)) },
		"linear":      func(o Optimizer) (stepper, error) { return asStepper(NewLinearLR(o, 0.1, 0.9, 70)) },
		"exponential": func(o Optimizer) (stepper, error) { return asStepper(NewExponentialLR(o, 0.97)) },
		"polynomial":  func(o Optimizer) (stepper, error) { return asStepper(NewPolynomialLR(o, 120, 0.9)) },
		"cosine":      func(o Optimizer) (stepper, error) { return asStepper(NewCosineAnnealingLR(o, 50, 0.001)) },
		"restarts": func(o Optimizer) (stepper, error) {
			return asStepper(NewCosineAnnealingWarmRestarts(o, 11, 2, 0.0005))
		},
		"onecycle": func(o Optimizer) (stepper, error) {
			return asStepper(NewOneCycleLR(o, OneCycleOptions{MaxLR: []float64{0.2, 0.5}, TotalSteps: 151}))
		},
		"onecycle-linear": func(o Optimizer) (stepper, error) {
			return asStepper(NewOneCycleLR(o, OneCycleOptions{MaxLR: []float64{0.3}, TotalSteps: 160, PctStart: 0.25, Linear: true,
				ThreePhase: true, DivFactor: 10, FinalDivFactor: 100}))
		},
		"onecycle-adam": func(o Optimizer) (stepper, error) {
			return asStepper(NewOneCycleLR(o, OneCycleOptions{MaxLR: []float64{0.3}, TotalSteps: 151}))
		},
		"plateau": func(o Optimizer) (stepper, error) {
			s, err := NewReduceLROnPlateau(o, PlateauOptions{Factor: 0.5, Patience: 3, Cooldown: 2, MinLR: []float64{0.001}})
			return plateau{s}, err
		},
		"plateau-max": func(o Optimizer) (stepper, error) {
			s, err := NewReduceLROnPlateau(o, PlateauOptions{Max: true, Threshold: 0.05, Absolute: true, MinLR: []float64{0.002, 0.01}})
			return plateau{s}, err
		},
		"sequential": func(o Optimizer) (stepper, error) {
			var c chain
			a, err := NewLinearLR(o, 0.1, 1, 20)
			p1 := part(&c, a, err)
			b, err := NewStepLR(o, 10, 0.8)
			p2 := part(&c, b, err)
			e, err := NewExponentialLR(o, 0.9)
			p3 := part(&c, e, err)
			if c.err != nil {
				return nil, c.err
			}
			return asStepper(NewSequentialLR(o, []Scheduler{p1, p2, p3}, []int{20, 75}))
		},
		"sequential-restarts": func(o Optimizer) (stepper, error) {
			var c chain
			a, err := NewConstantLR(o, 0.1, 15)
			p1 := part(&c, a, err)
			b, err := NewCosineAnnealingWarmRestarts(o, 20, 1, 0)
			p2 := part(&c, b, err)
			if c.err != nil {
				return nil, c.err
			}
			return asStepper(NewSequentialLR(o, []Scheduler{p1, p2}, []int{15}))
		},
		"chained": func(o Optimizer) (stepper, error) {
			var c chain
			a, err := NewConstantLR(o, 0.1, 20)
			p1 := part(&c, a, err)
			b, err := NewExponentialLR(o, 0.9)
			p2 := part(&c, b, err)
			e, err := NewStepLR(o, 40, 0.5)
			p3 := part(&c, e, err)
			if c.err != nil {
				return nil, c.err
			}
			return asStepper(NewChainedScheduler(p1, p2, p3))
		},
		"chained-in-sequential": func(o Optimizer) (stepper, error) {
			var c chain
			a, err := NewLinearLR(o, 0.5, 1, 10)
			p1 := part(&c, a, err)
			b, err := NewExponentialLR(o, 0.99)
			p2 := part(&c, b, err)
			if c.err != nil {
				return nil, c.err
			}
			both, err := NewChainedScheduler(p1, p2)
			if err != nil {
				return nil, err
			}
			cos, err := NewCosineAnnealingLR(o, 60, 0)
			if err != nil {
				return nil, err
			}
			return asStepper(NewSequentialLR(o, []Scheduler{both, cos}, []int{40}))
		},
		"large-batch": func(o Optimizer) (stepper, error) {
			return asStepper(NewLargeBatch(o, LargeBatchOptions{Batch: 2048, BaseBatch: 256, WarmupSteps: 30,
				After: func(o Optimizer) (Scheduler, error) { return NewCosineAnnealingLR(o, 90, 0) }}))
		},
	}
}

func smallOptimizer(t *testing.T, adam bool) Optimizer {
	t.Helper()
	var p []*ts.Tensor
	for range 3 {
		x, err := tdp.FromSlice([]float32{0, 0}, []int64{2}, gotch.CPU)
		require.NoError(t, err)
		require.NoError(t, tdp.SetRequiresGrad(x, true))
		p = append(p, x)
	}
	var o Optimizer
	var err error
	if adam {
		o, err = NewAdam([]Group[AdamOptions]{{Params: p[:1]}, {Params: p[1:], Set: func(o *AdamOptions) { o.LR = 0.03 }}}, AdamOptions{LR: 0.1})
	} else {
		o, err = NewSGD([]Group[SGDOptions]{{Params: p[:1]}, {Params: p[1:], Set: func(o *SGDOptions) { o.LR = 0.03 }}}, SGDOptions{LR: 0.1, Momentum: 0.9})
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, o.Close()) })
	return o
}

func ratesOf(o Optimizer) []float64 {
	out := currentLRs(o)
	for _, g := range o.ParamGroups() {
		out = append(out, *g.momentum())
	}
	return out
}

// shapeOf gives a state's keys and the Python types of its values, as testdata/schedules.py does.
func shapeOf(d *pickle.Dict) []any {
	var out []any
	for k, v := range d.Strings() {
		if k == "_schedulers" {
			out = append(out, []any{k, shapeOf(v.(*pickle.List).Items[0].(*pickle.Dict))})
			continue
		}
		name := ""
		switch x := v.(type) {
		case nil:
			name = "NoneType"
		case int64:
			name = "int"
		case float64:
			name = "float"
		case bool:
			name = "bool"
		case string:
			name = "str"
		case *pickle.List:
			name = "list"
		case *pickle.Dict:
			name = x.Kind.String()
		default:
			name = fmt.Sprintf("%T", v)
		}
		out = append(out, []any{k, name})
	}
	return out
}

type pySchedule struct {
	Rates [][]float64 `json:"rates"`
	Keys  []any       `json:"keys"`
}

func runSchedules(t *testing.T, dir, mode string) map[string]pySchedule {
	t.Helper()
	script, err := os.ReadFile("testdata/schedules.py")
	require.NoError(t, err)
	testenv.RunPython(t, string(script), dir, mode)
	text, err := os.ReadFile(filepath.Join(dir, mode+".json"))
	require.NoError(t, err)
	var out map[string]pySchedule
	require.NoError(t, json.Unmarshal(text, &out))
	return out
}

func loadDict(t *testing.T, path string) *pickle.Dict {
	t.Helper()
	v, err := checkpoint.Load(path, checkpoint.LoadOptions{})
	require.NoError(t, err)
	d, ok := v.(*pickle.Dict)
	require.True(t, ok, "%s holds a %T", path, v)
	return d
}

// Every schedule gives Python's rates, exactly, over 150 steps; continues from a state that Python saved; and Python
// continues from the state that it saves.
func TestSchedulesArePythons(t *testing.T) {
	testenv.Python(t)
	dir := t.TempDir()
	want := runSchedules(t, dir, "run")
	makers := scheduleMakers()
	require.Len(t, want, len(makers))
	for name, py := range want {
		adam := name == "onecycle-adam"
		t.Run(name, func(t *testing.T) {
			require.Contains(t, makers, name)
			o := smallOptimizer(t, adam)
			s, err := makers[name](o)
			require.NoError(t, err)
			require.Equal(t, py.Rates[0], ratesOf(o), "after construction")
			moved := false
			for i := range scheduleSteps {
				if i == scheduleSave {
					state, err := s.StateDict()
					require.NoError(t, err)
					require.Equal(t, py.Keys, shapeOf(state))
					require.NoError(t, checkpoint.Save(filepath.Join(dir, "go-"+name+".pt"), state))
					state, err = o.StateDict()
					require.NoError(t, err)
					require.NoError(t, checkpoint.Save(filepath.Join(dir, "go-"+name+"-optim.pt"), state))
				}
				require.NoError(t, o.Step())
				require.NoError(t, s.step(i))
				require.Equal(t, py.Rates[i+1], ratesOf(o), "after step %d", i+1)
				require.Equal(t, currentLRs(o), s.LastLR())
				moved = moved || py.Rates[i+1][0] != py.Rates[0][0]
			}
			require.True(t, moved, "the schedule never changed the rate: nothing was compared")

			o = smallOptimizer(t, adam)
			s, err = makers[name](o)
			require.NoError(t, err)
			require.NoError(t, o.LoadStateDict(loadDict(t, filepath.Join(dir, "py-"+name+"-optim.pt"))))
			require.NoError(t, s.LoadStateDict(loadDict(t, filepath.Join(dir, "py-"+name+".pt"))))
			for i := scheduleSave; i < scheduleSteps; i++ {
				require.NoError(t, o.Step())
				require.NoError(t, s.step(i))
				require.Equal(t, py.Rates[i+1], ratesOf(o), "continued from Python, after step %d", i+1)
			}
		})
	}
	if t.Failed() {
		return
	}
	for name, py := range runSchedules(t, dir, "resume") {
		require.Equal(t, want[name].Rates[scheduleSave:], py.Rates, "Python, continued from Go: %s", name)
	}
}
