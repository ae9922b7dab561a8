package cartpole

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

type episode struct {
	Policy                string
	States                []State
	Actions               []int64
	Total                 float64
	Terminated, Truncated bool
}

func goldens(t *testing.T) []episode {
	text, err := os.ReadFile("testdata/goldens.json")
	require.NoError(t, err)
	var list []episode
	require.NoError(t, json.Unmarshal(text, &list))
	require.Len(t, list, 6)
	return list
}

// near allows for what the sine and cosine of two libraries differ by: a unit in the last place or two.
func near(t *testing.T, want, got State) {
	t.Helper()
	for k := range want {
		require.InDelta(t, want[k], got[k], 1e-15*math.Max(1, math.Abs(want[k])), "%v, not %v", got, want)
	}
}

// TestStepsAreGymnasiums: every step of the recorded episodes, each from Gymnasium's own state, so that the pole's
// instability cannot make much of a last digit.
func TestStepsAreGymnasiums(t *testing.T) {
	steps := 0
	for _, e := range goldens(t) {
		for i, a := range e.Actions {
			near(t, e.States[i+1], e.States[i].Next(a))
			steps++
		}
	}
	require.Equal(t, 773, steps)
}

// TestEpisodesEndAsGymnasiums: the rules of falling, of the track's ends and of the time limit, all episodes side by
// side.
func TestEpisodesEndAsGymnasiums(t *testing.T) {
	list := goldens(t)
	envs, err := New(len(list))
	require.NoError(t, err)
	envs.Reset(rand.New(rand.NewPCG(1, 2)))
	for i, e := range list {
		envs.states[i] = e.States[0]
	}
	actions := make([]int64, len(list))
	for n := 0; envs.Running() > 0; n++ {
		for i, e := range list {
			require.Equal(t, n >= len(e.Actions), envs.Over(i), "%s after %d steps", e.Policy, n)
			actions[i] = -1 // of an episode that is over: not looked at
			if !envs.Over(i) {
				actions[i] = e.Actions[n]
				envs.states[i] = e.States[n]
			}
		}
		require.NoError(t, envs.Step(actions))
	}
	for i, e := range list {
		require.EqualValues(t, e.Total, float64(envs.Steps(i))*Reward, e.Policy)
		require.Equal(t, e.Truncated, envs.Steps(i) == MaxSteps, e.Policy)
		require.Equal(t, e.Terminated, envs.State(i).Fallen(), e.Policy)
		near(t, e.States[len(e.States)-1], envs.State(i))
	}
}

func TestReset(t *testing.T) {
	envs, err := New(100)
	require.NoError(t, err)
	require.Zero(t, envs.Running())
	require.True(t, envs.Over(0))
	envs.Reset(rand.New(rand.NewPCG(7, 0)))
	require.Equal(t, 100, envs.Running())
	seen := make([]float32, 400)
	require.NoError(t, envs.Observe(seen))
	var low, high float64
	distinct := make(map[float32]bool)
	for i, v := range seen {
		require.Equal(t, float32(envs.State(i / 4)[i%4]), v)
		low, high = math.Min(low, float64(v)), math.Max(high, float64(v))
		distinct[v] = true
	}
	require.GreaterOrEqual(t, low, -0.05)
	require.LessOrEqual(t, high, 0.05)
	require.Less(t, low, -0.045)
	require.Greater(t, high, 0.045)
	require.Greater(t, len(distinct), 390)

	again, err := New(100)
	require.NoError(t, err)
	again.Reset(rand.New(rand.NewPCG(7, 0)))
	require.Equal(t, envs, again, "the same seed gives the same start")
}

func TestBadInput(t *testing.T) {
	_, err := New(0)
	require.ErrorContains(t, err, "0 environments asked for")
	envs, err := New(2)
	require.NoError(t, err)
	envs.Reset(rand.New(rand.NewPCG(1, 1)))
	before := envs.State(0)
	require.ErrorContains(t, envs.Step([]int64{1}), "2 environments need as many actions, not 1")
	require.ErrorContains(t, envs.Step([]int64{1, 2}), "action 2 in environment 1; there are 0 (left) and 1 (right)")
	require.Equal(t, before, envs.State(0), "nothing moves on an error")
	require.ErrorContains(t, envs.Observe(make([]float32, 7)), "2 environments are 8 numbers, not 7")
	require.True(t, State{math.NaN()}.Fallen())
}

func TestStepAllocatesNothing(t *testing.T) {
	envs, err := New(8)
	require.NoError(t, err)
	envs.Reset(rand.New(rand.NewPCG(1, 1)))
	actions, seen := make([]int64, 8), make([]float32, 32)
	require.Zero(t, testing.AllocsPerRun(5, func() {
		_ = envs.Observe(seen)
		_ = envs.Step(actions)
	}))
}
