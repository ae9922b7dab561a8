package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"
)

func TestLines(t *testing.T) {
	var out bytes.Buffer
	play(t, Lines(&out))
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	require.Len(t, lines, 1+30+3)
	require.Equal(t, "cifar10: resnet50, 25,557,032 parameters, on cuda:0, 4 ranks, 2 hosts, nccl, batch 128 a rank, "+
		"3 epochs of 100 steps", lines[0])
	require.Equal(t, "epoch 1/3 step 10/100 | loss 2.039 | accuracy 0.158 | lr 0.09973 | 5,013 samples/s | 106ms a step "+
		"(data 3ms, forward 27.04ms, backward 55ms, communication 17ms, optimizer 4ms) | slowest rank 2 (+14 %)",
		lines[1])
	require.Equal(t, "epoch 1/3 done in 10s | train loss 1.5 | train accuracy 0.5 | eval loss 1.6 | "+
		"eval accuracy 0.48 | lr 0.05 | 5,000 samples/s | saved as snapshot.pt", lines[11])
}

func TestLinesOfAResumedStream(t *testing.T) {
	var out bytes.Buffer
	l := Lines(&out)
	require.NoError(t, l.Begin(Run{World: 1, Epochs: 5, StartEpoch: 2, StartStep: 7}))
	require.NoError(t, l.Step(Step{Epoch: 2, Step: 8, LR: 1e-5}))
	require.Equal(t, "run: 1 rank, 5 epochs, resumed at epoch 3, step 8\n"+
		"epoch 3/5 step 8 | lr 1e-5 | 0 samples/s\n", out.String())
}

func TestNothingOddReachesALine(t *testing.T) {
	for name, sink := range map[string]func(w *bytes.Buffer) Sink{
		"lines":       func(w *bytes.Buffer) Sink { return Lines(w) },
		"JSON":        func(w *bytes.Buffer) Sink { return JSON(w) },
		"no terminal": func(w *bytes.Buffer) Sink { return Auto(w) },
		"progress":    func(w *bytes.Buffer) Sink { return Progress(w, ProgressOptions{}) },
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			playOdd(t, sink(&out))
			require.Equal(t, 6, strings.Count(out.String(), "\n"), out.String())
			for _, r := range out.String() {
				require.False(t, unicode.IsControl(r) && r != '\n', "%q", r)
			}
		})
	}
}

func TestJSON(t *testing.T) {
	var out bytes.Buffer
	sink := JSON(&out)
	play(t, sink)
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	require.Len(t, lines, 1+30+3)
	require.JSONEq(t, `{"record":"run","time":"2026-03-01T12:00:00Z","name":"cifar10","model":"resnet50",
		"device":"cuda:0","backend":"nccl","world":4,"hosts":["node-a","node-a","node-b","node-b"],"epochs":3,
		"steps_per_epoch":100,"start_epoch":0,"start_step":0,"batch_size":128,"parameters":25557032,
		"hyper":{"lr":"0.1","amp":"true","schedule":"cosine | warm-up <5>"}}`, lines[0])
	require.True(t, strings.HasPrefix(lines[1], `{"record":"step","time":"2026-03-01T12:00:01Z","epoch":0,"step":10,`+
		`"global_step":10,"steps":10,"values":{"loss":`), "members keep their order: %s", lines[1])
	var step struct {
		Values  map[string]float64
		Seconds map[string]float64
		Buckets []struct{ Bytes int64 }
		Ranks   []struct {
			Rank    int
			Seconds map[string]float64
		}
	}
	require.NoError(t, json.Unmarshal([]byte(lines[1]), &step))
	want := sampleStep(0, 10, 10)
	require.Equal(t, want.Values[0].Value, step.Values["loss"], "no digit is lost")
	require.InDelta(t, 0.003, step.Seconds["data"], 1e-12)
	require.InDelta(t, want.Times.Total.Seconds(), step.Seconds["step"], 1e-12)
	require.Len(t, step.Buckets, 3)
	require.Equal(t, 2, step.Ranks[2].Rank)
	require.InDelta(t, 0.014, step.Ranks[2].Seconds["data"], 1e-12)
	require.Contains(t, lines[11], `"eval":{"loss":1.6,"accuracy":0.48}`)
	require.Contains(t, lines[22], `"eval":{}`)
}

func TestJSONHasNoNaN(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, JSON(&out).Step(Step{LR: math.NaN(), Throughput: math.Inf(-1),
		Values: []Value{{"loss", math.Inf(1)}}}))
	require.True(t, json.Valid(out.Bytes()))
	require.Contains(t, out.String(), `"values":{"loss":"Infinity"},"lr":"NaN","samples_per_second":"-Infinity"`)
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestAWriterThatFailsIsAnError(t *testing.T) {
	for _, sink := range []Sink{Lines(full{}), JSON(full{}), Auto(full{}), Progress(full{}, ProgressOptions{Width: 80})} {
		require.ErrorContains(t, sink.Begin(sampleRun()), "no space left", "%T", sink)
		require.ErrorContains(t, sink.Step(sampleStep(0, 10, 10)), "no space left", "%T", sink)
	}
}

func TestNumbers(t *testing.T) {
	for want, v := range map[string]float64{
		"0": 0, "0.1": 0.1, "0.09973": 0.099726, "1e-5": 1e-5, "-1.235e-7": -1.2346e-7, "999.9": 999.94, "1,235": 1234.6,
		"-25,557,032": -25557032, "1.5e12": 1.5e12, "NaN": math.NaN(), "+Inf": math.Inf(1),
	} {
		require.Equal(t, want, number(v))
	}
	for want, d := range map[string]time.Duration{
		"0s": 0, "1.23µs": 1234, "12.35ms": 12345678, "123ms": 123456789, "1.23s": 1234567890, "1h2m3s": 3723456789012,
	} {
		require.Equal(t, want, short(d))
	}
	for want, n := range map[string]int64{"0 B": 0, "999 B": 999, "1 kB": 1000, "102 MB": 102_228_128, "5e+03 TB": 5e15} {
		require.Equal(t, want, amount(n))
	}
	for want, d := range map[string]time.Duration{"0s": 0, "59s": 59 * time.Second, "2m05s": 125 * time.Second,
		"26h03m": 26*time.Hour + 3*time.Minute, "?": -1} {
		require.Equal(t, want, clock(d))
	}
}

func TestStraggler(t *testing.T) {
	rank, ratio := straggler(sampleStep(0, 10, 10).Ranks)
	require.Equal(t, 2, rank)
	require.InDelta(t, 101.0/89, ratio, 0.01)
	rank, ratio = straggler([]RankFigures{{Rank: 5}})
	require.Equal(t, 5, rank)
	require.Equal(t, 1.0, ratio, "no times, nobody is slow")
	_, ratio = straggler(nil)
	require.Equal(t, 1.0, ratio)
}
