package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/goddp/goddp/internal/libtorch"
	"github.com/goddp/goddp/launch"
	"github.com/spf13/pflag"
)

var doctorCommand = &command{
	name:    "doctor",
	group:   groupSetup,
	summary: "Say what this machine has for training, test it with two ranks, and say what to change",
	help: `Looks at cores, memory, limits and the network, GPUs and their driver, and libtorch, and runs a self-test of two ranks with each backend that can work
here: Gloo, and NCCL where there are GPUs. Nothing is changed. The exit status is 1 if the self-test fails or something needed is missing.`,
	flags: func(f *pflag.FlagSet) func(context.Context, []string, stdio) error {
		o := addSetupFlags(f)
		noTest := f.Bool("no-selftest", false, "look only, start no ranks")
		asJSON := f.Bool("json", false, "print the findings as JSON")
		limit := f.Duration("timeout", time.Minute, "for each backend's self-test")
		return func(ctx context.Context, args []string, std stdio) error {
			if len(args) > 0 {
				return usagef("unexpected argument %q", args[0])
			}
			cfg, err := o.config(std)
			if err != nil {
				return err
			}
			cfg.Out = nil
			r := &report{}
			m := thisMachine()
			gpus := launch.GPUs()
			m.examine(r)
			examineGPUs(r, gpus)
			in, found := examineLibtorch(ctx, r, cfg)
			m.examineNetwork(r)
			switch {
			case *noTest:
				r.add("Self-test", "ranks", note, "not run (--no-selftest)", "")
			case found != nil:
				r.add("Self-test", "ranks", bad, "not run: libtorch is not set up", "")
			default:
				selftest(ctx, r, in, o.dir, gpus, *limit)
			}
			if *asJSON {
				enc := json.NewEncoder(std.out)
				enc.SetIndent("", "  ")
				if err := enc.Encode(r.Findings); err != nil {
					return err
				}
			} else {
				r.print(std.out)
			}
			if r.worst() == bad {
				return statusError(exitError)
			}
			return nil
		}
	},
}

// level says how a finding is.
type level string

const (
	good level = "ok"
	note level = "note" // neither good nor bad
	warn level = "warn" // works, or may not
	bad  level = "fail"
)

// finding is one thing that was looked at.
type finding struct {
	Section string `json:"section"`
	Name    string `json:"name"`
	Level   level  `json:"level"`
	Value   string `json:"value"`
	Advice  string `json:"advice,omitempty"`
}

type report struct{ Findings []finding }

func (r *report) add(section, name string, l level, value, advice string) {
	r.Findings = append(r.Findings, finding{section, name, l, value, advice})
}

func (r *report) worst() level {
	worst := good
	for _, f := range r.Findings {
		switch {
		case f.Level == bad:
			return bad
		case f.Level == warn:
			worst = warn
		}
	}
	return worst
}

// symptoms are the failures that training guides warn of, and what helps.
var symptoms = []struct{ name, text string }{
	{"A job hangs", "Some rank does not take part in a collective: code under `if rank == 0` that communicates, a rank with fewer batches (use Join, or a sampler that gives all the same number), " +
		"or one that died. TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls of all ranks and names the one that differs; a timeout in InitOptions turns the hang into an error that names the missing ranks."},
	{"NCCL fails in Docker", "Run with --gpus all --shm-size=1g (or --ipc=host) --ulimit memlock=-1, on several nodes --network=host. NCCL_DEBUG=INFO says what it tries; " +
		"NCCL_SOCKET_IFNAME=eth0 names the interface when it takes the wrong one; NCCL_P2P_DISABLE=1 helps where GPUs cannot reach each other (some virtual machines); one GPU serves one rank."},
	{"Unused parameters", "\"Expected to have finished reduction\": parameters took no part in the loss. The error names them. Remove them, use their output in the loss, or set DDPOptions.FindUnusedParameters; " +
		"a model whose graph never changes is quicker with StaticGraph."},
	{"The port is taken", "Another job, or the rest of one: use --standalone (a free port), or give each job its own --master-port. `ss -ltnp` shows who has it."},
	{"All is slow", "OMP_NUM_THREADS times the ranks should not be more than the cores. Without it each rank takes all cores when it is not started by a launcher."},
}

