package main

import (
	"context"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
)

var add = benchmark{
	name: "add", title: "One small operation",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		var t, behind record.Table
		err := h.both(ctx, "add", setup{}, func(players ...pair.Player) error {
			turns, err := h.plan(21, 7).Play(ctx, pair.Request{Do: "add", N: 50_000}, players...)
			if err != nil {
				return err
			}
			t = record.Table{First: "operation", Sides: record.Names(turns), Ratio: "ratio",
				Rows: []record.Row{record.Compare("add", record.Seconds, "seconds", turns).AtMost("add", 1)}}
			behind = record.Table{First: "in one operation", Sides: []string{"Go"}, Rows: []record.Row{
				record.Compare("Go allocations", record.Count, "allocs", turns[:1]),
				record.Compare("bytes of them", record.Count, "bytes", turns[:1]),
				record.Compare("calls of C", record.Count, "cgo", turns[:1]),
			}}
			return nil
		})
		return []record.Table{t, behind}, err
	},
}

// addSide adds.
func addSide(context.Context, struct{}) error {
	a, b := ts.MustOnes([]int64{20}, gotch.Float, gotch.CPU), ts.MustOnes([]int64{20}, gotch.Float, gotch.CPU)
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		return pair.Measure(r.N, func() error {
			for range r.N {
				c := a.MustAdd(b, false)
				c.MustDrop()
			}
			return nil
		})
	})
}
