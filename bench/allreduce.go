package main

import (
	"context"
	"errors"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/torchddp"
)

var allReduce = benchmark{
	name: "allreduce", title: "All-reduce over Gloo",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		times := record.Table{First: "size", Ratio: "ratio"}
		bandwidth := record.Table{First: "size"}
		err := h.both(ctx, "allreduce", setup{ranks: 2}, func(players ...pair.Player) error {
			for _, c := range []struct{ size, n int }{
				{4, 500}, {1 << 10, 500}, {1 << 14, 300}, {1 << 18, 100}, {1 << 20, 40}, {1 << 22, 12}, {1 << 24, 4}, {1 << 26, 1},
			} {
				plan := h.plan(11, 3)
				plan.Say = nil
				turns, err := plan.Play(ctx, pair.Request{Do: "allreduce", N: c.n, Size: c.size}, players...)
				if err != nil {
					return err
				}
				name := record.Bytes.Format(float64(c.size))
				times.Sides, bandwidth.Sides = record.Names(turns), record.Names(turns)
				row := record.Compare(name, record.Seconds, "seconds", turns)
				times.Rows = append(times.Rows, row)
				h.say(row)
				rate := record.Compare(name, record.BytesPerS, "bandwidth", turns)
				rate.Ratio = nil
				bandwidth.Rows = append(bandwidth.Rows, rate)
			}
			return nil
		})
		return []record.Table{times, bandwidth}, err
	},
}

// allReduceSide is a rank that reduces tensors of any size.
func allReduceSide(ctx context.Context, _ struct{}) (err error) {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		t := ts.MustZeros([]int64{int64(r.Size / 4)}, gotch.Float, gotch.CPU)
		defer t.MustDrop()
		if err := pg.AllReduce(t, torchddp.Sum); err != nil { // its memory's first use
			return nil, err
		}
		a, err := pair.Measure(r.N, func() error {
			for range r.N {
				if err := pg.AllReduce(t, torchddp.Sum); err != nil {
					return err
				}
			}
			return nil
		})
		a["bandwidth"] = []float64{float64(r.Size) / a["seconds"][0]}
		return a, err
	})
}
