package report

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math"
	"math/bits"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/goddp/goddp/internal/testenv"
)

// events is what TensorBoard's own reader finds in a folder.
type events struct {
	Curves  map[string][][3]any // step, value as text, wall time
	Texts   map[string][]string
	Hparams map[string]any
	Status  []int
}

func readEvents(t *testing.T, dir string) events {
	t.Helper()
	script, err := os.ReadFile(filepath.Join("testdata", "events.py"))
	require.NoError(t, err)
	files, err := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
	require.NoError(t, err)
	var e events
	out := testenv.RunPython(t, string(script), append([]string{dir}, files...)...)
	require.NoError(t, json.Unmarshal([]byte(out), &e), out)
	return e
}

func (e events) curve(t *testing.T, tag string) (steps []int, values []float64) {
	t.Helper()
	require.Contains(t, e.Curves, tag)
	for _, at := range e.Curves[tag] {
		v, err := strconv.ParseFloat(at[1].(string), 64)
		require.NoError(t, err)
		steps, values = append(steps, int(at[0].(float64))), append(values, v)
	}
	return steps, values
}

func TestTensorBoardReadsTheFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs", "a run")
	play(t, TensorBoard(dir))
	e := readEvents(t, dir)
	steps, values := e.curve(t, "step/loss")
	require.Len(t, steps, 30)
	for i, n := range steps {
		require.Equal(t, 10*(i+1), n)
		s := sampleStep(i/10, (i%10+1)*10, 10)
		require.Equal(t, float64(float32(s.Values[0].Value)), values[i])
		require.InDelta(t, float64(s.Time.UnixNano())/1e9, e.Curves["step/loss"][i][2], 1e-3)
	}
	for _, tag := range []string{"step/accuracy", "learning_rate", "samples_per_second", "seconds/data",
		"seconds/forward", "seconds/backward", "seconds/communication", "seconds/optimizer", "seconds/step",
		"bytes_reduced", "buckets/seconds", "ranks/slowest", "ranks/slowest_over_median"} {
		steps, _ := e.curve(t, tag)
		require.Len(t, steps, 30, tag)
	}
	steps, values = e.curve(t, "eval/accuracy")
	require.Equal(t, []int{100, 300}, steps)
	require.InDeltaSlice(t, []float64{0.48, 0.68}, values, 1e-6)
	require.Equal(t, map[string]any{"lr": 0.1, "amp": true, "schedule": "cosine | warm-up <5>"}, e.Hparams)
	require.Equal(t, []int{1}, e.Status, "success")
	require.Len(t, e.Texts["settings"], 1)
	require.Contains(t, e.Texts["settings"][0], "| schedule | cosine \\| warm-up &lt;5> |\n")
	require.Contains(t, e.Texts["settings"][0], "| batch size of all ranks | 512 |\n")
}

func TestTensorBoardAfterACrashAndAResume(t *testing.T) {
	dir := t.TempDir()
	first := TensorBoard(dir)
	require.NoError(t, first.Begin(sampleRun()))
	for step := 10; step <= 80; step += 10 {
		require.NoError(t, first.Step(sampleStep(0, step, 10)))
	}
	// The first process is gone: its file was not closed, and its last record is torn.
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	steps, _ := readEvents(t, dir).curve(t, "step/loss")
	require.Equal(t, []int{10, 20, 30, 40, 50, 60, 70, 80}, steps, "all is there without Close")
	before, err := os.ReadFile(files[0])
	require.NoError(t, err)
	torn := before[:len(before)-7]
	require.NoError(t, os.WriteFile(files[0], torn, 0o644))

	// It had a snapshot of step 50.
	run := sampleRun()
	run.StartStep = 50
	run.Started = start.Add(60e9)
	second := TensorBoard(dir)
	require.NoError(t, second.Begin(run))
	require.NoError(t, second.Step(sampleStep(0, 60, 10)))
	require.NoError(t, second.Step(sampleStep(0, 70, 10)))
	require.NoError(t, second.Close())
	after, err := os.ReadFile(files[0])
	require.NoError(t, err)
	require.Equal(t, torn, after, "the earlier file stays")
	e := readEvents(t, dir)
	steps, _ = e.curve(t, "step/loss")
	require.Equal(t, []int{10, 20, 30, 40, 50, 60, 70}, steps, "what the resumed run did again counts once")
	require.Equal(t, []int{2}, e.Status, "it ended before its last epoch")
}

func TestTensorBoardOfStrangeRuns(t *testing.T) {
	dir := t.TempDir()
	playOdd(t, TensorBoard(dir))
	e := readEvents(t, dir)
	_, values := e.curve(t, "step/")
	require.True(t, math.IsNaN(values[0]))
	_, values = e.curve(t, "learning_rate")
	require.True(t, math.IsInf(values[1], 1))
	require.Contains(t, e.Curves, "step/\uFFFD[2Jred")
}

func TestTwoRunsInOneFolder(t *testing.T) {
	dir := t.TempDir()
	for range 3 {
		sink := TensorBoard(dir)
		require.NoError(t, sink.Begin(Run{Started: start}))
		require.NoError(t, sink.Close())
	}
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 3)
	require.ErrorContains(t, TensorBoard(dir).Step(Step{}), "Begin comes first")
}

// The framing's checksum is that of an example in RFC 3720, so that this holds without Python too.
func TestRecordFraming(t *testing.T) {
	zeros := uint32(0x8a9136aa) // the CRC32C of 32 zeros, in RFC 3720
	require.Equal(t, bits.RotateLeft32(zeros, 17)+0xa282ead8, masked(make([]byte, 32)))
	var out bytes.Buffer
	require.NoError(t, writeRecord(&out, message("abc")))
	b := out.Bytes()
	require.Equal(t, uint64(3), binary.LittleEndian.Uint64(b))
	require.Equal(t, masked(b[:8]), binary.LittleEndian.Uint32(b[8:]))
	require.Equal(t, "abc", string(b[12:15]))
	require.Equal(t, masked([]byte("abc")), binary.LittleEndian.Uint32(b[15:]))
	require.Len(t, b, 19)

	m := event(start, -1).fileVersion()
	require.NoError(t, protowire.ParseError(protowire.ConsumeFieldValue(1, protowire.Fixed64Type, m[1:])))
}
