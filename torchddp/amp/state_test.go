package amp

import (
	"encoding/json"
	"math"
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
	"github.com/goddp/goddp/torchddp/optim"
)

// TestScalerStateCrossesToPythonAndBack: Python goes on from a state that Go saved, to the same scales and weights as Go;
// and Go goes on from the state that Python saved on the way.
func TestScalerStateCrossesToPythonAndBack(t *testing.T) {
	dir := t.TempDir()
	first, err := NewGradScaler(ScalerOptions{InitScale: 512, GrowthFactor: 4, BackoffFactor: 0.25, GrowthInterval: 3})
	require.NoError(t, err)
	scaleFor(t, first, 0, 2, func(int, []any) {}) // two clean steps: the tracker is on its way
	state, err := first.StateDict()
	require.NoError(t, err)
	tracker, _ := state.Get("_growth_tracker")
	require.EqualValues(t, 2, tracker)
	require.NoError(t, checkpoint.Save(filepath.Join(dir, "go-scaler.pt"), state))

	script, err := os.ReadFile("testdata/amp.py")
	require.NoError(t, err)
	testenv.RunPython(t, string(script), dir, "go-scaler.pt")
	text, err := os.ReadFile(filepath.Join(dir, "resume.json"))
	require.NoError(t, err)
	var want []json.RawMessage
	require.NoError(t, json.Unmarshal(text, &want))
	require.Len(t, want, 10)
	scales := map[string]bool{}
	follow := func(from int) func(int, []any) {
		return func(k int, got []any) {
			text, err := json.Marshal(got)
			require.NoError(t, err)
			require.JSONEq(t, string(want[k]), string(text), "step %d, from step %d on", k, from)
			scale, err := json.Marshal(got[0])
			require.NoError(t, err)
			scales[string(scale)] = true
		}
	}
	second, err := NewGradScaler(ScalerOptions{})
	require.NoError(t, err)
	require.NoError(t, second.LoadStateDict(state))
	scaleFor(t, second, 0, 10, follow(0))
	require.Len(t, scales, 2, "the scale must have grown and shrunk")

	v, err := checkpoint.Load(filepath.Join(dir, "py-scaler.pt"), checkpoint.LoadOptions{})
	require.NoError(t, err)
	saved, ok := v.(*pickle.Dict)
	require.True(t, ok, "%T", v)
	third, err := NewGradScaler(ScalerOptions{})
	require.NoError(t, err)
	require.NoError(t, third.LoadStateDict(saved))
	again, err := third.StateDict()
	require.NoError(t, err)
	require.Equal(t, saved.Len(), again.Len())
	for k, v := range again.Strings() {
		w, _ := saved.Get(k)
		require.Equal(t, w, v, k)
	}
	scaleFor(t, third, 5, 10, follow(5))
	for _, s := range []*GradScaler{first, second, third} {
		require.NoError(t, s.Close())
	}
}

// scaleFor runs amp.py's resume with a scaler for the steps from begin to end. Earlier ones run without it, as overflows
// are the same with any scale.
func scaleFor(t *testing.T, s *GradScaler, begin, end int, see func(step int, got []any)) {
	p := numbers(t, 3)
	require.NoError(t, tdp.SetRequiresGrad(p, true))
	opt, err := optim.NewSGD([]*ts.Tensor{p}, optim.SGDOptions{LR: 0.1})
	require.NoError(t, err)
	defer func() { require.NoError(t, opt.Close()) }()
	other, err := NewGradScaler(ScalerOptions{InitScale: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	for k := range end {
		use := s
		if k < begin {
			use = other
		}
		require.NoError(t, opt.ZeroGrad(true))
		loss, err := use.Scale(p.MustMul(p, false).MustSum(gotch.Float, true))
		require.NoError(t, err)
		require.NoError(t, tdp.Backward(loss, nil, false, nil))
		if k == 2 || k == 7 {
			setGradAt(t, p, 1, math.Inf(1))
		}
		_, err = use.Step(opt)
		require.NoError(t, err)
		require.NoError(t, use.Update())
		if k < begin {
			continue
		}
		scale, err := use.GetScale()
		require.NoError(t, err)
		tracker, err := use.growthTracker()
		require.NoError(t, err)
		see(k, []any{scale, tracker, floats(t, p)})
	}
}
