package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
)

var toyIteration = benchmark{
	name: "toy-iteration", title: "An iteration of the toy job",
	run: runToyIteration,
}

func runToyIteration(ctx context.Context, h *harness) ([]record.Table, error) {
	times := record.Table{First: "iteration", Ratio: "ratio"}
	behind := record.Table{First: "in one iteration", Sides: []string{"Go", "Python"}}
	for _, world := range []int{1, 2} {
		err := h.both(ctx, "toy", setup{ranks: world}, func(players ...pair.Player) error {
			for _, c := range []struct {
				do, what string
				n        int
			}{{"step", "one batch", h.pick(1000, 200)}, {"epoch", "with loading", h.pick(8, 2)}} {
				plan := h.plan(11, 3)
				plan.Say = nil
				turns, err := plan.Play(ctx, pair.Request{Do: c.do, N: c.n}, players...)
				if err != nil {
					return err
				}
				name := fmt.Sprintf("world %d, %s", world, c.what)
				row := record.Compare(name, record.Seconds, "seconds", turns)
				if c.do == "step" {
					row = row.AtMost(fmt.Sprintf("toy-%d", world), map[int]float64{1: 0.5, 2: 0.85}[world])
				}
				times.Sides, times.Rows = record.Names(turns), append(times.Rows, row)
				h.say(row)
				for _, m := range []struct{ metric, what string }{
					{"switches", "sleeps"}, {"cgo", "calls of C"}, {"allocs", "Go allocations"}, {"bytes", "bytes of them"},
				} {
					r := record.Compare(name+": "+m.what, record.Count, m.metric, turns)
					r.Ratio = nil
					behind.Rows = append(behind.Rows, r)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return []record.Table{times, behind}, nil
}

var memory = benchmark{
	name: "memory", title: "Memory of a rank",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		goSide, err := h.goSide("toy", setup{ranks: 2})
		if err != nil {
			return nil, err
		}
		pySide, err := h.pySide("toy", setup{ranks: 2})
		if err != nil {
			return nil, err
		}
		plan := h.plan(5, 2)
		plan.Warmup = 0
		ask := pair.Request{Do: "memory", N: 100}
		turns, err := plan.Play(ctx, ask, pair.Fresh{Command: goSide}, pair.Fresh{Command: pySide})
		if err != nil {
			return nil, err
		}
		t := record.Table{First: "memory", Sides: record.Names(turns), Ratio: "ratio", Rows: []record.Row{
			record.Compare("resident after start", record.Bytes, "start resident", turns).AtMost("memory", 0.3)}}
		for _, when := range []string{"start", "steps"} {
			for _, kind := range []string{"resident", "proportional", "private"} {
				if when+kind == "startresident" {
					continue
				}
				what := map[string]string{"start": " after start", "steps": " after 100 iterations"}[when]
				t.Rows = append(t.Rows, record.Compare(kind+what, record.Bytes, when+" "+kind, turns))
			}
		}
		return []record.Table{t}, nil
	},
}

// toySide is a rank of the toy job.
func toySide(ctx context.Context, _ struct{}) (err error) {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()
	if err := torchddp.ManualSeed(0); err != nil {
		return err
	}
	set, err := data.NewRandomToy(2048)
	if err != nil {
		return err
	}
	model, err := models.NewToyNet()
	if err != nil {
		return err
	}
	opt, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: 1e-3})
	if err != nil {
		return err
	}
	defer opt.Close()
	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()})
	if err != nil {
		return err
	}
	batches, err := data.NewDataLoader(set, data.Options{BatchSize: 32, Sampler: sampler})
	if err != nil {
		return err
	}
	defer batches.Close()
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ddp.Close()) }()
	x := ts.MustRand([]int64{32, 20}, gotch.Float, gotch.CPU)
	y := ts.MustRand([]int64{32, 1}, gotch.Float, gotch.CPU)
	step := func(x, y *ts.Tensor) error { return trainStep(ddp, opt, nn.CrossEntropyLoss{}, x, y, nil) }
	started, err := pair.Memory()
	if err != nil {
		return err
	}
	epoch := 0
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		switch r.Do {
		case "step":
			return pair.Measure(r.N, func() error {
				for range r.N {
					if err := step(x, y); err != nil {
						return err
					}
				}
				return nil
			})
		case "epoch":
			return pair.Measure(r.N*batches.Len(), func() error {
				for range r.N {
					epoch++
					sampler.SetEpoch(epoch)
					for batch, err := range batches.All(ctx) {
						if err != nil {
							return err
						}
						if err := step(batch.Input(), batch.Target()); err != nil {
							return err
						}
					}
				}
				return nil
			})
		case "memory":
			for range r.N {
				if err := step(x, y); err != nil {
					return nil, err
				}
			}
			now, err := pair.Memory()
			a := pair.Answer{}
			for name := range now {
				a["start "+name], a["steps "+name] = started[name], now[name]
			}
			return a, err
		}
		return nil, pair.Unknown(r)
	})
}

// trainStep is an iteration of a tutorial's training loop. see, if any, gets the loss before it is freed.
func trainStep(ddp *torchddp.DDP, opt optim.Optimizer, criterion nn.Loss, x, y *ts.Tensor,
	see func(loss *ts.Tensor) error) error {
	if err := opt.ZeroGrad(true); err != nil {
		return err
	}
	out, err := ddp.Forward(x)
	if err != nil {
		return err
	}
	defer out.MustDrop()
	loss := criterion.Forward(out, y)
	defer loss.MustDrop()
	if err := ddp.Backward(loss); err != nil {
		return err
	}
	if err := opt.Step(); err != nil {
		return err
	}
	if see != nil {
		return see(loss)
	}
	return nil
}
