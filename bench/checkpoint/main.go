// Command checkpoint measures saving and loading against torch.save and torch.load, on the same file (ResNet-50 and
// its SGD momentum, 195 MiB), turn by turn in one run:
//
//	go run ./bench/checkpoint
//
// It needs a Python with torch and torchvision: $GODDP_PYTHON, or what `make setup-python` installed.
package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/tdp"
)

func main() {
	rounds := flag.Int("rounds", 11, "how often each side does each thing")
	dir := flag.String("dir", "", "folder for the files (default: a temporary one)")
	peer := flag.String("peer", "bench/checkpoint/peer.py", "Python's side")
	fresh := flag.String("fresh", "", "for the program itself: measure one `save`, load or mmap of the file in -dir in a fresh process")
	flag.Parse()
	if *fresh != "" {
		if err := once(*fresh, *dir); err != nil {
			fmt.Fprintln(os.Stderr, "bench/checkpoint:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(*rounds, *dir, *peer); err != nil {
		fmt.Fprintln(os.Stderr, "bench/checkpoint:", err)
		os.Exit(1)
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
		return "", fmt.Errorf("no Python with torch: run `make setup-python` or set GODDP_PYTHON")
	}
	return p, nil
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

func run(rounds int, dir, peer string) error {
	py, err := python()
	if err != nil {
		return err
	}
	if dir == "" {
		if dir, err = os.MkdirTemp("", "goddp-bench"); err != nil {
			return err
		}
		defer os.RemoveAll(dir)
	}
	source := filepath.Join(dir, "source.pt")
	threads := runtime.GOMAXPROCS(0)
	cmd := exec.Command(py, peer, source, fmt.Sprint(threads))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	out := bufio.NewReader(pipe)
	if line, err := out.ReadString('\n'); err != nil || line != "ready\n" {
		return fmt.Errorf("python did not start: %q, %v", line, err)
	}
	ask := func(what, path string) (seconds float64, err error) {
		if _, err = fmt.Fprintln(in, what, path); err == nil {
			_, err = fmt.Fscanln(out, &seconds)
		}
		return
	}

	state, err := checkpoint.Load(source, checkpoint.LoadOptions{})
	if err != nil {
		return err
	}
	info, err := os.Stat(source)
	if err != nil {
		return err
	}
	goFile, pyFile := filepath.Join(dir, "go", "source.pt"), filepath.Join(dir, "py", "source.pt")
	for _, p := range []string{goFile, pyFile} {
		if err := os.MkdirAll(filepath.Dir(p), 0o777); err != nil {
			return err
		}
	}
	results := make(map[string][]float64)
	for round := range rounds + 1 {
		for _, turn := range []struct {
			name string
			do   func() (float64, error)
		}{
			{"save py", func() (float64, error) { return ask("save", pyFile) }},
			{"save go", func() (float64, error) {
				return timed(func() (any, error) {
					return nil, checkpoint.Save(goFile, state, checkpoint.SaveOptions{NoSync: true})
				})
			}},
			{"save go, synced to disk", func() (float64, error) {
				return timed(func() (any, error) { return nil, checkpoint.Save(goFile, state) })
			}},
			{"load py", func() (float64, error) { return freshPython(py, peer, "load", source, threads) }},
			{"load go", func() (float64, error) { return freshGo("load", dir, nil) }},
			{"mmap py", func() (float64, error) { return freshPython(py, peer, "mmap", source, threads) }},
			{"mmap go", func() (float64, error) { return freshGo("mmap", dir, nil) }},
			{"load py, again", func() (float64, error) { return ask("load", goFile) }},
			{"load go, again", func() (float64, error) {
				return timed(func() (any, error) { return checkpoint.Load(goFile, checkpoint.LoadOptions{}) })
			}},
			{"mmap py, again", func() (float64, error) { return ask("mmap", goFile) }},
			{"mmap go, again", func() (float64, error) {
				return timed(func() (any, error) { return checkpoint.Load(goFile, checkpoint.LoadOptions{Mmap: true}) })
			}},
		} {
			seconds, err := turn.do()
			if err != nil {
				return fmt.Errorf("%s: %w", turn.name, err)
			}
			if round > 0 { // the first warms the page cache up
				results[turn.name] = append(results[turn.name], seconds)
			}
		}
	}
	if err := same(goFile, pyFile); err != nil {
		return err
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		return err
	}

	fmt.Printf("%d bytes, %d rounds, %d threads; medians\n", info.Size(), rounds, threads)
	fmt.Printf("%-26s %10s %22s\n", "", "seconds", "memory beyond tensors")
	for _, name := range []string{"save py", "save go", "save go, synced to disk", "load py", "load go", "mmap py", "mmap go",
		"load py, again", "load go, again", "mmap py, again", "mmap go, again"} {
		fmt.Printf("%-26s %10.4f", name, median(results[name]))
		if what, of, _ := strings.Cut(name, " "); of == "go" {
			var memory float64
			if _, err := freshGo(what, dir, &memory); err != nil {
				return err
			}
			fmt.Printf(" %18.1f MiB", memory/(1<<20))
		}
		fmt.Println()
	}
	fmt.Println("load and mmap: once in a fresh process, as a job does; again: over and over in one process")
	ratio := func(a, b string) float64 { return median(results[a]) / median(results[b]) }
	fmt.Printf("save go / py      %.2f (at most 1)\n", ratio("save go", "save py"))
	fmt.Printf("load go / py      %.2f (at most 1)\n", ratio("load go", "load py"))
	fmt.Printf("mmap go / load py %.3f (at most 0.1)\n", ratio("mmap go", "load py"))
	fmt.Printf("again: load go / py %.2f, mmap go / load py %.3f\n", ratio("load go, again", "load py, again"), ratio("mmap go, again", "load py, again"))
	return nil
}

// timed gives the time of f, and drops the tensors that it gives back. Memory is measured in fresh processes, where
// nothing that an earlier turn freed can be used again unseen.
func timed(f func() (any, error)) (float64, error) {
	runtime.GC()
	debug.FreeOSMemory()
	start := time.Now()
	v, err := f()
	took := time.Since(start)
	release(v)
	return took.Seconds(), err
}

// freshPython measures in a Python process of its own.
func freshPython(py, peer, what, file string, threads int) (seconds float64, err error) {
	cmd := exec.Command(py, peer, "once", what, file, fmt.Sprint(threads))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err == nil {
		_, err = fmt.Sscan(string(out), &seconds)
	}
	return seconds, err
}

// freshGo measures in a process of its own: the time, and if memory is not nil the memory.
func freshGo(what, dir string, memory *float64) (seconds float64, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := exec.Command(self, "-fresh", what, "-dir", dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, err
	}
	if memory == nil {
		memory = new(float64)
	}
	_, err = fmt.Sscan(string(out), &seconds, memory)
	return seconds, err
}

// once prints the seconds that one save or load takes, and the peak of resident memory beyond what was there before
// and the tensors that were loaded. Mapped tensors do not count as such: what of them is resident is extra.
func once(what, dir string) error {
	file := filepath.Join(dir, "source.pt")
	var state any
	var err error
	// libtorch's own start, and a tiny file first.
	var tiny bytes.Buffer
	x, err := tdp.FromSlice([]float32{1, 2, 3}, []int64{3}, gotch.CPU)
	if err != nil {
		return err
	}
	if err := checkpoint.Write(&tiny, checkpoint.NewDict().Set("x", x)); err != nil {
		return err
	}
	if _, err := checkpoint.Read(bytes.NewReader(tiny.Bytes()), int64(tiny.Len()), checkpoint.LoadOptions{}); err != nil {
		return err
	}
	if what == "save" {
		if state, err = checkpoint.Load(file, checkpoint.LoadOptions{}); err != nil {
			return err
		}
		file = filepath.Join(dir, "fresh.pt")
	}
	runtime.GC()
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		return err
	}
	before, err := status("VmRSS")
	if err != nil {
		return err
	}
	start := time.Now()
	if what == "save" {
		err = checkpoint.Save(file, state)
	} else {
		state, err = checkpoint.Load(file, checkpoint.LoadOptions{Mmap: what == "mmap"})
	}
	took := time.Since(start)
	if err != nil {
		return err
	}
	peak, err := status("VmHWM")
	if err != nil {
		return err
	}
	tensors := 0.0
	if what == "load" {
		tensors = size(state, make(map[uint64]bool))
	}
	runtime.KeepAlive(state)
	_, err = fmt.Println(took.Seconds(), peak-before-tensors)
	return err
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

// same makes sure that both sides saved the same thing: the same bytes but for the serialization_id and its two CRCs.
func same(a, b string) error {
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
