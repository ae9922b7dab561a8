package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/multierr"
	"golang.org/x/sys/unix"
)

// detailed is an error that says more for %+v, as errors with stacks do.
type detailed struct{ error }

func (d detailed) Format(f fmt.State, verb rune) {
	fmt.Fprint(f, d.Error())
	if f.Flag('+') {
		fmt.Fprint(f, "\nat train.go:12")
	}
}

func TestErrorFileRoundTrip(t *testing.T) {
	path := filepath.Join(t.TempDir(), "error.json")
	t.Setenv("TORCHELASTIC_ERROR_FILE", path)
	before := time.Now()
	got := Record(func() error { return detailed{errDisk} })
	assert.ErrorIs(t, got, detailed{errDisk})
	e, err := ReadErrorFile(path)
	require.NoError(t, err)
	assert.Equal(t, "disk full", e.Message)
	assert.Equal(t, "disk full\nat train.go:12", e.Stack)
	assert.WithinRange(t, e.Time, before, time.Now())
	assert.False(t, e.Panic)

	// The form that Python reads: see torch/distributed/elastic/multiprocessing/errors.
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	var python struct {
		Message struct {
			Message   string
			ExtraInfo struct {
				Callstack string `json:"py_callstack"`
				Timestamp string
			} `json:"extraInfo"`
		}
	}
	require.NoError(t, json.Unmarshal(data, &python))
	assert.Equal(t, fmt.Sprint(e.Time.Unix()), python.Message.ExtraInfo.Timestamp)

	err = Record(func() error { panic(errDisk) })
	assert.ErrorIs(t, err, errDisk)
	e, err = ReadErrorFile(path)
	require.NoError(t, err)
	assert.Equal(t, "panic: disk full", e.Message)
	assert.Contains(t, e.Stack, "errorfile_test.go")
	assert.True(t, e.Panic)

	require.NoError(t, os.Remove(path))
	require.NoError(t, Record(func() error { return nil }))
	assert.NoFileExists(t, path)

	require.NoError(t, WriteErrorFile(path, errors.New(strings.Repeat("ä", 1<<20))))
	e, err = ReadErrorFile(path)
	require.NoError(t, err)
	assert.Less(t, len(e.Message), maxErrorText+100)
	assert.Contains(t, e.Message, "bytes left out")
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	assert.Len(t, left, 1, "no temporary file may stay")
	assert.ErrorIs(t, WriteErrorFile("/nonexistent/dir/e.json", errDisk), os.ErrNotExist)
}

func TestReadErrorFileOfPython(t *testing.T) {
	path := filepath.Join(t.TempDir(), "error.json")
	for text, want := range map[string]RankError{
		`{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback: x", "timestamp": "1700000000"}}}`: {Message: "ValueError: bad", Stack: "Traceback: x", Time: time.Unix(1700000000, 0)},
		`{"message": "old form", "timestamp": 1700000001}`:                                                                      {Message: "old form", Time: time.Unix(1700000001, 0)},
		`{"message": {"message": "RuntimeError: Connection closed by peer", "errorCode": 1, "extraInfo": {}}}`:                  {Message: "RuntimeError: Connection closed by peer", PeerLost: true},
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		got, err := ReadErrorFile(path)
		require.NoError(t, err)
		assert.Equal(t, want, *got)
	}
	require.NoError(t, os.WriteFile(path, []byte("not json"), 0o600))
	_, err := ReadErrorFile(path)
	assert.ErrorContains(t, err, "not torchelastic's JSON")
}

func TestExitCode(t *testing.T) {
	for want, err := range map[int]error{
		0:   nil,
		1:   errDisk,
		2:   &PanicError{Value: 1},
		7:   fmt.Errorf("x: %w", &ExitError{Code: 7}),
		75:  fmt.Errorf("x: %w", ErrResume),
		130: fmt.Errorf("x: %w", &SignalError{unix.SIGINT}),
		9:   multierr.Append(&RankError{ExitCode: 9}, &RankError{ExitCode: 8}),
		139: &RankError{ExitCode: -1, Signal: "SIGSEGV"},
	} {
		assert.Equal(t, want, ExitCode(err), "%v", err)
	}
	assert.ErrorIs(t, &SignalError{unix.SIGINT}, context.Canceled)
	assert.ErrorIs(t, &RankError{ExitCode: ExitResume}, ErrResume)
	assert.Contains(t, fmt.Sprintf("%+v", &RankError{Message: "m", Stack: "s at x.go"}), "s at x.go")
	assert.NotContains(t, fmt.Sprint(&RankError{Message: "m", Stack: "s at x.go"}), "s at x.go")
}
