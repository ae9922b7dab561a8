package record

import (
	"fmt"
	"strings"

	"github.com/goddp/goddp/bench/internal/pair"
)

// Wanted is a target that a page lists whether or not it has been measured.
type Wanted struct {
	Key, What string
	Bound     string // in words
	Elsewhere string // where it is measured, if not by these benchmarks
}

// Targets are the project's, in the order in which a page lists them.
var Targets = []Wanted{
	{Key: "startup", What: "start-up to first training step, 2 ranks", Bound: "0.15"},
	{Key: "toy-job", What: "toy job `50 10`, whole wall time, 2 ranks", Bound: "0.35"},
	{Key: "toy-1", What: "toy iteration, world 1", Bound: "0.5"},
	{Key: "toy-2", What: "toy iteration, world 2", Bound: "0.85"},
	{Key: "mnist", What: "MNIST MLP epoch, 2 ranks, loading included", Bound: "0.25"},
	{Key: "add", What: "one small tensor op (add of 20 floats, freed)", Bound: "1.0"},
	{Key: "resnet50", What: "ResNet-50 CIFAR step on CPU", Bound: "1.0"},
	{Key: "memory", What: "resident memory a rank after start", Bound: "0.3"},
	{Key: "gpu", What: "ResNet-50 bf16 step on one GPU, batch 128 of 32×32, against Python eager", Bound: "0.7",
		Elsewhere: "[gpu.md](gpu.md)"},
	{Key: "layer", What: "our layer's own cost an iteration beside libtorch's", Bound: "20 µs + 0.1 µs a parameter"},
}

// busy is the part of the cores in use beforehand from which on a page warns.
const busy = 0.1

const preface = `Written by "make bench" (go run ./bench). "go run ./bench -only NAME" measures one part anew and replaces
its figures only. benchmarks.json holds the same figures for programs, and [profiles.md](profiles.md) tells where the
time goes.

Go and Python run in turns on the same cores, with the same libtorch and the same number of threads. A figure is the
median of all turns, with the quartiles in parentheses. A ratio is Go's time (or memory) as a part of Python's, formed
turn by turn: under 1 Go is faster (or smaller).

`

// Page writes the record for people.
func (r *Record) Page() string {
	var b strings.Builder
	b.WriteString("# Benchmarks\n\n")
	b.WriteString(preface)
	r.targets(&b)
	for _, s := range r.Sections {
		s.page(&b)
	}
	return b.String()
}

func (r *Record) targets(b *strings.Builder) {
	b.WriteString("## Targets\n\n| what | at most | seen | |\n|---|--:|--:|---|\n")
	for _, w := range Targets {
		rows := r.with(w.Key)
		for _, row := range rows {
			t := row.Target
			seen := "−"
			if t.Unit != "" {
				seen = t.Unit.Format(t.Seen)
			} else {
				seen = digits(t.Seen)
			}
			what, bound := w.What, w.Bound
			if len(rows) > 1 {
				what, bound = w.What+", "+row.Name, t.Unit.Format(t.AtMost)
			}
			fmt.Fprintf(b, "| %s | %s | %s | %s |\n", what, bound, seen, verdict(*t))
		}
		if len(rows) == 0 {
			where := "not measured"
			if w.Elsewhere != "" {
				where = "see " + w.Elsewhere
			}
			fmt.Fprintf(b, "| %s | %s | − | %s |\n", w.What, w.Bound, where)
		}
	}
	b.WriteString("\n")
}

func verdict(t Target) string {
	if t.Met() {
		return "met"
	}
	return "**missed**"
}

// with are the rows that are held to the target.
func (r *Record) with(key string) (rows []Row) {
	for _, s := range r.Sections {
		for _, t := range s.Tables {
			for _, row := range t.Rows {
				if row.Target != nil && row.Target.Key == key {
					rows = append(rows, row)
				}
			}
		}
	}
	return rows
}

