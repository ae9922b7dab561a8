// Command launch measures the launcher: how long N workers take from the start of the launcher until all have met at the store and ended, what that asks
// of the store, and how many operations a second the store does. Python's torchrun starts the same workers by turns.
//
// The workers are this binary: they meet as the ranks of a Gloo group do (each sets its address and reads those of all others) and link no libtorch, so
// what is measured is the launcher and its store. Python is $GODDP_PYTHON or what `make setup-python` installed; without it, or with -python=false, only
// the Go side runs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/launch/tcpstore"
)

const workerVar = "GODDP_BENCH_WORKER"

func main() {
	log.SetFlags(0)
	if os.Getenv(workerVar) != "" {
		if err := meet(); err != nil {
			log.Fatal(err)
		}
		return
	}
	rounds := flag.Int("rounds", 5, "turns of each side")
	sizes := flag.String("workers", "1,2,8,64", "numbers of workers")
	withPython := flag.Bool("python", true, "also Python's torchrun, which takes seconds a turn")
	clients := flag.Int("clients", 64, "clients of the store at a time")
	ops := flag.Int("ops", 200, "operations of each client")
	flag.Parse()
	if err := run(*rounds, *sizes, *withPython, *clients, *ops); err != nil {
		log.Fatal(err)
	}
}

func run(rounds int, sizes string, withPython bool, clients, ops int) error {
	python := ""
	if withPython {
		python = findPython()
	}
	fmt.Printf("%d cores, %d turns, medians\n\n", runtime.NumCPU(), rounds)
	fmt.Println("| workers | goddp run | a worker | torchrun | torchrun / goddp | store: connections | commands | a worker | KB in | KB out |")
	fmt.Println("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
	for text := range strings.SplitSeq(sizes, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || n < 1 {
			return fmt.Errorf("-workers %q: give numbers with commas between", sizes)
		}
		var ours, theirs []time.Duration
		var store tcpstore.Stats
		for range rounds {
			took, s, err := goddp(n)
			if err != nil {
				return err
			}
			ours, store = append(ours, took), s
			if python != "" {
				took, err := torchrun(python, n)
				if err != nil {
					return err
				}
				theirs = append(theirs, took)
			}
		}
		a := median(ours)
		other, ratio := "-", "-"
		if len(theirs) > 0 {
			b := median(theirs)
			other, ratio = fmt.Sprintf("%.2f s", b.Seconds()), fmt.Sprintf("%.0f", float64(b)/float64(a))
		}
		fmt.Printf("| %d | %.0f ms | %.1f ms | %s | %s | %d | %d | %.0f | %.0f | %.0f |\n", n, ms(a), ms(a)/float64(n), other, ratio, store.Accepted, store.Commands,
			float64(store.Commands)/float64(n), float64(store.BytesIn)/1e3, float64(store.BytesOut)/1e3)
	}

	fmt.Printf("\nThe store alone: %d clients, each %d times set and get of 64 bytes\n\n", clients, ops)
	fmt.Println("| server | operations a second |")
	fmt.Println("|:--|--:|")
	var ours, theirs []float64
	for range rounds {
		s, err := tcpstore.Listen("127.0.0.1:0", tcpstore.Options{})
		if err != nil {
			return err
		}
		rate, err := load(s.Addr().String(), clients, ops)
		s.Close()
		if err != nil {
			return err
		}
		ours = append(ours, rate)
		if python != "" {
			if rate, err = pythonServer(python, clients, ops); err != nil {
				return err
			}
			theirs = append(theirs, rate)
		}
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	fmt.Printf("| goddp's | %.0f |\n", ours[len(ours)/2])
	if len(theirs) > 0 {
		fmt.Printf("| libtorch's (libuv) | %.0f |\n", theirs[len(theirs)/2])
	}
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func median(all []time.Duration) time.Duration {
	all = slices.Clone(all)
	slices.Sort(all)
	return all[len(all)/2]
}

func findPython() string {
	if p := os.Getenv("GODDP_PYTHON"); p != "" {
		return p
	}
	cache, err := os.UserCacheDir()
	if err == nil {
		p := filepath.Join(cache, "goddp", "python", "2.11.0", "bin", "python")
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	log.Print("no Python with torch here (`make setup-python`, or GODDP_PYTHON): the Go side only")
	return ""
}

// goddp runs a job in this process's launcher.
func goddp(n int) (time.Duration, tcpstore.Stats, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, tcpstore.Stats{}, err
	}
	var out strings.Builder
	begin := time.Now()
	stats, err := launch.Elastic{Command: []string{self}, Workers: n, Env: []string{workerVar + "=1"}, Stdout: &out, Stderr: &out,
		Logger: slog.New(slog.DiscardHandler)}.RunStats(context.Background())
	took := time.Since(begin)
	if err != nil {
		return 0, stats.Store, fmt.Errorf("%w\n%s", err, out.String())
	}
	return took, stats.Store, nil
}

func torchrun(python string, n int) (time.Duration, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(python, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", strconv.Itoa(n), self)
	cmd.Env = append(os.Environ(), workerVar+"=1", "OMP_NUM_THREADS=1")
	begin := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("torchrun: %w\n%s", err, out)
	}
	return time.Since(begin), nil
}

// meet is what a worker does.
func meet() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	env, ok, err := launch.FromEnv()
	if err != nil || !ok {
		return errors.Join(err, errors.New("no rank's environment"))
	}
	c, err := tcpstore.Dial(ctx, net.JoinHostPort(env.MasterAddr, strconv.Itoa(env.MasterPort)))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Set(ctx, fmt.Sprint("rank/", env.Rank), make([]byte, 64)); err != nil {
		return err
	}
	for i := range env.WorldSize {
		if _, err := c.Get(ctx, fmt.Sprint("rank/", i)); err != nil {
			return err
		}
	}
	return nil
}

// load gives the operations a second of many clients.
func load(addr string, clients, ops int) (float64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var all []*tcpstore.Client
	for range clients {
		c, err := tcpstore.Dial(ctx, addr)
		if err != nil {
			return 0, err
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
	return float64(2*clients*ops) / time.Since(begin).Seconds(), errors.Join(errs...)
}

// pythonServer puts the same load on a store of libtorch's.
func pythonServer(python string, clients, ops int) (float64, error) {
	cmd := exec.Command(python, "-c", "import sys, torch.distributed as d\ns = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\nprint(s.port, flush=True)\nsys.stdin.read()")
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer func() { in.Close(); cmd.Wait() }()
	var port int
	if _, err := fmt.Fscan(out, &port); err != nil {
		return 0, fmt.Errorf("libtorch's store: %w", err)
	}
	return load(net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), clients, ops)
}
