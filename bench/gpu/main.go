// Command gpu measures training steps on one GPU against Python's torch on the same card, eager and compiled: ResNet-50 on
// CIFAR's shapes in float32 and under bfloat16 autocast, in both memory layouts, and the steps of the small networks, whose
// time is mostly what lies around the kernels.
//
//	go run ./bench/gpu -out out                   # into out/gpu.json and out/gpu.md
//	go run ./bench/gpu -device cpu -quick         # shows without a GPU that the program works; its figures say nothing
//
// The sides take turns, as in command bench. A turn is some steps and the wait for the last one's loss. It needs a Python with
// torch and torchvision: $GODDP_PYTHON, or what `make setup-python` installed.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
)

//go:embed peer.py
var peer []byte

func main() { os.Exit(launch.Main(run)) }

type options struct {
	device, out, commit string
	quick, compile      bool
}

func run(ctx context.Context) error {
	if text := os.Getenv(sideVar); text != "" {
		return side(ctx, text)
	}
	var o options
	flags := flag.NewFlagSet("gpu", flag.ContinueOnError)
	flags.StringVar(&o.device, "device", "cuda", "cuda or cpu")
	flags.StringVar(&o.out, "out", "", "the `FOLDER` for gpu.json and gpu.md (default: none)")
	flags.StringVar(&o.commit, "commit", "", "the `COMMIT` this was built from (default: ask git)")
	flags.BoolVar(&o.quick, "quick", false, "few turns of small work")
	flags.BoolVar(&o.compile, "compile", false, "with torch.compile as a third side of ResNet-50, which takes minutes to start")
	if err := flags.Parse(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return launch.Exit(2) // the flag set has said why
	}
	if o.device != "cuda" && o.device != "cpu" || flags.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "gpu: usage: gpu [-device cuda|cpu] [-out FOLDER] [-quick] [-compile]")
		return launch.Exit(2)
	}
	if o.device == "cuda" {
		if ok, err := tdp.CUDAAvailable(); err != nil || !ok {
			return errors.Join(err, errors.New("libtorch finds no GPU: look at nvidia-smi, and build with `make setup FLAVOR=cuda`; "+
				"-device cpu shows that the program works"))
		}
	}
	return o.measure(ctx)
}

// bench is the run of all parts.
type bench struct {
	options
	self, python, script string
}

func (o options) measure(ctx context.Context) (err error) {
	b := bench{options: o}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if b.python, err = pair.Python(); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "goddp-gpu-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	b.script = filepath.Join(tmp, "peer.py")
	if err := errors.Join(os.WriteFile(b.script, peer, 0o666),
		os.WriteFile(filepath.Join(tmp, "goddpbench.py"), pair.PythonModule, 0o666)); err != nil {
		return err
	}
	s, err := b.section(ctx)
	if err != nil {
		return err
	}
	var failures []error
	for _, part := range []func(context.Context) (record.Table, error){b.resnets, b.small} {
		table, err := part(ctx)
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			failures = append(failures, err)
			fmt.Fprintln(os.Stderr, "  failed:", err)
		}
		if len(table.Rows) > 0 {
			s.Tables = append(s.Tables, table)
		}
		s.Taken.Seconds = time.Since(s.Taken.Date).Round(time.Second).Seconds()
		if err := b.save(s); err != nil { // after each part: a machine that is lent may be gone before the end
			return err
		}
	}
	fmt.Println(s.String())
	return errors.Join(failures...)
}

func (b bench) save(s record.Section) error {
	if b.out == "" {
		return nil
	}
	text, err := json.MarshalIndent(s, "", " ")
	if err != nil {
		return err
	}
	return errors.Join(os.MkdirAll(b.out, 0o777), os.WriteFile(filepath.Join(b.out, "gpu.json"), append(text, '\n'), 0o666),
		os.WriteFile(filepath.Join(b.out, "gpu.md"), []byte(s.String()), 0o666))
}

const versions = `
import json, sys, torch, torchvision
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
print(json.dumps([["GPU", gpu], ["Python", sys.version.split()[0]], ["torch", torch.__version__], ["CUDA", str(torch.version.cuda)],
                  ["cuDNN", str(torch.backends.cudnn.version())], ["torchvision", torchvision.__version__]]))`

// section describes the run.
func (b bench) section(ctx context.Context) (record.Section, error) {
	s := record.Section{Name: "gpu", Title: "On one GPU", Text: "A training step, the wait for it included. Each side has its defaults for " +
		"kernels: no TF32, no search for the fastest convolution.\n"}
	out, err := exec.CommandContext(ctx, b.python, "-c", versions).Output()
	if err != nil {
		return s, fmt.Errorf("the versions of %s: %w", b.python, err)
	}
	var list [][2]string
	if err := json.Unmarshal(out, &list); err != nil {
		return s, fmt.Errorf("the versions of %s: %w", b.python, err)
	}
	s.Taken.Versions = []record.NamedString{
		{Name: "Go", Value: strings.TrimPrefix(runtime.Version(), "go")}, {Name: "libtorch", Value: tdp.TorchVersion()}}
	for _, v := range list {
		s.Taken.Versions = append(s.Taken.Versions, record.NamedString{Name: v[0], Value: v[1]})
	}
	cores, err := pair.Cores()
	if err != nil {
		return s, err
	}
	if s.Taken.Machine, err = record.ThisMachine(cores); err != nil {
		return s, err
	}
	if s.Taken.Busy, err = record.Busy(time.Second); err != nil {
		return s, err
	}
	if s.Taken.Commit = b.commit; b.commit == "" {
		s.Taken.Commit, s.Taken.Dirty = record.Commit(".")
	}
	s.Taken.Date, s.Taken.Quick, s.Taken.Rounds = time.Now().UTC().Truncate(time.Second), b.quick, b.pick(9, 2)
	return s, nil
}

