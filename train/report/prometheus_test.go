package report

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/stretchr/testify/require"
)

func scrape(t testing.TB, e *Exporter) string {
	t.Helper()
	answer, err := http.Get("http://" + e.Addr().String() + "/metrics")
	require.NoError(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode, string(body))
	return string(body)
}

func TestPrometheus(t *testing.T) {
	e, err := Prometheus("127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, e.Begin(sampleRun()))
	require.NoError(t, e.Step(sampleStep(0, 10, 10)))
	require.NoError(t, e.Step(sampleStep(0, 20, 10)))
	require.NoError(t, e.Epoch(sampleEpoch(0)))
	text := scrape(t, e)
	for _, line := range []string{
		`goddp_run_info{backend="nccl",device="cuda:0",model="resnet50",name="cifar10"} 1`,
		"goddp_ranks 4", "goddp_parameters 2.5557032e+07", "goddp_epoch 0", "goddp_epoch_step 20", "goddp_steps_total 20",
		"goddp_global_step 100", "goddp_epochs_total 1", "goddp_epoch_seconds 10",
		`goddp_value{name="loss",split="eval"} 1.6`, `goddp_value{name="accuracy",split="train"} 0.5`,
		`goddp_phase_seconds{phase="data"} 0.003`, `goddp_phase_seconds_total{phase="optimizer"} 0.08`,
		"goddp_step_seconds_count 2", `goddp_step_seconds_bucket{le="0.128"} 2`, "goddp_reduced_bytes_total 2.04456256e+09",
		`goddp_bucket_seconds{bucket="2"} 0.009`, `goddp_bucket_bytes{bucket="0"} 8.196e+06`,
		`goddp_rank_phase_seconds{phase="data",rank="2"} 0.014`, `goddp_rank_phase_seconds{phase="data",rank="3"} 0.002`,
	} {
		require.Contains(t, text, line+"\n")
	}
	for _, name := range []string{"goddp_learning_rate ", "goddp_samples_per_second ", `goddp_rank_busy_seconds{rank="2"}`,
		"go_goroutines ", "process_resident_memory_bytes ", "promhttp_metric_handler_errors_total"} {
		require.Contains(t, text, "\n"+name)
	}
	front, err := http.Get("http://" + e.Addr().String() + "/")
	require.NoError(t, err)
	require.NoError(t, front.Body.Close())
	require.Equal(t, http.StatusOK, front.StatusCode)

	families, err := e.registry.Gather()
	require.NoError(t, err)
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	require.NoError(t, err)
	require.Empty(t, problems, "names as Prometheus wants them")

	// After its first step DDP has other buckets.
	s := sampleStep(0, 30, 10)
	s.Buckets = s.Buckets[:1]
	require.NoError(t, e.Step(s))
	require.NotContains(t, scrape(t, e), `bucket="1"`)
	require.NoError(t, e.Close())
	_, err = http.Get("http://" + e.Addr().String() + "/metrics")
	require.Error(t, err)
	again, err := Prometheus(e.Addr().String())
	require.NoError(t, err, "the address is free again")
	require.NoError(t, again.Close())
}

func TestPrometheusAddressIsTaken(t *testing.T) {
	e, err := Prometheus("127.0.0.1:0")
	require.NoError(t, err)
	defer e.Close()
	_, err = Prometheus(e.Addr().String())
	require.ErrorContains(t, err, "cannot listen on")
	require.ErrorContains(t, err, "choose another address or port 0")
	require.ErrorContains(t, err, "address already in use")
	_, err = Prometheus("no address")
	require.ErrorContains(t, err, `cannot listen on "no address"`)
}

func TestPrometheusOfStrangeRuns(t *testing.T) {
	e, err := Prometheus("127.0.0.1:0")
	require.NoError(t, err)
	defer e.Close()
	require.NoError(t, e.Begin(Run{Name: "\xff"}))
	require.NoError(t, e.Step(oddStep(1)))
	require.NoError(t, e.Step(Step{Times: Times{Data: -5}, Bytes: -5, Ranks: []RankFigures{{Rank: -1}}}))
	text := scrape(t, e)
	require.Contains(t, text, "name=\"\uFFFD\"}")
	require.Contains(t, text, "goddp_value{name=\"two\uFFFDlines\",split=\"step\"} -1e+308")
	require.Contains(t, text, `goddp_value{name="",split="step"} NaN`)

	sink, err := Prometheus("127.0.0.1:0")
	require.NoError(t, err)
	playOdd(t, sink)
}

func TestPrometheusClosesUnderAScrape(t *testing.T) {
	e, err := Prometheus("127.0.0.1:0")
	require.NoError(t, err)
	// A client that sends half a request.
	reader, writer := io.Pipe()
	request, err := http.NewRequest("GET", "http://"+e.Addr().String()+"/metrics", reader)
	require.NoError(t, err)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if answer, err := http.DefaultTransport.RoundTrip(request); err == nil {
			answer.Body.Close()
		}
	}()
	_, err = writer.Write([]byte(strings.Repeat("x", 100)))
	require.NoError(t, err)
	require.NoError(t, e.Close())
	require.NoError(t, writer.Close())
	<-gone
	require.ErrorContains(t, e.Step(Step{}), "Server closed")
}
