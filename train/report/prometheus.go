package report

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Prometheus serves a run's figures at http://addr/metrics, from now until Close: the address ":9090" is port 9090 of
// all interfaces, "127.0.0.1:0" a free port of this machine only, which Addr tells.
//
// The metrics have the prefix goddp_. Times split by phase are counters, of which Prometheus makes means and shares
// over any time: `rate(goddp_phase_seconds_total[5m])`; the ranks' last figures are
// `goddp_rank_phase_seconds{rank="3",phase="data"}`.
func Prometheus(addr string) (*Exporter, error) {
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("report: metrics: cannot listen on %q, choose another address or port 0: %w", addr, err)
	}
	e := &Exporter{addr: listener.Addr(), registry: prometheus.NewRegistry(), served: make(chan error, 1)}
	e.register()
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(e.registry, promhttp.HandlerOpts{Registry: e.registry}))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprintln(w, `<!doctype html><title>goddp</title><a href="metrics">metrics</a>`)
	})
	e.server = &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute,
	}
	go func() { e.served <- e.server.Serve(listener) }()
	return e, nil
}

// Exporter is the sink of [Prometheus].
type Exporter struct {
	addr     net.Addr
	registry *prometheus.Registry
	server   *http.Server
	served   chan error

	info, value, phase, rankPhase, rankBusy, bucketSeconds, bucketBytes *prometheus.GaugeVec
	world, parameters, epochs, epoch, step, global, lr, throughput      prometheus.Gauge
	epochSeconds                                                        prometheus.Gauge
	steps, epochsDone, bytes                                            prometheus.Counter
	phaseTotal                                                          *prometheus.CounterVec
	stepSeconds                                                         prometheus.Histogram
}

// Addr is where it listens.
func (e *Exporter) Addr() net.Addr { return e.addr }

func (e *Exporter) String() string { return "metrics on " + e.addr.String() }

func (e *Exporter) register() {
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
		e.registry.MustRegister(g)
		return g
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
		e.registry.MustRegister(g)
		return g
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
		e.registry.MustRegister(c)
		return c
	}
	e.info = gauges("goddp_run_info", "What runs; always 1.", "name", "model", "device", "backend")
	e.world = gauge("goddp_ranks", "Ranks of the job.")
	e.parameters = gauge("goddp_parameters", "Parameters of the model.")
	e.epochs = gauge("goddp_epochs", "Epochs that the run is to have.")
	e.epoch = gauge("goddp_epoch", "The epoch that runs, counted from 0.")
	e.step = gauge("goddp_epoch_step", "Steps done in this epoch.")
	e.global = gauge("goddp_global_step", "Steps done since the first start of the run, over all resumes.")
	e.lr = gauge("goddp_learning_rate", "The learning rate.")
	e.throughput = gauge("goddp_samples_per_second", "Samples a second of the whole job.")
	e.value = gauges("goddp_value", "The last loss, accuracy and figures of the program, over all ranks: "+
		"split=step as steps are reported, train and eval of the last epoch.", "name", "split")
	e.steps = counter("goddp_steps_total", "Steps done by this process.")
	e.epochsDone = counter("goddp_epochs_total", "Epochs done by this process.")
	e.epochSeconds = gauge("goddp_epoch_seconds", "How long the last epoch took.")
	e.stepSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "goddp_step_seconds", Help: "How long steps took; each observation is the mean of one report.",
		Buckets: prometheus.ExponentialBuckets(0.001, 2, 17),
	})
	e.phaseTotal = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "goddp_phase_seconds_total", Help: "Time spent in each phase of the steps, mean of all ranks.",
	}, []string{"phase"})
	e.phase = gauges("goddp_phase_seconds", "Time of each phase of a step, mean of all ranks.", "phase")
	e.bytes = counter("goddp_reduced_bytes_total", "Bytes of gradients that one rank reduced.")
	e.bucketSeconds = gauges("goddp_bucket_seconds", "From ready to reduced, by bucket, on rank 0.", "bucket")
	e.bucketBytes = gauges("goddp_bucket_bytes", "Size by bucket, on rank 0.", "bucket")
	e.rankPhase = gauges("goddp_rank_phase_seconds", "Time of each phase of a step, by rank.", "rank", "phase")
	e.rankBusy = gauges("goddp_rank_busy_seconds",
		"Time in which a rank worked in a step and did not wait for others: the highest is the straggler.", "rank")
	e.registry.MustRegister(e.stepSeconds, e.phaseTotal,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
}

// Begin is part of [Sink].
func (e *Exporter) Begin(r Run) error {
	e.info.Reset()
	e.info.WithLabelValues(printable(r.Name), printable(r.Model), printable(r.Device), printable(r.Backend)).Set(1)
	e.world.Set(float64(r.World))
	e.parameters.Set(float64(r.Parameters))
	e.epochs.Set(float64(r.Epochs))
	e.epoch.Set(float64(r.StartEpoch))
	e.step.Set(float64(r.StartStep))
	return e.alive()
}

// Step is part of [Sink].
func (e *Exporter) Step(s Step) error {
	n := float64(s.steps())
	e.epoch.Set(float64(s.Epoch))
	e.step.Set(float64(s.Step))
	e.global.Set(float64(s.GlobalStep))
	e.lr.Set(s.LR)
	e.throughput.Set(s.Throughput)
	e.set("step", s.Values)
	e.steps.Add(n)
	e.bytes.Add(n * float64(max(s.Bytes, 0)))
	e.stepSeconds.Observe(s.Times.Total.Seconds())
	for _, p := range phases {
		d := max(p.of(s.Times), 0).Seconds() // a counter must not fall, whatever a clock said
		e.phase.WithLabelValues(p.name).Set(d)
		e.phaseTotal.WithLabelValues(p.name).Add(n * d)
	}
	if len(s.Buckets) > 0 { // their number changes once, after the first step
		e.bucketSeconds.Reset()
		e.bucketBytes.Reset()
	}
	for i, b := range s.Buckets {
		if b.Time > 0 { // measured
			e.bucketSeconds.WithLabelValues(strconv.Itoa(i)).Set(b.Time.Seconds())
		}
		e.bucketBytes.WithLabelValues(strconv.Itoa(i)).Set(float64(b.Bytes))
	}
	for _, r := range s.Ranks {
		rank := strconv.Itoa(r.Rank)
		for _, p := range phases {
			e.rankPhase.WithLabelValues(rank, p.name).Set(p.of(r.Times).Seconds())
		}
		e.rankBusy.WithLabelValues(rank).Set(r.Times.busy().Seconds())
	}
	return e.alive()
}

// Epoch is part of [Sink].
func (e *Exporter) Epoch(r Epoch) error {
	e.epochsDone.Inc()
	e.epochSeconds.Set(r.Duration.Seconds())
	e.global.Set(float64(r.Step))
	e.set("train", r.Train)
	e.set("eval", r.Eval)
	return e.alive()
}

func (e *Exporter) set(split string, list []Value) {
	for _, v := range list {
		e.value.WithLabelValues(printable(v.Name), split).Set(v.Value)
	}
}

// alive is the error with which serving ended, if it did.
func (e *Exporter) alive() error {
	select {
	case err := <-e.served:
		e.served <- err
		return fmt.Errorf("report: %s: %w", e, err)
	default:
		return nil
	}
}

// Close ends serving. A scrape that is under way has a second to end.
func (e *Exporter) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := e.server.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = e.server.Close()
	}
	served := <-e.served
	e.served <- served
	if !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	if err != nil {
		return fmt.Errorf("report: %s: %w", e, err)
	}
	return nil
}
