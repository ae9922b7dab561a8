package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/torchddp/optim"
)

// optimArgs are the parameters' shapes, and what Python is to make for each case.
type optimArgs struct {
	Shapes [][]int64
	Cases  map[string]pythonOptim
}

type pythonOptim struct {
	Algo string
	KW   map[string]any
}

var optimizers = benchmark{
	name: "optimizer", title: "An optimizer step",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		args := optimArgs{Shapes: resnet50Shapes(), Cases: map[string]pythonOptim{}}
		for _, c := range optimCases {
			args.Cases[c.name] = c.theirs
		}
		t := record.Table{First: "Go / Python", Ratio: "ratio"}
		behind := record.Table{First: "in one step", Sides: []string{"Go"}}
		err := h.both(ctx, "optim", setup{threads: len(h.cores), args: args}, func(players ...pair.Player) error {
			for _, c := range optimCases {
				plan := h.plan(7, 2)
				plan.Say = nil
				turns, err := plan.Play(ctx, pair.Request{Do: c.name, N: h.pick(5, 2)}, players...)
				if err != nil {
					return err
				}
				row := record.Compare(c.name, record.Seconds, "seconds", turns)
				h.say(row)
				t.Sides, t.Rows = record.Names(turns), append(t.Rows, row)
				if c.name == "SGD default / default" || c.name == "AdamW default / default" {
					for _, m := range []struct{ metric, what string }{{"allocs", "Go allocations"}, {"cgo", "calls of C"}} {
						behind.Rows = append(behind.Rows, record.Compare(c.theirs.Algo+", "+m.what, record.Count, m.metric, turns[:1]))
					}
				}
			}
			return nil
		})
		return []record.Table{t, behind}, err
	},
}

type optimCase struct {
	name   string
	theirs pythonOptim
	ours   func(p []*ts.Tensor) (step func() error, close io.Closer, err error)
}

var optimCases = func() []optimCase {
	sgd := map[string]any{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
	with := func(key string) map[string]any {
		kw := maps.Clone(sgd)
		kw[key] = true
		return kw
	}
	none := map[string]any{}
	return []optimCase{
		{"SGD default / default", pythonOptim{"SGD", sgd}, newSGD(optim.Auto)},
		{"SGD fused / default", pythonOptim{"SGD", sgd}, newSGD(optim.Fused)},
		{"SGD fused / fused", pythonOptim{"SGD", with("fused")}, newSGD(optim.Fused)},
		{"SGD foreach / foreach", pythonOptim{"SGD", with("foreach")}, newSGD(optim.Foreach)},
		{"AdamW default / default", pythonOptim{"AdamW", none}, newAdamW(optim.Auto)},
		{"AdamW fused / default", pythonOptim{"AdamW", none}, newAdamW(optim.Fused)},
		{"AdamW fused / fused", pythonOptim{"AdamW", map[string]any{"fused": true}}, newAdamW(optim.Fused)},
		{"clip_grad_norm", pythonOptim{"clip", none}, clipNorm},
	}
}()

func newSGD(i optim.Implementation) func(p []*ts.Tensor) (func() error, io.Closer, error) {
	return func(p []*ts.Tensor) (func() error, io.Closer, error) {
		return stepOf(optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Momentum: 0.9, WeightDecay: 1e-4, Implementation: i}))
	}
}

func newAdamW(i optim.Implementation) func(p []*ts.Tensor) (func() error, io.Closer, error) {
	return func(p []*ts.Tensor) (func() error, io.Closer, error) {
		return stepOf(optim.NewAdamW(p, optim.AdamWOptions{Implementation: i}))
	}
}

func stepOf[O optim.Optimizer](o O, err error) (func() error, io.Closer, error) {
	if err != nil {
		return nil, nil, err
	}
	return o.Step, o, nil
}

func clipNorm(p []*ts.Tensor) (func() error, io.Closer, error) {
	return func() error {
		n, err := optim.ClipGradNorm(p, 1)
		if err != nil {
			return err
		}
		return n.Drop()
	}, io.NopCloser(nil), nil
}

// resnet50Shapes are the shapes of torchvision's resnet50 parameters in order.
func resnet50Shapes() [][]int64 {
	var s [][]int64
	conv := func(out, in, k int64) { s = append(s, []int64{out, in, k, k}) }
	norm := func(n int64) { s = append(s, []int64{n}, []int64{n}) }
	conv(64, 3, 7)
	norm(64)
	in := int64(64)
	for stage, blocks := range []int{3, 4, 6, 3} {
		width := int64(64) << stage
		for b := range blocks {
			conv(width, in, 1)
			norm(width)
			conv(width, width, 3)
			norm(width)
			conv(4*width, width, 1)
			norm(4 * width)
			if b == 0 {
				conv(4*width, in, 1)
				norm(4 * width)
			}
			in = 4 * width
		}
	}
	return append(s, []int64{1000, 2048}, []int64{1000})
}

// optimSide steps optimizers, one at a time.
func optimSide(_ context.Context, args optimArgs) error {
	params, err := parameters(args.Shapes)
	if err != nil {
		return err
	}
	var name string
	var step func() error
	var state io.Closer = io.NopCloser(nil)
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		if r.Do != name {
			if err := state.Close(); err != nil {
				return nil, err
			}
			for _, c := range optimCases {
				if c.name == r.Do {
					name = c.name
					if step, state, err = c.ours(params); err != nil {
						return nil, err
					}
				}
			}
			if r.Do != name {
				return nil, pair.Unknown(r)
			}
		}
		return pair.Measure(r.N, func() error {
			for range r.N {
				if err := step(); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// parameters makes leaf parameters with small gradients.
func parameters(shapes [][]int64) ([]*ts.Tensor, error) {
	var out []*ts.Tensor
	for _, s := range shapes {
		p, g := ts.MustRandn(s, gotch.Float, gotch.CPU), ts.MustRandn(s, gotch.Float, gotch.CPU)
		g.MustMulScalar_(ts.FloatScalar(1e-3))
		if err := errors.Join(tdp.SetRequiresGrad(p, true), tdp.SetGrad(p, g)); err != nil {
			return nil, fmt.Errorf("parameter of shape %v: %w", s, err)
		}
		g.MustDrop()
		out = append(out, p)
	}
	return out, nil
}
