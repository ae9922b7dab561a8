package report

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMultiDropsASinkThatFails(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)

	good, bad := &probe{}, &probe{failAt: 2}
	m := Multi(bad, nil, good)
	require.NoError(t, m.Begin(Run{}))
	require.NoError(t, m.Step(Step{Step: 1}))
	require.NoError(t, m.Step(Step{Step: 2}))
	require.NoError(t, m.Epoch(Epoch{}))
	require.NoError(t, m.Close())
	require.NoError(t, m.Close())
	require.Equal(t, []string{"begin", "step 1", "step 2", "epoch", "close"}, good.calls)
	require.Equal(t, []string{"begin", "step 1", "close"}, bad.calls, "what it holds is released, and no more is sent")
	require.Equal(t, 1, strings.Count(log.String(), "\n"), "one line: %s", log.String())
	require.Contains(t, log.String(), "disk full")
	require.Contains(t, log.String(), "output=*report.probe")
}

func TestMultiReturnsErrorsOfClose(t *testing.T) {
	good := &probe{}
	m := Multi(&probe{failAt: 1}, good)
	require.EqualError(t, m.Close(), "*report.probe: disk full")
	require.Equal(t, []string{"close"}, good.calls)
}

func TestMultiWithASinkThatCannotBegin(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	file := t.TempDir() + "/file"
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	var out bytes.Buffer
	play(t, Multi(CSV(file+"/below/a.csv"), TensorBoard(file), HTML(file+"/report.html"), JSON(&out)))
	require.Equal(t, 1+30+3, strings.Count(out.String(), "\n"))
	require.Equal(t, 3, strings.Count(log.String(), "\n"), log.String())
	for _, part := range []string{"report: CSV: ", "report: TensorBoard: ", "report: HTML: ", file} {
		require.Contains(t, log.String(), part)
	}
}

func TestLogger(t *testing.T) {
	var log bytes.Buffer
	Logger(&log, 3, &slog.HandlerOptions{Level: slog.LevelWarn}).Info("not shown")
	Logger(&log, 3, nil).Info("saved", "path", "a.pt")
	host, err := os.Hostname()
	require.NoError(t, err)
	require.Contains(t, log.String(), "msg=saved rank=3 host="+host+" path=a.pt\n")
	require.NotContains(t, log.String(), "not shown")
}
