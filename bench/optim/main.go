// Command optim measures an optimizer step for ResNet-50's 161 parameters, in Go and in Python by turns, on the CPU.
//
// It needs a Python with torch: $GODDP_PYTHON or what `make setup-python` installed. The machine should be idle; because
// the two sides take turns, the ratios say something on a busy one as well, above all those of processor time with
// -threads 1: threads that wait for each other burn it.
package main

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/torchddp/optim"
)

//go:embed peer.py
var script string

func main() {
	rounds := flag.Int("rounds", 7, "turns of each side")
	steps := flag.Int("steps", 5, "steps in one turn")
	threads := flag.Int("threads", runtime.NumCPU(), "threads of each side")
	only := flag.String("only", "", "run only the case of this name")
	flag.Parse()
	log.SetFlags(0)
	if err := run(*rounds, *steps, *threads, *only); err != nil {
		log.Fatal(err)
	}
}

func python() (string, error) {
	if p := os.Getenv("GODDP_PYTHON"); p != "" {
		return p, nil
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	p := filepath.Join(cache, "goddp", "python", "2.11.0", "bin", "python")
	if _, err := os.Stat(p); err != nil {
		return "", fmt.Errorf("no Python with torch: run `make setup-python`, or set GODDP_PYTHON: %w", err)
	}
	return p, nil
}

// resnet50 lists the shapes of torchvision's resnet50 parameters in order.
func resnet50() [][]int64 {
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

type benchCase struct {
	name string
	algo string
	kw   map[string]any
	make func(p []*ts.Tensor) (func() error, io.Closer, error)
}

func opt[O optim.Optimizer](o O, err error) (func() error, io.Closer, error) {
	if err != nil {
		return nil, nil, err
	}
	return o.Step, o, nil
}

type nothing struct{}

func (nothing) Close() error { return nil }

func benchCases() []benchCase {
	sgd := optim.SGDOptions{LR: 0.1, Momentum: 0.9, WeightDecay: 1e-4}
	sgdKW := map[string]any{"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
	with := func(kw map[string]any, key string) map[string]any {
		out := map[string]any{key: true}
		for k, v := range kw {
			out[k] = v
		}
		return out
	}
	goSGD := func(i optim.Implementation) func(p []*ts.Tensor) (func() error, io.Closer, error) {
		return func(p []*ts.Tensor) (func() error, io.Closer, error) {
			o := sgd
			o.Implementation = i
			return opt(optim.NewSGD(p, o))
		}
	}
	goAdam := func(i optim.Implementation) func(p []*ts.Tensor) (func() error, io.Closer, error) {
		return func(p []*ts.Tensor) (func() error, io.Closer, error) {
			return opt(optim.NewAdamW(p, optim.AdamWOptions{Implementation: i}))
		}
	}
	return []benchCase{
		{"SGD default / default", "SGD", sgdKW, goSGD(optim.Auto)},
		{"SGD fused / default", "SGD", sgdKW, goSGD(optim.Fused)},
		{"SGD fused / fused", "SGD", with(sgdKW, "fused"), goSGD(optim.Fused)},
		{"SGD default / fused", "SGD", with(sgdKW, "fused"), goSGD(optim.Auto)},
		{"SGD foreach / foreach", "SGD", with(sgdKW, "foreach"), goSGD(optim.Foreach)},
		{"AdamW default / default", "AdamW", map[string]any{}, goAdam(optim.Auto)},
		{"AdamW fused / default", "AdamW", map[string]any{}, goAdam(optim.Fused)},
		{"AdamW fused / fused", "AdamW", map[string]any{"fused": true}, goAdam(optim.Fused)},
		{"clip_grad_norm", "clip", map[string]any{}, func(p []*ts.Tensor) (func() error, io.Closer, error) {
			return func() error {
				n, err := optim.ClipGradNorm(p, 1)
				if err != nil {
					return err
				}
				return n.Drop()
			}, nothing{}, nil
		}},
	}
}

func run(rounds, steps, threads int, only string) (err error) {
	runtime.LockOSThread()
	if err := tdp.SetNumThreads(threads); err != nil {
		return err
	}
	py, err := python()
	if err != nil {
		return err
	}
	shapes := resnet50()
	arg, err := json.Marshal(shapes)
	if err != nil {
		return err
	}
	cmd := exec.Command(py, "-c", script, string(arg), strconv.Itoa(threads))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stdin.Close(), cmd.Wait()) }()
	answers := bufio.NewReader(stdout)

	fmt.Printf("%d parameters, %d threads, median of %d steps in %d turns\n", len(shapes), threads, rounds*steps, rounds)
	fmt.Printf("%-26s %10s %10s %8s %10s %10s %8s\n", "Go / Python", "Go ms", "Python ms", "ratio", "Go CPU", "Python CPU", "ratio")
	for _, c := range benchCases() {
		if only != "" && only != c.name {
			continue
		}
		if err := measure(c, shapes, rounds, steps, stdin, answers); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func measure(c benchCase, shapes [][]int64, rounds, steps int, stdin io.Writer, answers *bufio.Reader) (err error) {
	params, err := parameters(shapes)
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range params {
			p.MustDrop()
		}
	}()
	step, closer, err := c.make(params)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closer.Close()) }()
	if err := step(); err != nil {
		return err
	}
	var ours, theirs, oursCPU, theirsCPU []float64
	for range rounds {
		for range steps {
			t, cpu := time.Now(), processTime()
			if err := step(); err != nil {
				return err
			}
			ours = append(ours, time.Since(t).Seconds())
			oursCPU = append(oursCPU, processTime()-cpu)
		}
		ask, err := json.Marshal(map[string]any{"name": c.name, "algo": c.algo, "kw": c.kw, "steps": steps})
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(stdin, "%s\n", ask); err != nil {
			return err
		}
		line, err := answers.ReadBytes('\n')
		if err != nil {
			return err
		}
		var times [][2]float64
		if err := json.Unmarshal(line, &times); err != nil {
			return err
		}
		for _, x := range times {
			theirs = append(theirs, x[0])
			theirsCPU = append(theirsCPU, x[1])
		}
	}
	a, b, ac, bc := median(ours), median(theirs), median(oursCPU), median(theirsCPU)
	fmt.Printf("%-26s %10.2f %10.2f %8.2f %10.2f %10.2f %8.2f\n", c.name, a*1e3, b*1e3, a/b, ac*1e3, bc*1e3, ac/bc)
	return nil
}

// processTime is the processor time of all threads in seconds.
func processTime() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return math.NaN()
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}

// parameters makes leaf parameters with small gradients.
func parameters(shapes [][]int64) ([]*ts.Tensor, error) {
	var out []*ts.Tensor
	for _, s := range shapes {
		p, err := ts.Randn(s, gotch.Float, gotch.CPU)
		if err != nil {
			return nil, err
		}
		g, err := ts.Randn(s, gotch.Float, gotch.CPU)
		if err != nil {
			return nil, err
		}
		g.MustMulScalar_(ts.FloatScalar(1e-3))
		if err := errors.Join(tdp.SetRequiresGrad(p, true), tdp.SetGrad(p, g)); err != nil {
			return nil, err
		}
		g.MustDrop()
		out = append(out, p)
	}
	return out, nil
}

func median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}
