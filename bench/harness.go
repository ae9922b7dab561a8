package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/tdp"
)

// The Go sides are processes of this program: sideVar says which one, argsVar what it needs to know, as JSON.
const (
	sideVar = "GODDP_BENCH_SIDE"
	argsVar = "GODDP_BENCH_ARGS"
)

//go:embed py/*.py
var scripts embed.FS

//go:embed about/*.md
var about embed.FS

// harness is what all parts share.
type harness struct {
	options  options
	cores    []int
	self     string // this program
	root     string // the module's folder
	tmp      string
	python   string
	versions []record.NamedString
	built    map[string]string // programs by package
	images   string            // the folder of made-up MNIST and CIFAR-10 files, once they are there
	counted  int               // the turns of the part at work
}

func newHarness(ctx context.Context, o options, cores []int) (h *harness, err error) {
	h = &harness{options: o, cores: cores, built: map[string]string{}}
	if h.self, err = os.Executable(); err != nil {
		return nil, err
	}
	mod, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOMOD: %w", err)
	}
	h.root = filepath.Dir(strings.TrimSpace(string(mod)))
	if _, err := os.Stat(filepath.Join(h.root, "cmd", "multigpu")); err != nil {
		return nil, fmt.Errorf("run this in a clone of goddp: %w", err)
	}
	if h.python, err = pair.Python(); err != nil {
		return nil, err
	}
	if h.tmp, err = os.MkdirTemp("", "goddp-bench-"); err != nil {
		return nil, err
	}
	if err = errors.Join(os.CopyFS(filepath.Join(h.tmp, "scripts"), must(fs.Sub(scripts, "py"))),
		os.WriteFile(h.script("goddpbench"), pair.PythonModule, 0o666)); err == nil {
		err = h.checkVersions(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err) // an embedded file system does not fail
	}
	return v
}

func (h *harness) close() error { return os.RemoveAll(h.tmp) }

func (h *harness) script(name string) string { return filepath.Join(h.tmp, "scripts", name+".py") }

// checkVersions asks Python for its versions and makes sure that both sides run one libtorch.
func (h *harness) checkVersions(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, h.python, h.script("versions"))
	cmd.Env = append(pair.Environ(1), "GODDP_TORCH_LIB="+torchLibrary())
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			return fmt.Errorf("%s: %w\n%s", h.python, err, exit.Stderr)
		}
		return err
	}
	var v struct {
		Python, Torch, Torchvision string
		Same                       bool
	}
	if err := json.Unmarshal(out, &v); err != nil {
		return fmt.Errorf("the versions of Python: %w", err)
	}
	ours := tdp.TorchVersion()
	if theirs, _, _ := strings.Cut(v.Torch, "+"); theirs != ours {
		return fmt.Errorf("libtorch %s (Go) and torch %s (Python) cannot be compared", ours, v.Torch)
	}
	same := "the same bytes"
	if !v.Same {
		same = "another build"
	}
	h.versions = []record.NamedString{
		{Name: "Go", Value: strings.TrimPrefix(runtime.Version(), "go")}, {Name: "libtorch", Value: ours},
		{Name: "Python", Value: v.Python}, {Name: "torch", Value: v.Torch + " (libtorch_cpu.so: " + same + ")"},
		{Name: "torchvision", Value: v.Torchvision},
	}
	return nil
}

// torchLibrary is the libtorch_cpu.so that this process has loaded.
func torchLibrary() string {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(maps)) {
		if i := strings.IndexByte(line, '/'); i >= 0 && strings.HasSuffix(strings.TrimSpace(line), "/libtorch_cpu.so") {
			return strings.TrimSpace(line[i:])
		}
	}
	return ""
}

// section measures a part.
func (h *harness) section(ctx context.Context, b benchmark) (record.Section, error) {
	s := record.Section{Name: b.name, Title: b.title}
	text, err := about.ReadFile("about/" + b.name + ".md")
	if err != nil {
		return s, fmt.Errorf("what is it about: %w", err)
	}
	s.Text = string(text)
	if s.Taken.Busy, err = record.Busy(time.Second); err != nil {
		return s, err
	}
	if s.Taken.Machine, err = record.ThisMachine(h.cores); err != nil {
		return s, err
	}
	s.Taken.Commit, s.Taken.Dirty = record.Commit(h.root)
	s.Taken.Versions, s.Taken.Quick = h.versions, h.options.quick
	s.Taken.Date = time.Now().UTC().Truncate(time.Second)
	ctx, cancel := context.WithTimeoutCause(ctx, 15*time.Minute, errors.New("the part took more than 15 minutes"))
	defer cancel()
	h.counted = 0
	s.Tables, err = b.run(ctx, h)
	s.Taken.Rounds = h.counted
	s.Taken.Seconds = time.Since(s.Taken.Date).Round(time.Second).Seconds()
	return s, err
}

