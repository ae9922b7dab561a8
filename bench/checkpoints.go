package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/tdp"
)

type checkpointArgs struct{ Source string }

var checkpoints = benchmark{
	name: "checkpoint", title: "Saving and loading",
	run: runCheckpoints,
}

func runCheckpoints(ctx context.Context, h *harness) ([]record.Table, error) {
	source := filepath.Join(h.tmp, "source.pt")
	o := setup{threads: len(h.cores), args: checkpointArgs{source}}
	file := map[string]string{} // torch.save writes the file's name into it: both save the same name
	for _, side := range []string{"Go", "Python"} {
		file[side] = filepath.Join(h.tmp, "saved-by-"+side, "source.pt")
	}
	for _, p := range file {
		if err := os.MkdirAll(filepath.Dir(p), 0o777); err != nil {
			return nil, err
		}
	}
	t := record.Table{First: "", Ratio: "ratio"}
	beyond := record.Table{Caption: "Go's peak of memory beyond the tensors:", First: "in a fresh process",
		Sides: []string{"Go"}}
	goSide, err := h.goSide("checkpoint", o)
	if err != nil {
		return nil, err
	}
	pySide, err := h.pySide("checkpoint", o)
	if err != nil {
		return nil, err
	}
	fresh := func(do string, warm int) ([]pair.Turns, error) {
		plan := h.plan(5, 1)
		plan.Warmup, plan.Say = warm, prefixed(plan.Say, do+", fresh processes, ")
		return plan.Play(ctx, pair.Request{Do: do, Path: source}, pair.Fresh{Command: goSide}, pair.Fresh{Command: pySide})
	}
	// Python makes the file before the Go side reads it.
	err = h.with(ctx, []pair.Command{pySide, goSide}, func(players ...pair.Player) error {
		players = []pair.Player{players[1], players[0]}
		plan := h.plan(9, 2)
		turns := map[string][]pair.Turns{}
		for _, do := range []string{"save", "load", "mmap"} {
			plan.Say = prefixed(h.plan(9, 2).Say, do+", ")
			turns[do], err = plan.PlayEach(ctx, func(p pair.Player) pair.Request {
				r := pair.Request{Do: do, Path: source}
				if do == "save" {
					r.Path = file[p.Name()]
				}
				return r
			}, players...)
			if err != nil {
				return err
			}
		}
		if err := sameFile(file["Go"], file["Python"]); err != nil {
			return err
		}
		synced, err := plan.Play(ctx, pair.Request{Do: "save synced", Path: file["Go"]}, players[0])
		if err != nil {
			return err
		}
		t.Sides = record.Names(turns["save"])
		t.Rows = append(t.Rows, record.Compare("save", record.Seconds, "seconds", turns["save"]).AtMost("", 1),
			record.Compare("save, waiting for the disk", record.Seconds, "seconds", synced))
		loads, err := fresh("load", h.pick(1, 0))
		if err != nil {
			return err
		}
		maps, err := fresh("mmap", h.pick(1, 0))
		if err != nil {
			return err
		}
		alone := h.plan(5, 1)
		alone.Say = nil
		checked, err := alone.Play(ctx, pair.Request{Do: "mmap checked", Path: source}, pair.Fresh{Command: goSide})
		if err != nil {
			return err
		}
		t.Rows = append(t.Rows, record.Compare("load, fresh process", record.Seconds, "seconds", loads).AtMost("", 1),
			record.Compare("mapped load, fresh process", record.Seconds, "seconds", maps),
			record.Compare("mapped load against Python's ordinary one", record.Seconds, "seconds",
				[]pair.Turns{maps[0], loads[1]}).AtMost("", 0.1),
			record.Compare("mapped load that checks CRCs, the default, against Python's ordinary one", record.Seconds, "seconds",
				[]pair.Turns{checked[0], loads[1]}),
			record.Compare("load, again", record.Seconds, "seconds", turns["load"]),
			record.Compare("mapped load, again", record.Seconds, "seconds", turns["mmap"]))
		for _, m := range []struct {
			what  string
			turns []pair.Turns
		}{{"load", loads}, {"mapped load", maps}} {
			beyond.Rows = append(beyond.Rows, record.Compare(m.what, record.Bytes, "beyond", m.turns[:1]))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	plan := h.plan(3, 1)
	plan.Warmup, plan.Say = 0, nil
	saves, err := plan.Play(ctx, pair.Request{Do: "save", Path: file["Go"]}, pair.Fresh{Command: goSide})
	if err != nil {
		return nil, err
	}
	beyond.Rows = append(beyond.Rows, record.Compare("save", record.Bytes, "beyond", saves))
	return []record.Table{t, beyond}, nil
}

// checkpointSide saves and loads the file that Python made.
func checkpointSide(_ context.Context, args checkpointArgs) error {
	// libtorch's own start, and a tiny file first.
	var tiny bytes.Buffer
	ones := ts.MustOnes([]int64{3}, gotch.Float, gotch.CPU)
	if err := checkpoint.Write(&tiny, checkpoint.NewDict().Set("x", ones)); err != nil {
		return err
	}
	x, err := checkpoint.Read(bytes.NewReader(tiny.Bytes()), int64(tiny.Len()), checkpoint.LoadOptions{})
	if err != nil {
		return err
	}
	release(x)
	var state any // what is saved, once it is asked for
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		var loaded any
		var work func() error
		switch r.Do {
		case "save", "save synced":
			o := checkpoint.SaveOptions{NoSync: r.Do == "save"}
			work = func() error { return checkpoint.Save(r.Path, state, o) }
		case "load", "mmap", "mmap checked":
			// Python checks nothing that it maps.
			o := checkpoint.LoadOptions{Mmap: r.Do != "load", SkipCRC: r.Do == "mmap"}
			work = func() (err error) { loaded, err = checkpoint.Load(r.Path, o); return err }
		default:
			return nil, pair.Unknown(r)
		}
		if strings.HasPrefix(r.Do, "save") && state == nil {
			var err error
			if state, err = checkpoint.Load(args.Source, checkpoint.LoadOptions{}); err != nil {
				return nil, err
			}
		}
		before, err := quietMemory()
		if err != nil {
			return nil, err
		}
		begin := time.Now()
		if err := work(); err != nil {
			return nil, err
		}
		took := time.Since(begin)
		peak, err := status("VmHWM")
		if err != nil {
			return nil, err
		}
		// Mapped tensors do not count: what of them is in memory is beyond.
		tensors := 0.0
		if r.Do == "load" {
			tensors = size(loaded, map[uint64]bool{})
		}
		release(loaded)
		return pair.Answer{"seconds": {took.Seconds()}, "beyond": {peak - before - tensors}}, nil
	})
}

// quietMemory is the memory in use after a collection; the peak is counted from here on.
func quietMemory() (float64, error) {
	runtime.GC()
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		return 0, err
	}
	return status("VmRSS")
}

