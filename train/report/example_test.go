package report_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/goddp/goddp/train/report"
)

// A run tells what happens to several sinks at once. Package train does this for its programs.
func Example() {
	dir, err := os.MkdirTemp("", "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	sink := report.Multi(
		report.Auto(os.Stdout), // a progress bar on a terminal; here it is none
		report.CSV(filepath.Join(dir, "run.csv")),
		report.TensorBoard(filepath.Join(dir, "events")),
		report.HTML(filepath.Join(dir, "report.html")),
	)
	sink.Begin(report.Run{Name: "mnist", Model: "simplenet", World: 2, Epochs: 1, StepsPerEpoch: 469})
	sink.Step(report.Step{Step: 10, GlobalStep: 10, Steps: 10, Values: []report.Value{{Name: "loss", Value: 0.4211}},
		LR: 0.001, Throughput: 5120, Times: report.Times{Data: time.Millisecond, Total: 25 * time.Millisecond}})
	sink.Epoch(report.Epoch{Step: 469, Duration: 12 * time.Second, Throughput: 5000, LR: 0.001,
		Train: []report.Value{{Name: "loss", Value: 0.21}}, Eval: []report.Value{{Name: "accuracy", Value: 0.97}}})
	if err := sink.Close(); err != nil {
		fmt.Println(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, f := range files {
		fmt.Println(filepath.Base(f))
	}
	// Output:
	// mnist: simplenet, 2 ranks, 1 epoch of 469 steps
	// epoch 1/1 step 10/469 | loss 0.4211 | lr 0.001 | 5,120 samples/s | 25ms a step (data 1ms)
	// epoch 1/1 done in 12s | train loss 0.21 | eval accuracy 0.97 | lr 0.001 | 5,000 samples/s
	// events
	// report.html
	// run.csv
}

func ExampleJSON() {
	sink := report.JSON(os.Stdout)
	sink.Epoch(report.Epoch{Time: time.Unix(1_800_000_000, 0).UTC(), Epoch: 1, Step: 938, Duration: 90 * time.Second,
		Train: []report.Value{{Name: "loss", Value: 0.5}}, LR: 0.1, Throughput: 640})
	// Output:
	// {"record":"epoch","time":"2027-01-15T08:00:00Z","epoch":1,"global_step":938,"seconds":90,"train":{"loss":0.5},"eval":{},"lr":0.1,"samples_per_second":640,"note":""}
}

func ExamplePrometheus() {
	exporter, err := report.Prometheus("127.0.0.1:0") // ":9090" for a server that scrapes it
	if err != nil {
		fmt.Println(err)
		return
	}
	defer exporter.Close()
	fmt.Println(exporter.Addr().Network())
	// Output: tcp
}

// Lines of a log go above the bar.
func ExampleProgress() {
	console := report.Progress(os.Stdout, report.ProgressOptions{})
	logger := report.Logger(console, 0, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == "host" {
			return slog.Attr{} // the example's output must not change
		}
		return a
	}})
	console.Begin(report.Run{Name: "mnist", Epochs: 2, StepsPerEpoch: 469})
	logger.Info("resumed", "snapshot", "snapshot.pt")
	console.Close()
	// Output:
	// mnist: 1 rank, 2 epochs of 469 steps
	// level=INFO msg=resumed rank=0 snapshot=snapshot.pt
}

func ExampleLogger() {
	logger := report.Logger(os.Stderr, 3, nil)
	logger.Info("begins") // time=… level=INFO msg=begins rank=3 host=node-a
	// Output:
}
