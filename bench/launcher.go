package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/launch/tcpstore"
)

var launcher = benchmark{
	name: "launch", title: "The launcher",
	run: runLauncher,
}

func runLauncher(ctx context.Context, h *harness) ([]record.Table, error) {
	goddp, err := h.program(ctx, "./cmd/goddp")
	if err != nil {
		return nil, err
	}
	worker, err := h.program(ctx, "./bench/internal/meet")
	if err != nil {
		return nil, err
	}
	times := record.Table{First: "workers", Sides: []string{"goddp run", "torchrun"}, Ratio: "ratio"}
	asked := record.Table{First: "asked of the store", Sides: []string{"goddp run"}}
	for _, n := range []int{1, 2, 8, 64} {
		if h.options.quick && n != 2 && n != 64 {
			continue
		}
		count := strconv.Itoa(n)
		plan := h.plan(5, 1)
		plan.Say, plan.Warmup = prefixed(plan.Say, count+" workers, "), h.pick(1, 0)
		job := func(name string, argv ...string) pair.Job {
			argv = append(argv, "--nproc-per-node", count, worker)
			return pair.Job{Side: name, Argv: argv, Cores: h.cores, Dir: h.tmp, Threads: 1}
		}
		turns, err := plan.Play(ctx, pair.Request{}, job("goddp run", goddp, "run", "--standalone"),
			job("torchrun", h.python, "-m", "torch.distributed.run", "--standalone", "--no-python"))
		if err != nil {
			return nil, err
		}
		times.Rows = append(times.Rows, record.Compare(count, record.Seconds, "seconds", turns))
		stats, err := launch.Elastic{Command: []string{worker}, Workers: n, Stdout: io.Discard, Stderr: io.Discard,
			Logger: slog.New(slog.DiscardHandler)}.RunStats(ctx)
		if err != nil {
			return nil, err
		}
		s := stats.Store
		asked.Rows = append(asked.Rows,
			record.One(count+" workers, connections", record.Count, float64(s.Accepted)),
			record.One(count+" workers, commands", record.Count, float64(s.Commands)),
			record.One(count+" workers, bytes in and out", record.Bytes, float64(s.BytesIn+s.BytesOut)))
	}
	store := record.Table{First: "store", Ratio: "ratio"}
	err = h.both(ctx, "store", setup{threads: len(h.cores)}, func(players ...pair.Player) error {
		var clients []pair.Player
		for _, p := range players {
			port := strconv.Itoa(int(p.(*pair.Side).Ready["port"][0]))
			ask := func(ctx context.Context, r pair.Request) (pair.Answer, error) {
				return askStore(ctx, net.JoinHostPort("127.0.0.1", port), 64, r.N)
			}
			clients = append(clients, pair.Func{Side: p.Name(), Do: ask})
		}
		plan := h.plan(7, 2)
		plan.Say = nil
		turns, err := plan.Play(ctx, pair.Request{N: h.pick(200, 50)}, clients...)
		if err != nil {
			return err
		}
		store.Sides = record.Names(turns)
		store.Rows = []record.Row{record.Compare("an operation, 64 clients at work", record.Seconds, "seconds", turns)}
		return nil
	})
	return []record.Table{times, asked, store}, err
}

// storeSide is a store that others use.
func storeSide(context.Context, struct{}) error {
	s, err := tcpstore.Listen("127.0.0.1:0", tcpstore.Options{})
	if err != nil {
		return err
	}
	defer s.Close()
	_, text, _ := strings.Cut(s.Addr().String(), ":")
	port, err := strconv.Atoi(text)
	if err != nil {
		return fmt.Errorf("the store's address %s: %w", s.Addr(), err)
	}
	ready := pair.Answer{"port": {float64(port)}}
	return pair.Serve(ready, func(r pair.Request) (pair.Answer, error) { return nil, pair.Unknown(r) })
}

// askStore gives the seconds of one operation among many clients' ones.
func askStore(ctx context.Context, addr string, clients, ops int) (pair.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var all []*tcpstore.Client
	for range clients {
		c, err := tcpstore.Dial(ctx, addr)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		all = append(all, c)
	}
	errs := make([]error, clients)
	var wg sync.WaitGroup
	begin := time.Now()
	for i, c := range all {
		wg.Go(func() {
			key, value := fmt.Sprint("key/", i), make([]byte, 64)
			for range ops {
				if errs[i] = c.Set(ctx, key, value); errs[i] != nil {
					return
				}
				if _, errs[i] = c.Get(ctx, key); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return pair.Answer{"seconds": {time.Since(begin).Seconds() / float64(2*clients*ops)}}, errors.Join(errs...)
}
