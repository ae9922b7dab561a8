package main

import (
	"context"
	"math"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/torchddp"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// alone makes the learner of a job of one rank, in this process.
func alone(t *testing.T, c config) *agent {
	t.Helper()
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	store, err := torchddp.NewHashStore()
	require.NoError(t, err)
	pg, err := torchddp.InitProcessGroup(context.Background(), torchddp.InitOptions{
		Backend: torchddp.Gloo, Store: store, WorldSize: 1, GlooInterfaces: []string{"lo"}})
	require.NoError(t, err)
	a, err := newAgent(c, pg)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, a.close())
		require.NoError(t, pg.Destroy())
	})
	return a
}

var small = config{envs: 4, hidden: 16, lr: 0.01, gamma: 0.9, seed: 3, iterations: 1, logEvery: 1, saveEvery: 1}

// TestLearnIsPythons: the loss and the weights after a step are what Python makes of the same episodes.
func TestLearnIsPythons(t *testing.T) {
	python := testenv.Python(t)
	a := alone(t, small)
	in, out := filepath.Join(t.TempDir(), "in.pt"), filepath.Join(t.TempDir(), "out.pt")
	require.NoError(t, a.rollout.play(a.policy, episodeSource(3, 0, 0)))
	a.rollout.weigh(small.gamma)
	observations, actions, advantages, err := a.rollout.batch()
	require.NoError(t, err)
	var env []int64
	for _, e := range a.rollout.env {
		env = append(env, int64(e))
	}
	require.NoError(t, checkpoint.Save(in, checkpoint.NewDict().Set("observations", observations).Set("actions", actions).
		Set("env", ts.MustOfSlice(env)).Set("gamma", small.gamma).Set("lr", small.lr).Set("model", checkpoint.ModuleState(a.policy))))
	for _, x := range []*ts.Tensor{observations, actions, advantages} {
		x.MustDrop()
	}

	loss, err := a.learn()
	require.NoError(t, err)

	text, err := exec.Command(python, "testdata/learn.py", in, out).CombinedOutput()
	require.NoError(t, err, string(text))
	v, err := checkpoint.Load(out, checkpoint.LoadOptions{})
	require.NoError(t, err)
	want, err := checkpoint.Get[float64](v, "loss")
	require.NoError(t, err)
	require.InEpsilon(t, want, loss, 1e-5)
	weights, err := checkpoint.Get[*checkpoint.StateDict](v, "model")
	require.NoError(t, err)
	for name, p := range a.policy.NamedParameters() {
		w, ok := weights.Get(name)
		require.True(t, ok, name)
		require.InDeltaSlice(t, w.Float64Values(), p.Float64Values(), 1e-5, name)
	}
}

// TestWeigh holds the one pass from the end against the definition.
func TestWeigh(t *testing.T) {
	r, err := newRollout(3, gotch.CPU)
	require.NoError(t, err)
	defer r.drop()
	r.env = []int{0, 1, 2, 0, 1, 2, 0, 2, 2} // episodes of 3, 2 and 4 steps
	r.taken = make([]int64, len(r.env))
	const gamma = 0.5
	r.weigh(gamma)
	returns := []float64{1.75, 1.5, 1.875, 1.5, 1, 1.75, 1, 1.5, 1}
	var mean, variance float64
	for _, g := range returns {
		mean += g / 9
	}
	for _, g := range returns {
		variance += (g - mean) * (g - mean) / 9
	}
	for k, g := range returns {
		require.InDelta(t, (g-mean)/math.Sqrt(variance)/3, r.advantages[k], 1e-6, "step %d", k)
	}
	require.Equal(t, 3.0, r.meanReturn())

	r.env, r.taken = []int{0, 1, 2}, r.taken[:3] // all the same: nothing to prefer, and no division by zero
	r.weigh(gamma)
	require.Equal(t, []float32{0, 0, 0}, r.advantages)
}

func TestChooseFollowsTheSoftmax(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	ones := 0
	for range 100000 {
		ones += int(choose(0.5, -0.3, rng.Float64()))
	}
	require.InDelta(t, 1/(1+math.Exp(0.8)), float64(ones)/100000, 0.005)
	require.EqualValues(t, 1, choose(-1000, 1000, 0.999))
	require.EqualValues(t, 0, choose(1000, -1000, 0))
}

func TestChanceDiffersByRankAndIteration(t *testing.T) {
	seen := make(map[uint64][3]int)
	for seed := range 4 {
		for rank := range 4 {
			for iteration := range 4 {
				draw := episodeSource(uint64(seed), rank, iteration).Uint64()
				require.NotContains(t, seen, draw, "seed, rank and iteration %v", [3]int{seed, rank, iteration})
				seen[draw] = [3]int{seed, rank, iteration}
				require.Equal(t, draw, episodeSource(uint64(seed), rank, iteration).Uint64())
			}
		}
	}
}

// TestRolloutsSeeOneForwardAStep: what was recorded is what the environments went through, by episode.
func TestRolloutRecordsEpisodes(t *testing.T) {
	a := alone(t, small)
	r := a.rollout
	require.NoError(t, r.play(a.policy, episodeSource(3, 0, 0)))
	require.Len(t, r.observations, 4*len(r.taken))
	steps := make([]int, r.envs.Len())
	for _, e := range r.env {
		steps[e]++
	}
	for e, n := range steps {
		require.Equal(t, r.envs.Steps(e), n)
	}
	first := append([]float32(nil), r.observations...)
	require.NoError(t, r.play(a.policy, episodeSource(3, 0, 0)))
	require.Equal(t, first, r.observations, "the same chance gives the same episodes")
	require.NoError(t, r.play(a.policy, episodeSource(3, 1, 0)))
	require.NotEqual(t, first[:16], r.observations[:16], "another rank begins elsewhere")
}

func TestIterationsKeepNoTensors(t *testing.T) {
	a := alone(t, small)
	for i := range 3 {
		require.NoError(t, a.iterate(i))
	}
	// What other tests left to the collector may go meanwhile, so there can be fewer.
	runtime.GC()
	before := ts.LiveTensors()
	for i := range 30 {
		require.NoError(t, a.iterate(3+i))
	}
	require.LessOrEqual(t, ts.LiveTensors(), before)
}

// TestMapLocation is the tutorial's map_location = {'cuda:0': 'cuda:RANK'}.
func TestMapLocation(t *testing.T) {
	for _, c := range []struct {
		device   gotch.Device
		from, to string
	}{
		{gotch.CudaBuilder(0), "cuda:0", "cuda:0"},
		{gotch.CudaBuilder(3), "cuda:0", "cuda:3"},
		{gotch.CudaBuilder(3), "cpu", ""}, // stays: the optimizer's step counts
		{gotch.CPU, "cuda:0", "cpu"},
		{gotch.CPU, "cpu", ""},
	} {
		to, err := mapLocation(c.device)(c.from)
		require.NoError(t, err)
		require.Equal(t, c.to, to, "%s on %v", c.from, c.device)
	}
}