func (r *report) print(w io.Writer) {
	marks := map[level]string{good: "ok  ", note: "    ", warn: "WARN", bad: "FAIL"}
	section := ""
	for _, f := range r.Findings {
		if f.Section != section {
			section = f.Section
			fmt.Fprintf(w, "\n%s\n", section)
		}
		lines := wrap(f.Value, 100)
		fmt.Fprintf(w, "  %s %-14s %s\n", marks[f.Level], f.Name, lines[0])
		for _, line := range lines[1:] {
			fmt.Fprintf(w, "  %19s %s\n", "", line)
		}
	}
	n := 0
	for _, f := range r.Findings {
		if f.Advice == "" {
			continue
		}
		if n++; n == 1 {
			fmt.Fprintln(w, "\nWhat to change")
		}
		for i, line := range wrap(f.Advice, 100) {
			if i == 0 {
				line = fmt.Sprintf("%2d. %s: %s", n, f.Name, line)
			} else {
				line = "    " + line
			}
			fmt.Fprintln(w, "  "+line)
		}
	}
	fmt.Fprintln(w, "\nWhen a job goes wrong")
	for _, s := range symptoms {
		for i, line := range wrap(s.name+": "+s.text, 112) {
			if i > 0 {
				line = "  " + line
			}
			fmt.Fprintln(w, "  "+line)
		}
	}
}

func examineGPUs(r *report, inv launch.Inventory) {
	const s = "GPUs"
	if inv.Count() == 0 {
		l, advice := note, ""
		if len(inv.All) > 0 {
			l, advice = warn, "look at CUDA_VISIBLE_DEVICES and at MIG mode (nvidia-smi -L)"
		}
		r.add(s, "devices", l, "none: "+inv.Reason+" (ranks use the CPU and Gloo)", advice)
	}
	for i, g := range inv.Devices {
		r.add(s, fmt.Sprintf("cuda:%d", i), good, fmt.Sprintf("%s, %.0f GiB, compute %s, %s, %s", g.Name, float64(g.Memory)/(1<<30), g.Compute, g.PCIBus, g.UUID), "")
	}
	if inv.Driver != "" {
		l, advice := good, ""
		if older(inv.Driver, minDriver) {
			l, advice = bad, fmt.Sprintf("libtorch %s is built for CUDA 13, which needs driver %d or newer", libtorch.Version, minDriver)
		}
		r.add(s, "driver", l, inv.Driver, advice)
	}
	for _, n := range inv.Notes {
		r.add(s, "note", warn, n, "")
	}
}

// minDriver is the oldest driver that CUDA 13 runs on.
const minDriver = 580

func older(version string, major int) bool {
	var v int
	_, err := fmt.Sscanf(version, "%d", &v)
	return err == nil && v < major
}

func examineLibtorch(ctx context.Context, r *report, cfg libtorch.Config) (*libtorch.Installation, error) {
	const s = "libtorch"
	in, err := libtorch.Find(ctx, cfg)
	if err != nil {
		advice := ""
		if !errors.Is(err, libtorch.ErrNotSetUp) {
			advice = "run `goddp setup`"
		}
		r.add(s, "set-up", bad, err.Error(), advice)
		return nil, err
	}
	r.add(s, "version", good, fmt.Sprintf("%s, flavour %s (%s), in %s", in.Tree.Version, in.Flavor, in.Why, in.Tree.Torch), "")
	if in.Flavor == libtorch.CUDA {
		v, file := ncclVersion(in.Tree)
		switch {
		case v != "":
			r.add(s, "NCCL", good, v+", "+file, "")
		default:
			r.add(s, "NCCL", warn, "no nccl.h found beside libtorch", "")
		}
	}
	return in, nil
}

// ncclVersion reads the version out of NCCL's header.
func ncclVersion(t libtorch.Tree) (version, file string) {
	for _, dir := range append(t.Includes, filepath.Join(filepath.Dir(t.Torch), "nvidia", "nccl", "include")) {
		file := filepath.Join(dir, "nccl.h")
		data, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		var v [3]int
		for i, name := range []string{"NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"} {
			if _, after, ok := bytes.Cut(data, []byte("#define "+name+" ")); ok {
				fmt.Sscanf(string(after), "%d", &v[i])
			}
		}
		return fmt.Sprintf("%d.%d.%d", v[0], v[1], v[2]), file
	}
	return "", ""
}

const selftestPackage = modulePath + "/cmd/goddp-selftest"

