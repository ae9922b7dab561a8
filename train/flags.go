package train

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"

	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/train/report"
)

// Flags are the flags that training programs have in common. What is set before Bind are the defaults.
type Flags struct {
	Epochs, LogEvery, Accumulate, Patience int
	AMP                                    bool
	Clip                                   float64

	Snapshot      string
	SnapshotEvery int
	Resume        bool

	Progress                              string
	JSON, AllRanks, Stragglers            bool
	TensorBoard, CSV, MetricsAddr, Report string
}

// Bind makes flags of them.
func (f *Flags) Bind(flags *pflag.FlagSet) {
	or := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	or(&f.Epochs, 1)
	or(&f.LogEvery, 10)
	or(&f.Accumulate, 1)
	or(&f.SnapshotEvery, 1)
	if f.Progress == "" {
		f.Progress = "auto"
	}
	flags.IntVar(&f.Epochs, "epochs", f.Epochs, "how many epochs to train, those before a resume included")
	flags.IntVar(&f.LogEvery, "log-every", f.LogEvery, "report, and look whether to stop, every so many steps")
	flags.IntVar(&f.Accumulate, "accumulate", f.Accumulate, "batches that make one step of the optimizer")
	flags.BoolVar(&f.AMP, "amp", f.AMP, "mixed precision: float16 with a gradient scaler on a GPU, bfloat16 on the CPU")
	flags.Float64Var(&f.Clip, "clip", f.Clip, "bound of the norm of all gradients; 0 is none")
	flags.IntVar(&f.Patience, "patience", f.Patience, "stop after so many epochs without progress; 0 is never")
	flags.StringVar(&f.Snapshot, "snapshot", f.Snapshot, "folder for snapshots of the run, saved after epochs and when the job is told to stop")
	flags.IntVar(&f.SnapshotEvery, "snapshot-every", f.SnapshotEvery, "save a snapshot every so many epochs")
	flags.BoolVar(&f.Resume, "resume", f.Resume, "go on from the newest snapshot in --snapshot, if there is one")
	flags.StringVar(&f.Progress, "progress", f.Progress, "how to show progress: auto, bar, lines or off")
	flags.BoolVar(&f.JSON, "json", f.JSON, "report in JSON lines instead")
	flags.BoolVar(&f.AllRanks, "all-ranks", f.AllRanks, "every rank prints its own figures, instead of rank 0 the means")
	flags.BoolVar(&f.Stragglers, "stragglers", f.Stragglers, "report the times of every rank, to find the slow one")
	flags.StringVar(&f.TensorBoard, "tensorboard", f.TensorBoard, "folder for TensorBoard's event files")
	flags.StringVar(&f.CSV, "csv", f.CSV, "file for a table of all figures")
	flags.StringVar(&f.MetricsAddr, "metrics-addr", f.MetricsAddr, "serve figures to Prometheus at this address, such as :9090")
	flags.StringVar(&f.Report, "report", f.Report, "file for a report in HTML")
}

// Check tells what of the flags makes no sense. Call it before ranks are started.
func (f *Flags) Check() error {
	switch {
	case f.Epochs < 1:
		return fmt.Errorf("--epochs must be positive, got %d", f.Epochs)
	case f.LogEvery < 1:
		return fmt.Errorf("--log-every must be positive, got %d", f.LogEvery)
	case f.Accumulate < 1:
		return fmt.Errorf("--accumulate must be positive, got %d", f.Accumulate)
	case f.Patience < 0:
		return fmt.Errorf("--patience must not be negative, got %d", f.Patience)
	case f.SnapshotEvery < 1:
		return fmt.Errorf("--snapshot-every must be positive, got %d", f.SnapshotEvery)
	case !(f.Clip >= 0):
		return fmt.Errorf("--clip must not be negative, got %v", f.Clip)
	case f.Resume && f.Snapshot == "":
		return fmt.Errorf("--resume needs --snapshot, the folder to resume from")
	case f.JSON && f.AllRanks:
		return fmt.Errorf("--json and --all-ranks exclude each other")
	}
	switch f.Progress {
	case "auto", "bar", "lines", "off":
		return nil
	}
	return fmt.Errorf("--progress must be auto, bar, lines or off, got %q", f.Progress)
}

// Options gives the options that the flags stand for, on a rank of a group. Reports for people go to out.
func (f *Flags) Options(pg *torchddp.ProcessGroup, out io.Writer) (Options, error) {
	if err := f.Check(); err != nil {
		return Options{}, err
	}
	o := Options{
		Epochs: f.Epochs, LogEvery: f.LogEvery, Accumulate: f.Accumulate, ClipNorm: f.Clip, Stragglers: f.Stragglers,
		EarlyStop: EarlyStop{Patience: f.Patience},
		Snapshots: Snapshots{Dir: f.Snapshot, Resume: f.Resume, EveryEpochs: f.SnapshotEvery},
	}
	if f.AMP {
		o.Autocast = &amp.Options{Device: pg.Device()}
		if pg.Device().Name == "CUDA" {
			var err error
			if o.Scaler, err = amp.NewGradScaler(amp.ScalerOptions{Device: pg.Device()}); err != nil {
				return o, err
			}
		}
	}
	logs := io.Writer(os.Stderr)
	if f.AllRanks {
		o.OwnSink = report.Lines(&prefixed{out, fmt.Sprintf("[rank %d] ", pg.Rank())})
	}
	if pg.Rank() == 0 {
		console, err := f.sinks(&o, out)
		if err != nil {
			return o, err
		}
		if console != nil {
			logs = console // keeps the bar below the lines
		}
	}
	o.Logger = report.Logger(logs, pg.Rank(), nil)
	return o, nil
}

// sinks makes rank 0's.
func (f *Flags) sinks(o *Options, out io.Writer) (console *report.Console, err error) {
	var list []report.Sink
	if f.MetricsAddr != "" {
		exporter, err := report.Prometheus(f.MetricsAddr)
		if err != nil {
			return nil, fmt.Errorf("--metrics-addr: %w", err)
		}
		list = append(list, exporter)
	}
	switch {
	case f.JSON:
		list = append(list, report.JSON(out))
	case f.AllRanks || f.Progress == "off":
	case f.Progress == "lines":
		list = append(list, report.Lines(out))
	case f.Progress == "bar":
		console = report.Progress(out, report.ProgressOptions{})
	default:
		console = report.Auto(out)
	}
	if console != nil {
		list = append(list, console)
	}
	if f.TensorBoard != "" {
		list = append(list, report.TensorBoard(f.TensorBoard))
	}
	if f.CSV != "" {
		list = append(list, report.CSV(f.CSV))
	}
	if f.Report != "" {
		list = append(list, report.HTML(f.Report))
	}
	o.Sink = report.Multi(list...)
	return console, nil
}

// prefixed begins every line with the rank.
type prefixed struct {
	w      io.Writer
	prefix string
}

func (p *prefixed) Write(b []byte) (int, error) {
	var out bytes.Buffer
	for line := range bytes.Lines(b) {
		out.WriteString(p.prefix)
		out.Write(line)
	}
	if _, err := p.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(b), nil
}
