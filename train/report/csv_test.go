package report

import (
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func readTable(t testing.TB, path string) (header []string, rows []map[string]string) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	all, err := csv.NewReader(f).ReadAll() // refuses lines of another length
	require.NoError(t, err)
	for _, line := range all[1:] {
		row := map[string]string{}
		for i, name := range all[0] {
			row[name] = line[i]
		}
		rows = append(rows, row)
	}
	return all[0], rows
}

func TestCSV(t *testing.T) {
	path := filepath.Join(t.TempDir(), "below", "run.csv")
	play(t, CSV(path))
	header, rows := readTable(t, path)
	require.Equal(t, []string{"record", "time", "epoch", "step", "global_step", "step/loss", "step/accuracy",
		"learning_rate", "samples_per_second", "seconds/data", "seconds/forward", "seconds/backward",
		"seconds/communication", "seconds/optimizer", "seconds/step", "bytes_reduced", "buckets/count",
		"buckets/seconds", "ranks/slowest", "ranks/slowest_over_median", "train/loss", "train/accuracy", "eval/loss",
		"eval/accuracy", "epoch/seconds", "epoch/samples_per_second", "epoch/learning_rate"}, header)
	require.Len(t, rows, 33)
	want := sampleStep(0, 20, 10)
	got, err := strconv.ParseFloat(rows[1]["step/loss"], 64)
	require.NoError(t, err)
	require.Equal(t, want.Values[0].Value, got)
	require.Equal(t, "2026-03-01T12:00:02Z", rows[1]["time"])
	require.Equal(t, "2", rows[1]["ranks/slowest"])
	require.Equal(t, []string{"epoch", "", "100", "1.6", ""}, []string{rows[10]["record"], rows[10]["step"],
		rows[10]["global_step"], rows[10]["eval/loss"], rows[10]["step/loss"]})
	require.Equal(t, "", rows[21]["eval/loss"], "that epoch had no evaluation")
}

func TestCSVGetsAColumnLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.csv")
	sink := CSV(path)
	require.NoError(t, sink.Begin(Run{}))
	require.NoError(t, sink.Step(Step{Step: 1, Values: []Value{{"loss", 1}}}))
	before, _ := readTable(t, path)
	require.NoError(t, sink.Step(Step{Step: 2, Values: []Value{{"loss", 2}, {"f1", 3}, {"f1", 4}}}))
	require.NoError(t, sink.Step(Step{Step: 3, Values: []Value{{"loss", 5}}}))
	header, rows := readTable(t, path)
	require.Equal(t, append(slices.Clone(before), "step/f1"), header, "columns stay where they were")
	require.Equal(t, []string{"", "4", ""}, []string{rows[0]["step/f1"], rows[1]["step/f1"], rows[2]["step/f1"]})
	require.Equal(t, []string{"1", "2", "5"}, []string{rows[0]["step/loss"], rows[1]["step/loss"], rows[2]["step/loss"]})
	require.NoError(t, sink.Close())
}

func TestCSVIsContinued(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.csv")
	first := CSV(path)
	require.NoError(t, first.Begin(Run{}))
	require.NoError(t, first.Step(Step{Step: 1, Values: []Value{{"loss", 1}}}))
	// The process is killed while it writes its second line.
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString("step,2026-03-01T12:00:0")
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, os.Chmod(path, 0o600))

	second := CSV(path)
	require.NoError(t, second.Begin(Run{StartStep: 1}))
	require.NoError(t, second.Step(Step{Step: 2, Values: []Value{{"accuracy", 0.5}, {"loss", 2}}}))
	require.NoError(t, second.Close())
	header, rows := readTable(t, path)
	require.Equal(t, "step/loss", header[5])
	require.Equal(t, "step/accuracy", header[len(header)-1])
	require.Len(t, rows, 2)
	require.Equal(t, "2", rows[1]["step/loss"])
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "who may read it stays")
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)
}

func TestCSVLeavesOtherFilesAlone(t *testing.T) {
	for _, text := range []string{
		"name,value\na,1\n", "no table", strings.Repeat("x", 10000), "\n", "\"", "record,time\n",
	} {
		path := filepath.Join(t.TempDir(), "notes.txt")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		sink := CSV(path)
		require.ErrorContains(t, sink.Begin(Run{}), "notes.txt: the file is there and is no table of a run: remove it")
		require.ErrorContains(t, sink.Step(Step{}), "is not open")
		require.NoError(t, sink.Close())
		after, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, text, string(after))
	}
}

func TestCSVBoundsItsColumns(t *testing.T) {
	sink := CSV(filepath.Join(t.TempDir(), "run.csv"))
	require.NoError(t, sink.Begin(Run{}))
	defer sink.Close()
	var values []Value
	for i := range maxColumns {
		values = append(values, Value{fmt.Sprint("loss of step ", i), 1})
	}
	require.ErrorContains(t, sink.Step(Step{Values: values}), "more than 1000 columns")
	require.NoError(t, sink.Step(Step{Values: values[:3]}), "what fits still goes in")
}

func TestCSVOfStrangeRuns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run.csv")
	playOdd(t, CSV(path))
	header, rows := readTable(t, path)
	require.Len(t, rows, 5)
	require.Contains(t, header, `step/a"b`)
	require.Contains(t, header, "step/two\uFFFDlines")
	v, err := strconv.ParseFloat(rows[1]["step/"], 64)
	require.NoError(t, err)
	require.True(t, math.IsNaN(v))
	require.Equal(t, "+Inf", rows[1]["learning_rate"])
}
