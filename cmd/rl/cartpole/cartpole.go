// Package cartpole is Gymnasium's CartPole-v1: a pole stands on a cart, which is pushed left or right so that the pole
// does not fall. Numbers and rules are Gymnasium's; random starts are drawn from Go's generators, so a seed gives other
// ones than there.
//
// [Envs] plays many episodes side by side, so that a policy looks at all of them in one go:
//
//	envs, err := cartpole.New(8)
//	envs.Reset(rng)
//	for envs.Running() > 0 {
//		envs.Observe(observations) // 8 rows of 4 numbers
//		err := envs.Step(actions)  // one of 0 and 1 for each
//	}
package cartpole

import (
	"fmt"
	"math"
	"math/rand/v2"
)

const (
	// Observations are the numbers of a [State].
	Observations = 4
	// Actions are how many there are: 0 pushes left, 1 right.
	Actions = 2
	// MaxSteps is when an episode ends even though the pole stands.
	MaxSteps = 500
	// Reward is for every step, also that in which the pole falls: an episode's return is its length.
	Reward = 1.0

	gravity       = 9.8
	poleMass      = 0.1
	totalMass     = poleMass + 1.0
	length        = 0.5 // half of the pole's
	poleMoment    = poleMass * length
	force         = 10.0
	tau           = 0.02 // seconds a step
	maxX          = 2.4
	maxTheta      = 12 * 2 * math.Pi / 360
	startInterval = 0.05
)

// State is the cart's position and speed, and the pole's angle from upright and angular speed.
type State [Observations]float64

// Next is the state one step later, by Euler's method.
func (s State) Next(action int64) State {
	x, xDot, theta, thetaDot := s[0], s[1], s[2], s[3]
	push := -force
	if action == 1 {
		push = force
	}
	sin, cos := math.Sincos(theta)
	temp := (push + poleMoment*thetaDot*thetaDot*sin) / totalMass
	thetaAcc := (gravity*sin - cos*temp) / (length * (4.0/3.0 - poleMass*cos*cos/totalMass))
	xAcc := temp - poleMoment*thetaAcc*cos/totalMass
	return State{x + tau*xDot, xDot + tau*xAcc, theta + tau*thetaDot, thetaDot + tau*thetaAcc}
}

// Fallen tells whether the pole has fallen, or the cart left its track. A state that is no number has.
func (s State) Fallen() bool { return !(math.Abs(s[0]) <= maxX && math.Abs(s[2]) <= maxTheta) }

// Envs are episodes that are played side by side. Make them with [New].
type Envs struct {
	states  []State
	steps   []int
	over    []bool
	running int
}

// New makes n environments. None runs before Reset.
func New(n int) (*Envs, error) {
	if n < 1 {
		return nil, fmt.Errorf("cartpole: %d environments asked for; at least 1 is needed", n)
	}
	e := &Envs{make([]State, n), make([]int, n), make([]bool, n), 0}
	for i := range e.over {
		e.over[i] = true
	}
	return e, nil
}

// Len is the number of environments.
func (e *Envs) Len() int { return len(e.states) }

// Running is the number of episodes that are not over.
func (e *Envs) Running() int { return e.running }

// Over tells whether the episode of environment i is over.
func (e *Envs) Over(i int) bool { return e.over[i] }

// Steps is how many steps the episode of environment i has lasted, which is its return.
func (e *Envs) Steps(i int) int { return e.steps[i] }

// State is what environment i looks like. That of an episode that is over is its last.
func (e *Envs) State(i int) State { return e.states[i] }

// Reset begins a new episode in every environment, with small random numbers for a state.
func (e *Envs) Reset(rng *rand.Rand) {
	for i := range e.states {
		for k := range e.states[i] {
			e.states[i][k] = (2*rng.Float64() - 1) * startInterval
		}
		e.steps[i], e.over[i] = 0, false
	}
	e.running = len(e.states)
}

// Observe writes the states into dst, a row of [Observations] numbers for each environment.
func (e *Envs) Observe(dst []float32) error {
	if len(dst) != Observations*len(e.states) {
		return fmt.Errorf("cartpole: %d environments are %d numbers, not %d", len(e.states), Observations*len(e.states), len(dst))
	}
	for i, s := range e.states {
		for k, v := range s {
			dst[Observations*i+k] = float32(v)
		}
	}
	return nil
}

// Step does one action in each environment. Those whose episode is over stay as they are, whatever their action.
func (e *Envs) Step(actions []int64) error {
	if len(actions) != len(e.states) {
		return fmt.Errorf("cartpole: %d environments need as many actions, not %d", len(e.states), len(actions))
	}
	for i, a := range actions {
		if !e.over[i] && a != 0 && a != 1 {
			return fmt.Errorf("cartpole: action %d in environment %d; there are 0 (left) and 1 (right)", a, i)
		}
	}
	for i, a := range actions {
		if e.over[i] {
			continue
		}
		e.states[i] = e.states[i].Next(a)
		e.steps[i]++
		if e.states[i].Fallen() || e.steps[i] == MaxSteps {
			e.over[i] = true
			e.running--
		}
	}
	return nil
}