func (b bench) pick(full, quick int) int {
	if b.quick {
		return quick
	}
	return full
}

// play lets the sides take turns at a task. eager and compiled are Python's.
func (b bench) play(ctx context.Context, k task, ranks, steps int, compiled bool) ([]pair.Turns, error) {
	k.Device = b.device
	threads := runtime.GOMAXPROCS(0)
	commands := []pair.Command{{Name: "Go"}, {Name: "Python"}, {Name: "Python, compiled"}}
	if !compiled {
		commands = commands[:2]
	}
	var players []pair.Player
	var sides []*pair.Side
	kill := func() error {
		var errs []error
		for _, s := range sides {
			errs = append(errs, s.Kill())
		}
		return errors.Join(errs...)
	}
	for i, c := range commands {
		k.Compile = i == 2
		text, err := json.Marshal(k)
		if err != nil {
			return nil, err
		}
		c.Ranks, c.Threads = ranks, threads
		if c.Argv = []string{b.python, b.script, string(text)}; i == 0 {
			c.Argv, c.Env = []string{b.self}, []string{sideVar + "=" + string(text)}
		}
		s, err := pair.Start(ctx, c)
		if err != nil {
			return nil, errors.Join(err, kill())
		}
		sides, players = append(sides, s), append(players, s)
		// The weights, the batch and the arithmetic are the same: so is the first loss, but for rounding.
		if a, z := sides[0].Ready["first"][0], s.Ready["first"][0]; !(math.Abs(a-z) <= 0.02*math.Abs(z)) {
			return nil, errors.Join(fmt.Errorf("%s: the first loss is %g, %s's %g", c.Name, z, sides[0].Name(), a), kill())
		}
	}
	turns, err := pair.Plan{Rounds: b.pick(9, 2), Warmup: b.pick(2, 0)}.Play(ctx, pair.Request{Do: "step", N: steps}, players...)
	if err != nil {
		return nil, errors.Join(err, kill())
	}
	for _, s := range sides {
		err = errors.Join(err, s.Close())
	}
	return turns, err
}

func (b bench) resnets(ctx context.Context) (record.Table, error) {
	t := record.Table{Caption: "ResNet-50, 32×32", First: "a step", Ratio: "Go / Python", Sides: []string{"Go", "Python"}}
	compiled := b.compile
	if compiled {
		t.Sides = append(t.Sides, "Python, compiled")
	}
	net, batch := "resnet50", int64(128)
	if b.quick {
		net, batch = "resnet18", 4
		t.Caption = "ResNet-18, batches of 4, 32×32"
	}
	for _, c := range []struct {
		name                 string
		bf16, last, compiled bool
	}{
		{"bf16 autocast", true, false, true}, {"bf16 autocast, channels-last", true, true, true},
		{"float32", false, false, false}, {"float32, channels-last", false, true, false},
	} {
		fmt.Fprintf(os.Stderr, "%s, %s\n", net, c.name)
		turns, err := b.play(ctx, task{Net: net, Batch: batch, BF16: c.bf16, ChannelsLast: c.last}, 0, b.pick(20, 1), compiled && c.compiled)
		if err != nil {
			return t, fmt.Errorf("%s, %s: %w", net, c.name, err)
		}
		step := record.Compare(c.name, record.Seconds, "seconds", turns)
		if c.bf16 && !c.last && b.device == "cuda" && !b.quick {
			step = step.AtMost("gpu", 0.7)
		}
		rate := record.Compare(c.name+": images a second", record.PerSecond, "samples", turns)
		rate.Ratio = nil // the step's, turned round
		cpu := record.Compare(c.name+": processor time", record.Seconds, "cpu", turns)
		for _, r := range []*record.Row{&step, &rate, &cpu} {
			for len(r.Values) < len(t.Sides) {
				r.Values = append(r.Values, pair.Summary{})
			}
		}
		t.Rows = append(t.Rows, step, rate, cpu)
	}
	return t, nil
}

func (b bench) small(ctx context.Context) (record.Table, error) {
	t := record.Table{Caption: "One rank with DDP", First: "a step", Ratio: "Go / Python", Sides: []string{"Go", "Python"}}
	for _, c := range []struct {
		name, net string
		batch     int64
		bf16      bool
	}{{"toy: Linear(20, 1), batch 32", "toy", 32, false}, {"MNIST MLP, batch 64", "mlp", 64, false}, {"MNIST MLP, batch 64, bf16", "mlp", 64, true}} {
		fmt.Fprintln(os.Stderr, c.name)
		turns, err := b.play(ctx, task{Net: c.net, Batch: c.batch, BF16: c.bf16}, 1, b.pick(500, 5), false)
		if err != nil {
			return t, fmt.Errorf("%s: %w", c.name, err)
		}
		t.Rows = append(t.Rows, record.Compare(c.name, record.Seconds, "seconds", turns),
			record.Compare(c.name+": processor time", record.Seconds, "cpu", turns))
	}
	return t, nil
}
