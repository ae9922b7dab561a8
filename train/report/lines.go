package report

import (
	"fmt"
	"io"
	"strings"
)

// Lines writes one plain line for each thing that happens, for logs and for what is no terminal. Epochs and steps are
// counted from 1 there, as people count.
func Lines(w io.Writer) Sink { return &lines{w: w} }

type lines struct {
	w   io.Writer
	run Run
}

func (l *lines) String() string { return "lines" }

func (l *lines) Begin(r Run) error {
	l.run = r
	return l.say(r.line())
}

func (l *lines) Step(s Step) error { return l.say(l.run.stepLine(s)) }

func (l *lines) Epoch(e Epoch) error { return l.say(l.run.epochLine(e)) }

func (l *lines) Close() error { return nil }

func (l *lines) say(line string) error {
	_, err := io.WriteString(l.w, line+"\n")
	return err
}

func (r Run) line() string {
	name := r.Name
	if name == "" {
		name = "run"
	}
	parts := []string{printable(name) + ":"}
	add := func(format string, args ...any) { parts = append(parts, printable(fmt.Sprintf(format, args...))+",") }
	if r.Model != "" {
		add("%s", r.Model)
	}
	if r.Parameters > 0 {
		add("%s parameters", grouped(r.Parameters))
	}
	if r.Device != "" {
		add("on %s", r.Device)
	}
	add("%s", plural(max(r.World, 1), "rank"))
	if hosts := r.hosts(); hosts > 1 {
		add("%s", plural(hosts, "host"))
	}
	if r.Backend != "" {
		add("%s", r.Backend)
	}
	if r.BatchSize > 0 {
		add("batch %d a rank", r.BatchSize)
	}
	length := plural(r.Epochs, "epoch")
	if r.StepsPerEpoch > 0 {
		length += " of " + plural(r.StepsPerEpoch, "step")
	}
	add("%s", length)
	if r.resumed() {
		add("resumed at epoch %d, step %d", r.StartEpoch+1, r.StartStep+1)
	}
	return strings.TrimSuffix(strings.Join(parts, " "), ",")
}

func (r Run) resumed() bool { return r.StartEpoch > 0 || r.StartStep > 0 }

func (r Run) hosts() int {
	seen := map[string]bool{}
	for _, h := range r.Hosts {
		seen[h] = true
	}
	return len(seen)
}

func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return grouped(int64(n)) + " " + what
}

func (r Run) epochName(epoch int) string {
	if r.Epochs > 0 {
		return fmt.Sprintf("epoch %d/%d", epoch+1, r.Epochs)
	}
	return fmt.Sprintf("epoch %d", epoch+1)
}

func (r Run) stepName(step int) string {
	if r.StepsPerEpoch > 0 {
		return fmt.Sprintf("%d/%d", step, r.StepsPerEpoch)
	}
	return fmt.Sprint(step)
}

func (r Run) stepLine(s Step) string {
	fields := []string{r.epochName(s.Epoch) + " step " + r.stepName(s.Step)}
	fields = append(fields, named("", s.Values)...)
	fields = append(fields, "lr "+number(s.LR), number(s.Throughput)+" samples/s")
	var parts []string
	for _, p := range phases {
		if d := p.of(s.Times); d > 0 {
			parts = append(parts, p.name+" "+short(d))
		}
	}
	if s.Times.Total > 0 {
		step := short(s.Times.Total) + " a step"
		if len(parts) > 0 {
			step += " (" + strings.Join(parts, ", ") + ")"
		}
		fields = append(fields, step)
	}
	if len(s.Ranks) > 1 {
		rank, ratio := straggler(s.Ranks)
		fields = append(fields, fmt.Sprintf("slowest rank %d (%s)", rank, share(ratio)))
	}
	return strings.Join(fields, " | ")
}

func (r Run) epochLine(e Epoch) string {
	fields := []string{r.epochName(e.Epoch) + " done in " + short(e.Duration)}
	fields = append(fields, named("train ", e.Train)...)
	fields = append(fields, named("eval ", e.Eval)...)
	fields = append(fields, "lr "+number(e.LR), number(e.Throughput)+" samples/s")
	if e.Note != "" {
		fields = append(fields, printable(e.Note))
	}
	return strings.Join(fields, " | ")
}

func named(before string, values []Value) []string {
	var list []string
	for _, v := range values {
		list = append(list, before+printable(v.Name)+" "+number(v.Value))
	}
	return list
}