// selftest builds one rank's program in the module of the folder and runs it with each backend.
func selftest(ctx context.Context, r *report, in *libtorch.Installation, dir string, gpus launch.Inventory, limit time.Duration) {
	const s = "Self-test"
	program, remove, err := buildSelftest(ctx, in, dir)
	if err != nil {
		advice := ""
		if errors.Is(err, libtorch.ErrNoModule) {
			advice = "run it in a Go module that uses " + modulePath + ", or in a clone of it"
		}
		r.add(s, "ranks", warn, "not run: "+err.Error(), advice)
		return
	}
	defer remove()
	runBackend(ctx, r, program, "gloo", 2, limit)
	switch n := gpus.Count(); {
	case in.Flavor != libtorch.CUDA && n > 0:
		r.add(s, "nccl", warn, "not run: libtorch's CPU flavour is set up, and there are GPUs", "run `goddp setup --flavor cuda`")
	case in.Flavor != libtorch.CUDA:
	case n == 0:
		r.add(s, "nccl", note, "not run: no GPU", "")
	case n == 1:
		r.add(s, "nccl", note, "with one rank: NCCL wants a GPU for each, and there is one", "")
		runBackend(ctx, r, program, "nccl", 1, limit)
	default:
		runBackend(ctx, r, program, "nccl", 2, limit)
	}
}

func buildSelftest(ctx context.Context, in *libtorch.Installation, dir string) (program string, remove func(), err error) {
	module, err := libtorch.FindModule(dir)
	if err != nil {
		return "", nil, err
	}
	env := os.Environ()
	if out, err := goIn(ctx, module, env, "env", "GOWORK"); err == nil && (strings.TrimSpace(out) == "" || strings.TrimSpace(out) == "off") {
		vars, err := in.Environment(ctx, module)
		if err != nil {
			return "", nil, err
		}
		for _, v := range vars {
			env = append(env, v.Name+"="+v.Value)
		}
	}
	tmp, err := os.MkdirTemp("", "goddp-doctor-*")
	if err != nil {
		return "", nil, err
	}
	program = filepath.Join(tmp, "selftest")
	if out, err := goIn(ctx, module, env, "build", "-o", program, selftestPackage); err != nil {
		os.RemoveAll(tmp)
		return "", nil, fmt.Errorf("go build %s in %s: %w\n%s", selftestPackage, module, err, strings.TrimSpace(out))
	}
	return program, func() { os.RemoveAll(tmp) }, nil
}

func goIn(ctx context.Context, dir string, env []string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Env = dir, env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func runBackend(ctx context.Context, r *report, program, backend string, ranks int, limit time.Duration) {
	const s = "Self-test"
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var out bytes.Buffer
	begin := time.Now()
	err := launch.Elastic{Command: []string{program, "--backend", backend}, Workers: ranks, Prefix: launch.PrefixOff, Stdout: &out, Stderr: &out,
		StopGrace: time.Second, Logger: slog.New(slog.DiscardHandler)}.Run(ctx)
	took := time.Since(begin)
	var res struct {
		Ranks     int
		StartMS   float64 `json:"start_ms"`
		LatencyUS float64 `json:"latency_us"`
		Bytes     int
		GBPerS    float64 `json:"gb_per_s"`
		BusGBPerS float64 `json:"bus_gb_per_s"`
	}
	if err == nil {
		_, line, ok := strings.Cut(out.String(), "goddp-selftest ")
		if err = json.NewDecoder(strings.NewReader(line)).Decode(&res); !ok || err != nil {
			err = fmt.Errorf("it printed no result: %s", out.String())
		}
	}
	if err != nil {
		why := err.Error()
		if ctx.Err() != nil {
			why = fmt.Sprintf("no end within %v (%v)", limit, why)
		}
		advice := "GLOO_SOCKET_IFNAME=lo (on one machine) or the interface that other nodes reach; see \"A job hangs\" below"
		if backend == "nccl" {
			advice = "NCCL_DEBUG=INFO goddp doctor; see \"NCCL fails in Docker\" below"
		}
		r.add(s, backend, bad, why, advice)
		return
	}
	r.add(s, backend, good, fmt.Sprintf("%d ranks: meet in %.0f ms; all-reduce of 4 bytes %.0f µs, of %d MiB %.2f GB/s (bus %.2f GB/s); all in %.1f s",
		res.Ranks, res.StartMS, res.LatencyUS, res.Bytes>>20, res.GBPerS, res.BusGBPerS, took.Seconds()), "")
}