// plan is how often sides take turns: full times, or quick ones with -quick, or what -rounds says.
func (h *harness) plan(full, quick int) pair.Plan {
	p := pair.Plan{Rounds: h.pick(full, quick), Warmup: 1, Say: func(format string, a ...any) {
		fmt.Fprintf(os.Stderr, "  "+format+"\n", a...)
	}}
	if h.options.rounds > 0 {
		p.Rounds = h.options.rounds
	}
	h.counted = max(h.counted, p.Rounds)
	return p
}

// say tells of a row that is done.
func (h *harness) say(r record.Row) {
	a, b := r.Values[0].Median, r.Values[1].Median
	fmt.Fprintf(os.Stderr, "  %s: %s against %s\n", r.Name, r.Unit.Format(a), r.Unit.Format(b))
}

// pick gives one of two by -quick.
func (h *harness) pick(full, quick int) int {
	if h.options.quick {
		return quick
	}
	return full
}

// setup says how the processes of both sides are started.
type setup struct {
	ranks   int // 0: one process that is no rank
	threads int // 0: 1
	args    any
}

// cpus are the cores of a side: one thread in one process gets one core, the last, since interrupts mostly come to the
// first. All else shares all of them.
func (h *harness) cpus(o setup) []int {
	if o.ranks == 0 && o.threads <= 1 {
		return h.cores[len(h.cores)-1:]
	}
	return h.cores
}

// goSide is a Go side: a name that runSide knows.
func (h *harness) goSide(name string, o setup) (pair.Command, error) {
	args, err := json.Marshal(o.args)
	if err != nil {
		return pair.Command{}, err
	}
	c := pair.Command{
		Name: "Go", Argv: []string{h.self}, Env: []string{sideVar + "=" + name, argsVar + "=" + string(args)},
		Ranks: o.ranks, Threads: o.threads, Cores: h.cpus(o),
	}
	label := fmt.Sprintf("%s-%d", name, max(o.ranks, 1))
	if dir := h.options.profile; dir != "" {
		c.Env = append(c.Env, pair.ProfileVar+"="+filepath.Join(dir, label))
	}
	if dir := h.options.perf; dir != "" {
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return c, err
		}
		// One file a rank.
		const perf = `exec perf record -q -F 999 -g -o "$1-rank${RANK:-0}.perf" -- "$0"`
		c.Argv = []string{"sh", "-c", perf, h.self, filepath.Join(dir, label)}
	}
	return c, nil
}

// pySide is a script in py with the same arguments.
func (h *harness) pySide(name string, o setup) (pair.Command, error) {
	args, err := json.Marshal(o.args)
	return pair.Command{Name: "Python", Argv: []string{h.python, h.script(name), string(args)}, Ranks: o.ranks,
		Threads: o.threads, Cores: h.cpus(o)}, err
}

// both runs work with a Go side and a Python side of one name.
func (h *harness) both(ctx context.Context, name string, o setup, work func(players ...pair.Player) error) error {
	goSide, err := h.goSide(name, o)
	if err != nil {
		return err
	}
	pySide, err := h.pySide(name, o)
	if err != nil {
		return err
	}
	return h.with(ctx, []pair.Command{goSide, pySide}, work)
}

// with starts sides, runs work with them, and ends them.
func (h *harness) with(ctx context.Context, commands []pair.Command, work func(...pair.Player) error) (err error) {
	var players []pair.Player
	var sides []*pair.Side
	defer func() {
		for _, s := range sides {
			if err != nil {
				err = errors.Join(err, s.Kill()) // it may not listen any more
			} else {
				err = s.Close()
			}
		}
	}()
	for _, c := range commands {
		s, err := pair.Start(ctx, c)
		if err != nil {
			return err
		}
		sides, players = append(sides, s), append(players, s)
	}
	return work(players...)
}

// program builds a program of this module, once.
func (h *harness) program(ctx context.Context, pkg string) (string, error) {
	if p := h.built[pkg]; p != "" {
		return p, nil
	}
	p := filepath.Join(h.tmp, "bin", filepath.Base(pkg))
	cmd := exec.CommandContext(ctx, "go", "build", "-o", p, pkg)
	cmd.Dir = h.root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build %s: %w\n%s", pkg, err, out)
	}
	h.built[pkg] = p
	return p, nil
}