func status(field string) (float64, error) {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			var kb float64
			_, err := fmt.Sscan(rest, &kb)
			return kb * 1024, err
		}
	}
	return 0, fmt.Errorf("no %s in /proc/self/status", field)
}

// size counts the tensors' bytes, each storage once.
func size(v any, seen map[uint64]bool) float64 {
	total := 0.0
	each(v, func(t *ts.Tensor) {
		info, err := tdp.Describe(t)
		if err != nil || seen[info.Storage] {
			return
		}
		seen[info.Storage] = true
		total += float64(info.StorageBytes)
	})
	return total
}

func release(v any) {
	each(v, func(t *ts.Tensor) { _ = t.Drop() })
}

func each(v any, do func(*ts.Tensor)) {
	switch x := v.(type) {
	case *ts.Tensor:
		do(x)
	case *checkpoint.Dict:
		for _, item := range x.All() {
			each(item, do)
		}
	case *checkpoint.List:
		for _, item := range x.Items {
			each(item, do)
		}
	}
}

// sameFile makes sure that both sides saved the same thing: the same bytes but for the serialization_id and its two
// CRCs.
func sameFile(a, b string) error {
	x, err := os.ReadFile(a)
	if err != nil {
		return err
	}
	y, err := os.ReadFile(b)
	if err != nil {
		return err
	}
	if len(x) != len(y) {
		return fmt.Errorf("the two files have %d and %d bytes", len(x), len(y))
	}
	differ := 0
	for len(x) > 0 {
		n := min(len(x), 1<<20)
		if !bytes.Equal(x[:n], y[:n]) {
			for i := range n {
				if x[i] != y[i] {
					differ++
				}
			}
		}
		x, y = x[n:], y[n:]
	}
	if differ > 48 {
		return fmt.Errorf("the two files differ in %d bytes", differ)
	}
	return nil
}