func (s Section) page(b *strings.Builder) {
	fmt.Fprintf(b, "## %s\n\n", s.Title)
	if s.Text != "" {
		fmt.Fprintf(b, "%s\n\n", strings.TrimSpace(s.Text))
	}
	for _, t := range s.Tables {
		t.page(b)
	}
	s.Taken.page(b, s.Name)
}

func (t Table) page(b *strings.Builder) {
	if t.Caption != "" {
		fmt.Fprintf(b, "%s\n\n", t.Caption)
	}
	held, noted := false, false
	for _, row := range t.Rows {
		held = held || row.Target != nil
		noted = noted || row.Note != ""
	}
	head, rule := []string{t.First}, []string{"---"}
	add := func(name, align string) { head, rule = append(head, name), append(rule, align) }
	for _, side := range t.Sides {
		add(side, "--:")
	}
	if t.Ratio != "" {
		add(t.Ratio, "--:")
	}
	if held {
		add("wanted", "---")
	}
	if noted {
		add("", "---")
	}
	line := func(cells []string) { fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | ")) }
	line(head)
	fmt.Fprintf(b, "|%s|\n", strings.Join(rule, "|"))
	for _, row := range t.Rows {
		cells := []string{row.Name}
		for i := range t.Sides {
			cell := "−"
			if i < len(row.Values) && row.Values[i].N > 0 {
				cell = spread(row.Unit.Format, row.Values[i])
			}
			cells = append(cells, cell)
		}
		if t.Ratio != "" {
			cell := "−"
			if row.Ratio != nil && row.Ratio.N > 0 {
				cell = spread(digits, *row.Ratio)
			}
			cells = append(cells, cell)
		}
		if held {
			cells = append(cells, row.wanted())
		}
		if noted {
			cells = append(cells, row.Note)
		}
		line(cells)
	}
	b.WriteString("\n")
}

func (r Row) wanted() string {
	if r.Target == nil {
		return ""
	}
	t, format := *r.Target, digits
	if t.Unit != "" {
		format = t.Unit.Format
	}
	if t.AtLeast != 0 {
		return fmt.Sprintf("at least %s: %s", format(t.AtLeast), verdict(t))
	}
	return fmt.Sprintf("at most %s: %s", format(t.AtMost), verdict(t))
}

// spread writes a median with its quartiles, unless there is but one number.
func spread(format func(float64) string, s pair.Summary) string {
	if s.N < 2 || s.Q1 == s.Q3 {
		return format(s.Median)
	}
	low, high := format(s.Q1), format(s.Q3)
	// One unit for both, where it is the same.
	if a, b, ok := strings.Cut(low, " "); ok && strings.HasSuffix(high, " "+b) {
		low = a
	}
	return fmt.Sprintf("%s (%s–%s)", format(s.Median), low, high)
}

func (t Taken) page(b *strings.Builder, name string) {
	commit := t.Commit
	if t.Dirty {
		commit += " with changes"
	}
	turns := fmt.Sprintf("%d turns", t.Rounds)
	if t.Quick {
		turns += " (`-quick`)"
	}
	m := t.Machine
	fmt.Fprintf(b, "*`-only %s`: %s, %s, commit %s; %s, cores %s, %s, %s;", name,
		t.Date.UTC().Format("2006-01-02 15:04 UTC"), turns, commit, m.CPU, cores(m.Cores), Bytes.Format(m.Memory), m.System)
	for i, v := range t.Versions {
		if i > 0 {
			b.WriteString(",")
		}
		fmt.Fprintf(b, " %s %s", v.Name, v.Value)
	}
	fmt.Fprintf(b, ". Before it, %.0f %% of the cores were in use (load %s).*\n\n", 100*t.Busy, t.Machine.Load)
	if t.Busy >= busy {
		b.WriteString("**The machine was busy: these figures say little.**\n\n")
	}
}

func cores(list []int) string {
	var s []string
	for _, c := range list {
		s = append(s, fmt.Sprint(c))
	}
	return strings.Join(s, "+")
}

// String is the section's page.
func (s Section) String() string {
	var b strings.Builder
	s.page(&b)
	return b.String()
}
