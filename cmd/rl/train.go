package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// trainRank is what every rank does.
func (c *config) trainRank(ctx context.Context, pg *torchddp.ProcessGroup) (err error) {
	env, _, err := launch.FromEnv()
	if err != nil {
		return err
	}
	fmt.Printf("My rank=%d, local_rank=%d\n", pg.Rank(), env.LocalRank)
	if pg.Rank() == 0 {
		if err := c.prepare(ctx); err != nil {
			return err
		}
	}
	if !pg.Device().IsCuda() {
		if err := torchddp.SetNumThreads(1); err != nil { // the network is too small to share
			return err
		}
	}
	a, err := newAgent(*c, pg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.close()) }()
	return a.train(ctx)
}

// agent is one rank's learner.
type agent struct {
	config    config
	pg        *torchddp.ProcessGroup
	policy    *policy
	optimizer *optim.Adam
	ddp       *torchddp.DDP
	rollout   *rollout
	first     int // the iteration to begin with
}

func newAgent(c config, pg *torchddp.ProcessGroup) (a *agent, err error) {
	a = &agent{config: c, pg: pg}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()
	if err := torchddp.ManualSeed(c.seed); err != nil {
		return a, err
	}
	if a.policy, err = newPolicy(c.hidden); err != nil {
		return a, err
	}
	if err := a.policy.To(pg.Device(), gotch.Float); err != nil {
		return a, err
	}
	if a.optimizer, err = optim.NewAdam(a.policy.NamedParameters(), optim.AdamOptions{LR: c.lr}); err != nil {
		return a, err
	}
	if c.resume != "" {
		if a.first, err = loadCheckpoint(a.policy, a.optimizer, pg.Device(), c.resume); err != nil {
			return a, fmt.Errorf("resume from %s: %w", c.resume, err)
		}
		if pg.Rank() == 0 {
			fmt.Printf("Resumed from %s at iteration %d\n", c.resume, a.first)
		}
	}
	if a.ddp, err = torchddp.NewDDP(a.policy, pg, torchddp.DDPOptions{}); err != nil {
		return a, err
	}
	a.rollout, err = newRollout(c.envs, pg.Device())
	return a, err
}

func (a *agent) close() (err error) {
	if a.ddp != nil {
		err = a.ddp.Close()
	}
	if a.optimizer != nil {
		err = errors.Join(err, a.optimizer.Close())
	}
	if a.rollout != nil {
		a.rollout.drop()
	}
	if a.policy != nil {
		a.policy.Drop()
	}
	return err
}

func (a *agent) train(ctx context.Context) error {
	last := a.config.iterations - 1
	if a.first > last && a.pg.Rank() == 0 {
		fmt.Printf("Nothing to do: %s has all %d iterations; raise --iterations to go on\n", a.config.resume, a.first)
	}
	for i := a.first; i <= last; i++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := a.iterate(i); err != nil {
			return fmt.Errorf("iteration %d: %w", i, err)
		}
		// The ranks' models are equal: one of them saves.
		if a.pg.Rank() == 0 && ((i+1)%a.config.saveEvery == 0 || i == last) {
			if err := saveCheckpoint(a.policy, a.optimizer, i, a.config.checkpoint); err != nil {
				return err
			}
			fmt.Printf("Iteration: %d, checkpoint saved at %s\n", i, a.config.checkpoint)
		}
	}
	return nil
}

// iterate plays episodes and learns from them.
func (a *agent) iterate(i int) error {
	if err := a.rollout.play(a.policy, episodeSource(a.config.seed, a.pg.Rank(), i)); err != nil {
		return err
	}
	a.rollout.weigh(a.config.gamma)
	loss, err := a.learn()
	if err != nil {
		return err
	}
	return a.log(i, loss)
}

