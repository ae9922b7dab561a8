package report

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// TensorBoard writes an event file into a folder, for `tensorboard --logdir`: every figure as a scalar over global
// steps, the settings as a text and as hyperparameters. Each run adds a file of its own. One that was resumed replaces
// the curves from the step on at which it began. What is written can be read at once, also after a crash.
func TensorBoard(dir string) Sink { return &tensorBoard{dir: dir} }

type tensorBoard struct {
	dir     string
	f       *os.File
	resumed bool // and the step at which it goes on is not known yet
	epochs  int  // still to come
}

func (t *tensorBoard) String() string { return "TensorBoard in " + t.dir }

func (t *tensorBoard) Begin(r Run) error {
	started := stamp(r.Started)
	if err := t.create(started); err != nil {
		return fmt.Errorf("report: TensorBoard: %w", err)
	}
	t.resumed, t.epochs = r.resumed(), r.Epochs-r.StartEpoch
	if err := t.write(event(started, 0).fileVersion()); err != nil {
		return err
	}
	info := message(nil)
	for _, p := range r.Hyper {
		info = info.bytes(1, hparam(printable(p.Name), printable(p.Value)))
	}
	info = info.double(5, float64(started.UnixNano())/1e9)
	return t.write(event(started, 0).summary(
		markdown("settings", r.markdown()), sessionInfo("_hparams_/session_start_info", 3, info)))
}

// create makes a file whose name sorts behind those of earlier runs, as TensorBoard reads files in that order.
func (t *tensorBoard) create(at time.Time) error {
	if err := os.MkdirAll(t.dir, 0o755); err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	for n := 0; ; n++ {
		name := fmt.Sprintf("events.out.tfevents.%010d.%s.%d.%d", at.Unix(), host, os.Getpid(), n)
		f, err := os.OpenFile(filepath.Join(t.dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		t.f = f
		return err
	}
}

func (t *tensorBoard) Step(s Step) error {
	return t.scalars(s.Time, s.GlobalStep-int64(s.steps())+1, s.GlobalStep, s.figures())
}

func (t *tensorBoard) Epoch(e Epoch) error {
	t.epochs--
	return t.scalars(e.Time, e.Step, e.Step, e.figures())
}

// scalars writes figures of the steps from first to last.
func (t *tensorBoard) scalars(at time.Time, first, last int64, list []Value) error {
	if t.f == nil {
		return fmt.Errorf("report: TensorBoard: no file is open in %s: Begin comes first", t.dir)
	}
	at = stamp(at)
	if t.resumed {
		if err := t.write(event(at, first).sessionStart()); err != nil {
			return err
		}
		t.resumed = false
	}
	values := make([]message, len(list))
	for i, v := range list {
		values[i] = scalar(v.Name, v.Value)
	}
	return t.write(event(at, last).summary(values...))
}

// write is one call to the file for each event, so that nothing waits in memory.
func (t *tensorBoard) write(m message) error {
	if err := writeRecord(t.f, m); err != nil {
		return fmt.Errorf("report: TensorBoard: %w", err)
	}
	return nil
}

func (t *tensorBoard) Close() error {
	if t.f == nil {
		return nil
	}
	const success, failure = 1, 2
	status := uint64(success)
	if t.epochs > 0 {
		status = failure
	}
	now := time.Now()
	info := message(nil).uint(1, status).double(2, float64(now.UnixNano())/1e9)
	err := t.write(event(now, 0).summary(sessionInfo("_hparams_/session_end_info", 4, info)))
	f := t.f
	t.f = nil
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("report: TensorBoard: %w", err)
	}
	return nil
}

// protobufValue is a google.protobuf.Value: TensorBoard can sort runs by a number, and filter them by a bool.
func protobufValue(s string) message {
	if v, err := strconv.ParseFloat(s, 64); err == nil {
		return message(nil).double(2, v)
	}
	switch s {
	case "true":
		return message(nil).uint(4, 1)
	case "false":
		return message(nil).uint(4, 0)
	}
	return message(nil).text(3, s)
}

// markdown is the table of settings.
func (r Run) markdown() string {
	var b strings.Builder
	b.WriteString("| setting | value |\n|---|---|\n")
	cell := strings.NewReplacer("|", "\\|", "<", "&lt;")
	for _, p := range slices.Concat(r.facts(), r.Hyper) {
		fmt.Fprintf(&b, "| %s | %s |\n", cell.Replace(printable(p.Name)), cell.Replace(printable(p.Value)))
	}
	return b.String()
}

// facts are a run's own settings, before those of the program.
func (r Run) facts() []Param {
	var list []Param
	add := func(name, value string) {
		if value != "" && value != "0" {
			list = append(list, Param{name, value})
		}
	}
	add("model", r.Model)
	add("parameters", grouped(r.Parameters))
	add("device", r.Device)
	add("backend", r.Backend)
	add("ranks", strconv.Itoa(r.World))
	add("epochs", strconv.Itoa(r.Epochs))
	add("steps an epoch", strconv.Itoa(r.StepsPerEpoch))
	add("batch size of a rank", strconv.Itoa(r.BatchSize))
	if r.BatchSize > 0 && r.World > 0 {
		add("batch size of all ranks", strconv.Itoa(r.BatchSize*r.World))
	}
	return list
}
