package report

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func sampleRun() Run {
	return Run{
		Name: "cifar10", Model: "resnet50", Device: "cuda:0", Backend: "nccl", World: 4,
		Hosts: []string{"node-a", "node-a", "node-b", "node-b"}, Epochs: 3, StepsPerEpoch: 100, BatchSize: 128,
		Parameters: 25557032, Started: start,
		Hyper: []Param{{"lr", "0.1"}, {"amp", "true"}, {"schedule", "cosine | warm-up <5>"}},
	}
}

// sampleStep is what a run might report: the loss falls, rank 2 reads its data slowly.
func sampleStep(epoch, step, every int) Step {
	n := epoch*100 + step
	wave := math.Sin(float64(n) * 1.7)
	s := Step{
		Time: start.Add(time.Duration(n) * 100 * time.Millisecond), Epoch: epoch, Step: step, GlobalStep: int64(n),
		Steps: every,
		Values: []Value{{"loss", 2.3*math.Exp(-float64(n)/120) + 0.08*wave},
			{"accuracy", 1 - 0.9*math.Exp(-float64(n)/150)}},
		LR: 0.1 * (1 + math.Cos(math.Pi*float64(n)/300)) / 2, Throughput: 5100 + 90*wave, Bytes: 102_228_128,
		Times: times(3, wave),
		Buckets: []Bucket{{8_196_000, 3 * time.Millisecond}, {26_300_000, 5 * time.Millisecond},
			{67_732_128, 9 * time.Millisecond}},
	}
	for rank := range 4 {
		data := 2.0
		if rank == 2 {
			data = 14
		}
		s.Ranks = append(s.Ranks, RankFigures{rank, times(data, wave)})
	}
	return s
}

func times(data, wave float64) Times {
	ms := func(v float64) time.Duration { return time.Duration(v * float64(time.Millisecond)) }
	t := Times{Data: ms(data), Forward: ms(28 + wave), Backward: ms(55), Communication: ms(20 - data), Optimizer: ms(4)}
	t.Total = t.Data + t.Forward + t.Backward + t.Communication + t.Optimizer
	return t
}

func sampleEpoch(epoch int) Epoch {
	e := Epoch{
		Time: start.Add(time.Duration(epoch+1) * 10 * time.Second), Epoch: epoch, Step: int64(epoch+1) * 100,
		Duration:   10 * time.Second,
		Train:      []Value{{"loss", 1.5 - 0.4*float64(epoch)}, {"accuracy", 0.5 + 0.1*float64(epoch)}},
		Throughput: 5000, LR: 0.05,
	}
	if epoch != 1 { // not every epoch is evaluated
		e.Eval = []Value{{"loss", 1.6 - 0.35*float64(epoch)}, {"accuracy", 0.48 + 0.1*float64(epoch)}}
		e.Note = "saved as snapshot.pt"
	}
	return e
}

// play feeds a whole run to a sink, a record every 10 steps.
func play(t testing.TB, sink Sink) {
	t.Helper()
	require.NoError(t, sink.Begin(sampleRun()))
	for epoch := range 3 {
		for step := 10; step <= 100; step += 10 {
			require.NoError(t, sink.Step(sampleStep(epoch, step, 10)))
		}
		require.NoError(t, sink.Epoch(sampleEpoch(epoch)))
	}
	require.NoError(t, sink.Close())
}

// odd are names that must not break anything.
var odd = []string{"", "a,b", `a"b`, "<script>alert(1)</script>", "two\nlines", "\x1b[2Jred", "größe/µ",
	"\xff\xfe", "=1+1", "|", "{{.}}"}

func oddStep(step int) Step {
	s := Step{Step: step, GlobalStep: int64(step), LR: math.Inf(1), Throughput: math.NaN()}
	for i, name := range odd {
		s.Values = append(s.Values, Value{name, []float64{math.NaN(), math.Inf(1), math.Inf(-1), 1e308, -1e308}[i%5]})
	}
	return s
}

// playOdd is a run in which everything is strange: no lengths, names and numbers that are none, times that run back.
func playOdd(t testing.TB, sink Sink) {
	t.Helper()
	run := Run{Name: odd[3] + odd[4] + odd[5], Model: odd[7], Hosts: odd}
	for _, name := range odd {
		run.Hyper = append(run.Hyper, Param{name, name})
	}
	require.NoError(t, sink.Begin(run))
	require.NoError(t, sink.Step(Step{}))
	require.NoError(t, sink.Step(oddStep(1)))
	back := Times{Data: -time.Second, Forward: -1, Total: -time.Hour}
	require.NoError(t, sink.Step(Step{Times: back, Bytes: -5, Buckets: []Bucket{{-1, -1}, {}},
		Ranks: []RankFigures{{-1, back}, {7, Times{}}}}))
	require.NoError(t, sink.Epoch(Epoch{Train: oddStep(1).Values, Eval: oddStep(1).Values, Note: odd[5]}))
	require.NoError(t, sink.Epoch(Epoch{}))
	require.NoError(t, sink.Close())
	require.NoError(t, sink.Close(), "closing again does nothing")
}

// probe records calls, and fails the nth.
type probe struct {
	calls  []string
	failAt int
}

func (p *probe) call(name string) error {
	p.calls = append(p.calls, name)
	if len(p.calls) == p.failAt {
		return errors.New("disk full")
	}
	return nil
}

func (p *probe) Begin(Run) error   { return p.call("begin") }
func (p *probe) Step(s Step) error { return p.call(fmt.Sprint("step ", s.Step)) }
func (p *probe) Epoch(Epoch) error { return p.call("epoch") }
func (p *probe) Close() error      { return p.call("close") }
