// Command bench measures goddp against Python's torch: the same work on the same libtorch, the same cores and the same
// number of threads, by turns.
//
//	go run ./bench                     # all of it, into docs/benchmarks.md and docs/benchmarks.json
//	go run ./bench -only toy-job,add   # parts of it; the record's other figures stay
//	go run ./bench -quick -out /tmp/b  # fewer turns, into another folder
//	go run ./bench -list               # what there is
//
// It needs a Python with torch: $GODDP_PYTHON, or what `make setup-python` installed. Each part says what it measures
// in the record that it writes, and every figure there comes with its spread, the machine and how busy that was before.
//
// For a look at where Go's time goes, -profile DIR has the Go sides write pprof files, and -perf DIR runs them under
// Linux's perf, which sees libtorch too. Both slow the Go side down, so such figures are shown and not recorded.
//
// The programs that are compared are in this folder (the Go sides), in py (Python's) and in cpp; package
// internal/pair lets them take turns, and internal/record keeps the figures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/launch"
)

// benchmark is one part. run measures it and gives its tables; about/NAME.md says what they are.
type benchmark struct {
	name  string
	title string
	run   func(ctx context.Context, h *harness) ([]record.Table, error)
}

// benchmarks are all parts, in the order of the record.
var benchmarks = []benchmark{
	startup, toyJob, toyIteration, mnist, resnet, scaling, memory, add, layer, allReduce, loader, optimizers, checkpoints,
	launcher, builds,
}

func main() { os.Exit(launch.Main(run)) }

type options struct {
	out, only, cores, profile, perf string
	rounds                          int
	quick, list                     bool
}

func run(ctx context.Context) error {
	if name := os.Getenv(sideVar); name != "" {
		return runSide(ctx, name)
	}
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.only, "only", "", "measure the parts of these `NAMES` only, with commas between")
	flags.StringVar(&o.out, "out", "docs", "the `FOLDER` of benchmarks.md and benchmarks.json; - writes neither")
	flags.IntVar(&o.rounds, "rounds", 0, "turns of each side (default: what suits the part)")
	flags.BoolVar(&o.quick, "quick", false, "fewer turns and smaller work")
	flags.StringVar(&o.cores, "cores", "", "the `CORES` to use, as 0,1 (default: all)")
	flags.StringVar(&o.profile, "profile", "", "have the Go sides write pprof files to this `FOLDER`; implies -out -")
	flags.StringVar(&o.perf, "perf", "", "run the Go sides under perf, with its files in this `FOLDER`; implies -out -")
	flags.BoolVar(&o.list, "list", false, "list the parts and end")
	if err := flags.Parse(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return launch.Exit(2) // the flag set has said why
	}
	if o.list {
		for _, b := range benchmarks {
			fmt.Printf("%-14s %s\n", b.name, b.title)
		}
		return nil
	}
	chosen, err := o.choose()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return launch.Exit(2)
	}
	if o.profile != "" || o.perf != "" {
		o.out = "-"
	}
	return o.measure(ctx, chosen)
}

// choose gives the parts that are to be measured.
func (o options) choose() ([]benchmark, error) {
	if o.only == "" {
		return benchmarks, nil
	}
	var chosen []benchmark
	for name := range strings.SplitSeq(o.only, ",") {
		i := slices.IndexFunc(benchmarks, func(b benchmark) bool { return b.name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("there is no part %q; -list shows all", name)
		}
		chosen = append(chosen, benchmarks[i])
	}
	return chosen, nil
}

func (o options) cpus() ([]int, error) {
	allowed, err := pair.Cores()
	if err != nil || o.cores == "" {
		return allowed, err
	}
	var list []int
	for text := range strings.SplitSeq(o.cores, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || !slices.Contains(allowed, n) {
			return nil, fmt.Errorf("-cores %s: %q is not one of %v", o.cores, text, allowed)
		}
		list = append(list, n)
	}
	return list, nil
}

// measure measures the parts, one after the other, and saves the record after each. A part that fails does not keep the
// others from being measured.
func (o options) measure(ctx context.Context, chosen []benchmark) (err error) {
	cores, err := o.cpus()
	if err != nil {
		return err
	}
	h, err := newHarness(ctx, o, cores)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	var order []string
	for _, b := range benchmarks {
		order = append(order, b.name)
	}
	if o.out != "-" {
		if _, err := record.Load(o.out); err != nil { // known before the work, not after
			return err
		}
	}
	begin := time.Now()
	var failures []error
	for i, b := range chosen {
		fmt.Fprintf(os.Stderr, "[%d/%d] %s: %s\n", i+1, len(chosen), b.name, b.title)
		section, err := h.section(ctx, b)
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			fmt.Fprintf(os.Stderr, "  failed: %v\n", err)
			failures = append(failures, fmt.Errorf("%s: %w", b.name, err))
			continue
		}
		fmt.Println(section.String())
		if o.out == "-" {
			continue
		}
		// Read anew each time: another run may have measured another part meanwhile.
		r, err := record.Load(o.out)
		if err != nil {
			return err
		}
		r.Put(section, order)
		if err := r.Save(o.out); err != nil {
			return err
		}
	}
	fmt.Fprintf(os.Stderr, "%s in all\n", time.Since(begin).Round(time.Second))
	if o.out != "-" {
		fmt.Fprintf(os.Stderr, "see %s\n", filepath.Join(o.out, "benchmarks.md"))
	}
	return errors.Join(failures...)
}
