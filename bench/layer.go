package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/plain"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
)

var layer = benchmark{
	name: "layer", title: "The layer's own cost",
	run: runLayer,
}

// layerArgs say of what the model is: parameters of one float, and batch norms, each 2 parameters and 3 buffers. Plain is
// the library of package plain.
type layerArgs struct {
	Params, Norms int
	Plain         string
}

func runLayer(ctx context.Context, h *harness) ([]record.Table, error) {
	library, err := plain.Compile(ctx, h.plan(1, 1).Say)
	if err != nil {
		return nil, err
	}
	t := record.Table{First: "an iteration", Sides: []string{"Go", "C++", "Go beyond C++", "Python", "C++ there", "Python beyond C++"}}
	for _, args := range []layerArgs{{Params: 1}, {Params: 10}, {Params: 100}, {Params: 1000}, {Norms: 53}} {
		args.Plain = library
		o := setup{ranks: 1, args: args}
		n := args.Params + 2*args.Norms
		goSide, err := h.goSide("layer", o)
		if err != nil {
			return nil, err
		}
		pySide, err := h.pySide("layer", o)
		if err != nil {
			return nil, err
		}
		// One core for each: what is measured is work, not how threads are spread.
		goSide.Cores, pySide.Cores = h.cpus(setup{}), h.cpus(setup{})
		err = h.with(ctx, []pair.Command{goSide, pySide}, func(players ...pair.Player) error {
			plan := h.plan(21, 5)
			plan.Say = nil
			turns, err := plan.Play(ctx, pair.Request{Do: "step", N: max(10, 10000/(n+20))}, players...)
			if err != nil {
				return err
			}
			name := fmt.Sprintf("%d parameters", n)
			if args.Norms > 0 {
				name += fmt.Sprintf(" and %d buffers", 3*args.Norms)
			}
			row := record.Row{Name: name, Unit: record.Seconds}
			for _, side := range turns {
				base := baseline(side)
				row.Values = append(row.Values, side.Summary("seconds"), base.Summary("seconds"), pair.Difference(side, base, "seconds"))
			}
			own := row.Values[2].Median
			row.Target = &record.Target{Key: "layer", AtMost: 20e-6 + 0.1e-6*float64(n), Seen: own, Unit: record.Seconds}
			t.Rows = append(t.Rows, row)
			h.say(row)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return []record.Table{t}, nil
}

// baseline are the turns that plain C++ had in a side's process.
func baseline(side pair.Turns) (t pair.Turns) {
	for _, a := range side.Answers {
		t.Answers = append(t.Answers, pair.Answer{"seconds": a["plain"]})
	}
	return t
}

// manyParams is a model of many small parameters, and of batch norms that are not run.
type manyParams struct {
	nn.Base
	params []*ts.Tensor
	norms  nn.Module
	twins  []*ts.Tensor // package plain's parameters, made at the same time, so that they lie in memory as these do
}

func newManyParams(args layerArgs) (*manyParams, error) {
	return nn.Try(func() *manyParams {
		m := &manyParams{params: make([]*ts.Tensor, args.Params)}
		one := func() *ts.Tensor { return nn.Must(nn.Trainable(ts.MustOnes([]int64{1}, gotch.Float, gotch.CPU))) }
		for i := range m.params {
			m.params[i] = one()
			m.twins = append(m.twins, one())
			nn.Check(m.RegisterParameter("p"+strconv.Itoa(i), &m.params[i]))
		}
		var norms []nn.Module
		for range args.Norms {
			norms = append(norms, nn.Must(nn.NewBatchNorm2d(1, nn.BatchNormOptions{})))
			m.twins = append(m.twins, one(), one())
		}
		m.norms = nn.NewModuleList(norms...)
		nn.Check(nn.Register(m, "norms", &m.norms))
		return m
	})
}

// ForwardT is not called: the side adds up by itself, to keep its list of tensors.
func (m *manyParams) ForwardT(*ts.Tensor, bool) *ts.Tensor { panic("not used") }

// layerSide is DDP around many small parameters.
func layerSide(ctx context.Context, args layerArgs) (err error) {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()
	model, err := newManyParams(args)
	if err != nil {
		return err
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ddp.Close()) }()
	params := optim.Parameters(model)
	opt, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: 1})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, opt.Close()) }()
	step := func() error {
		if err := opt.ZeroGrad(true); err != nil {
			return err
		}
		outs, err := ddp.Run(func() ([]*ts.Tensor, error) {
			all := ts.MustCat(params, 0)
			defer all.MustDrop()
			return []*ts.Tensor{all.MustSum(gotch.Float, false)}, nil
		})
		if err != nil {
			return err
		}
		defer outs[0].MustDrop()
		return ddp.Backward(outs[0])
	}
	base, err := plain.New(args.Plain, model.twins, args.Norms)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, base.Close()) }()
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		// One and the other by turns, so that both see the same machine.
		var ours, theirs time.Duration
		for range r.N {
			begin := time.Now()
			if err := step(); err != nil {
				return nil, err
			}
			middle := time.Now()
			if err := base.Step(); err != nil {
				return nil, err
			}
			ours, theirs = ours+middle.Sub(begin), theirs+time.Since(middle)
		}
		each := func(d time.Duration) []float64 { return []float64{d.Seconds() / float64(r.N)} }
		return pair.Answer{"seconds": each(ours), "plain": each(theirs)}, nil
	})
}