// learn makes the actions that turned out well more likely: one step of the optimizer for all of the episodes.
func (a *agent) learn() (loss float64, err error) {
	observations, actions, advantages, err := a.rollout.batch()
	if err != nil {
		return 0, err
	}
	defer observations.MustDrop()
	defer actions.MustDrop()
	defer advantages.MustDrop()
	if err := a.optimizer.ZeroGrad(true); err != nil {
		return 0, err
	}
	scores, err := a.ddp.Forward(observations)
	if err != nil {
		return 0, err
	}
	defer scores.MustDrop()
	l, err := nn.Try(func() *ts.Tensor {
		// Cross entropy is minus the log of the probability that the action had.
		surprise := nn.CrossEntropyLoss{Reduction: nn.None}.Forward(scores, actions)
		return surprise.MustDot(advantages, true)
	})
	if err != nil {
		return 0, err
	}
	defer l.MustDrop()
	if err := a.ddp.Backward(l); err != nil {
		return 0, err
	}
	value := l.Float64Values()
	return value[0], a.optimizer.Step()
}

// log prints the mean over the ranks of the loss and of the episodes' return. All ranks come to it.
func (a *agent) log(i int, loss float64) error {
	if i%a.config.logEvery != 0 && i != a.config.iterations-1 {
		return nil
	}
	values := []float64{loss, a.rollout.meanReturn()}
	sum, err := nn.Try(func() *ts.Tensor { return nn.Must(ts.OfSlice(values)).MustTo(a.pg.Device(), true) })
	if err != nil {
		return err
	}
	defer sum.MustDrop()
	if err := a.pg.Reduce(sum, 0, torchddp.Sum); err != nil {
		return err
	}
	if a.pg.Rank() != 0 {
		return nil
	}
	if err := sum.CopyData(values, 2); err != nil {
		return err
	}
	n := float64(a.pg.Size())
	fmt.Printf("Iteration: %d, Loss: %.6f, Return: %.1f\n", i, values[0]/n, values[1]/n)
	return nil
}

// saveCheckpoint writes what the tutorial's torch.save does.
func saveCheckpoint(model *policy, optimizer *optim.Adam, iteration int, path string) error {
	state, err := optimizer.StateDict()
	if err != nil {
		return err
	}
	return checkpoint.Save(path, checkpoint.NewDict().
		Set("iter_no", iteration).
		Set("model", checkpoint.ModuleState(model)).
		Set("optimizer", state))
}

// loadCheckpoint reads a checkpoint of rank 0 onto this rank's device, and gives the iteration to go on with.
func loadCheckpoint(model *policy, optimizer *optim.Adam, device gotch.Device, path string) (next int, err error) {
	state, err := checkpoint.Load(path, checkpoint.LoadOptions{MapLocation: mapLocation(device)})
	if err != nil {
		return 0, err
	}
	weights, err := checkpoint.Get[*checkpoint.StateDict](state, "model")
	if err != nil {
		return 0, err
	}
	if _, err := checkpoint.LoadStateDict(model, weights, true); err != nil {
		return 0, err
	}
	for _, t := range weights.All() {
		t.MustDrop() // LoadStateDict copied it
	}
	moments, err := checkpoint.Get[*checkpoint.Dict](state, "optimizer")
	if err != nil {
		return 0, err
	}
	if err := optimizer.LoadStateDict(moments); err != nil {
		return 0, err
	}
	iteration, err := checkpoint.Get[int64](state, "iter_no")
	if err == nil && iteration < 0 {
		err = fmt.Errorf("its iter_no is %d: not a checkpoint of this program", iteration)
	}
	return int(iteration) + 1, err
}

// mapLocation is the tutorial's {'cuda:0': 'cuda:RANK'}: what rank 0 saved from its GPU goes to this rank's device.
func mapLocation(device gotch.Device) checkpoint.MapLocation {
	to := "cpu"
	if device.IsCuda() {
		to = fmt.Sprintf("cuda:%d", device.Value)
	}
	return checkpoint.MapDevices(map[string]string{"cuda:0": to})
}
