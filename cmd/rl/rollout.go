package main

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"runtime"
	"unsafe"

	"github.com/goddp/goddp/cmd/rl/cartpole"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// rollout plays an iteration's episodes side by side: each step is one forward for all of them. It keeps its memory
// from one iteration to the next.
type rollout struct {
	envs   *cartpole.Envs
	device gotch.Device

	host    *ts.Tensor // [envs, 4] on the CPU, what the environments look like now …
	seen    []float32  // … and its memory
	scores  []float32  // [envs, 2]
	actions []int64

	// What happened, an entry a step of an episode, in the order of time.
	observations []float32
	taken        []int64
	env          []int
	advantages   []float32
	returns      []float64 // of each episode, from the step at hand on
}

func newRollout(envs int, device gotch.Device) (*rollout, error) {
	e, err := cartpole.New(envs)
	if err != nil {
		return nil, err
	}
	host, err := ts.Zeros([]int64{int64(envs), cartpole.Observations}, gotch.Float, gotch.CPU)
	if err != nil {
		return nil, err
	}
	memory, err := host.DataPtr()
	if err != nil {
		return nil, err
	}
	return &rollout{envs: e, device: device, host: host,
		seen:    unsafe.Slice((*float32)(memory), envs*cartpole.Observations),
		scores:  make([]float32, envs*cartpole.Actions),
		actions: make([]int64, envs), returns: make([]float64, envs)}, nil
}

func (r *rollout) drop() { r.host.MustDrop() }

// episodeSource is the chance in one rank's iteration. It depends on nothing that came before, so a resumed run needs
// no more than the iteration's number to draw what it would have drawn.
func episodeSource(seed uint64, rank, iteration int) *rand.Rand {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[0:], seed)
	binary.LittleEndian.PutUint64(key[8:], uint64(rank))
	binary.LittleEndian.PutUint64(key[16:], uint64(iteration))
	return rand.New(rand.NewChaCha8(key))
}

// play runs one episode in every environment to its end.
func (r *rollout) play(model ts.ModuleT, rng *rand.Rand) error {
	r.observations, r.taken, r.env = r.observations[:0], r.taken[:0], r.env[:0]
	r.envs.Reset(rng)
	return torchddp.NoGrad(func() error {
		for r.envs.Running() > 0 {
			if err := r.step(model, rng); err != nil {
				return err
			}
		}
		return nil
	})
}

func (r *rollout) step(model ts.ModuleT, rng *rand.Rand) error {
	if err := r.look(model); err != nil {
		return err
	}
	for i := range r.actions {
		// One draw for every environment, running or not: an episode does not depend on how long others last.
		draw := rng.Float64()
		if r.envs.Over(i) {
			continue
		}
		r.actions[i] = choose(r.scores[2*i], r.scores[2*i+1], draw)
		r.observations = append(r.observations, r.seen[4*i:4*i+4]...)
		r.taken = append(r.taken, r.actions[i])
		r.env = append(r.env, i)
	}
	return r.envs.Step(r.actions)
}

// look has the policy score all environments.
func (r *rollout) look(model ts.ModuleT) error {
	if err := r.envs.Observe(r.seen); err != nil {
		return err
	}
	x, err := r.host.To(r.device, false)
	if err != nil {
		return err
	}
	defer x.MustDrop()
	scores, err := nn.Forward(model, x, false)
	runtime.KeepAlive(r.host)
	if err != nil {
		return err
	}
	defer scores.MustDrop()
	return scores.CopyData(r.scores, uint(len(r.scores)))
}

// choose takes action 1 with the probability that the softmax of the scores gives it.
func choose(score0, score1 float32, draw float64) int64 {
	if draw < 1/(1+math.Exp(float64(score0)-float64(score1))) {
		return 1
	}
	return 0
}

// weigh gives every step the discounted sum of the rewards from it on, normalised over all of the rank's steps, and
// divided by the number of episodes: with as many on every rank, DDP's mean is that over all episodes of the job.
func (r *rollout) weigh(gamma float64) {
	n := len(r.taken)
	if cap(r.advantages) < n {
		r.advantages = make([]float32, n, 2*n)
	}
	r.advantages = r.advantages[:n]
	clear(r.returns)
	var sum float64
	for k := n - 1; k >= 0; k-- {
		g := &r.returns[r.env[k]]
		*g = cartpole.Reward + gamma**g
		r.advantages[k] = float32(*g)
		sum += *g
	}
	mean := sum / float64(n)
	var squares float64
	for _, g := range r.advantages {
		squares += (float64(g) - mean) * (float64(g) - mean)
	}
	scale := 1 / ((math.Sqrt(squares/float64(n)) + 1e-8) * float64(r.envs.Len()))
	for k, g := range r.advantages {
		r.advantages[k] = float32((float64(g) - mean) * scale)
	}
}

// meanReturn is the mean over the episodes of what they earned.
func (r *rollout) meanReturn() float64 {
	return float64(len(r.taken)) * cartpole.Reward / float64(r.envs.Len())
}

// batch puts the steps on the rank's device: observations [n, 4], actions [n] and advantages [n]. The caller drops
// them.
func (r *rollout) batch() (observations, actions, advantages *ts.Tensor, err error) {
	_, err = nn.Try(func() (none struct{}) {
		to := func(slice any) *ts.Tensor { return nn.Must(ts.OfSlice(slice)).MustTo(r.device, true) }
		observations = to(r.observations).MustView([]int64{-1, cartpole.Observations}, true)
		actions, advantages = to(r.taken), to(r.advantages)
		return
	})
	return observations, actions, advantages, err
}
