package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
)

var startup = benchmark{
	name: "startup", title: "Start-up to the first training step",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		turns, err := h.job(ctx, h.plan(7, 2), 2, "1", "1", "--dataset-size", "64")
		if err != nil {
			return nil, err
		}
		return []record.Table{{First: "from the start until", Sides: record.Names(turns), Ratio: "ratio", Rows: []record.Row{
			record.Compare("the first step is made and saved", record.Seconds, "until", turns).AtMost("startup", 0.15),
			record.Compare("the end", record.Seconds, "seconds", turns),
		}}}, nil
	},
}

var toyJob = benchmark{
	name: "toy-job", title: "The toy job",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		t := record.Table{First: "ranks", Ratio: "ratio"}
		for _, ranks := range []int{1, 2} {
			turns, err := h.job(ctx, h.plan(5, 1), ranks, "50", "10")
			if err != nil {
				return nil, err
			}
			row := record.Compare(strconv.Itoa(ranks), record.Seconds, "seconds", turns)
			if ranks == 2 {
				row = row.AtMost("toy-job", 0.35)
			}
			t.Sides, t.Rows = record.Names(turns), append(t.Rows, row)
		}
		return []record.Table{t}, nil
	},
}

// job lets cmd/multigpu and the tutorial's script run the same job by turns.
func (h *harness) job(ctx context.Context, plan pair.Plan, ranks int, args ...string) ([]pair.Turns, error) {
	program, err := h.program(ctx, "./cmd/multigpu")
	if err != nil {
		return nil, err
	}
	script := filepath.Join(h.root, "cmd", "multigpu", "testdata", "multigpu.py")
	const until = "Training checkpoint saved"
	n := strconv.Itoa(ranks)
	// Both programs give each rank one thread.
	ours := pair.Job{Side: "Go", Dir: h.tmp, Until: until, Threads: 1, Cores: h.cores,
		Argv: append([]string{program, "--backend", "gloo", "--nproc-per-node", n, "--checkpoint", "go.pt"}, args...)}
	theirs := pair.Job{Side: "Python", Dir: h.tmp, Until: until, Threads: 1, Cores: h.cores,
		Argv: append([]string{h.python, script, "--world-size", n, "--checkpoint", "py.pt"}, args...)}
	plan.Say = prefixed(plan.Say, fmt.Sprintf("%d ranks, ", ranks))
	plan.Warmup = h.pick(1, 0)
	return plan.Play(ctx, pair.Request{}, ours, theirs)
}

// prefixed is a plan's Say that says more.
func prefixed(say func(string, ...any), text string) func(string, ...any) {
	return func(format string, a ...any) { say(text+format, a...) }
}
