package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
)

// An error file is JSON in the form that Python's torchelastic writes and its torchrun reads:
//
//	{"message": {"message": "…", "extraInfo": {"py_callstack": "…", "timestamp": "1700000000"}}}
//
// torchrun prints py_callstack and takes the failure with the smallest timestamp, in whole seconds, for the root cause.
// The fields after timestamp are ours.
type errorFile struct {
	Message errorFileMessage `json:"message"`
}

type errorFileMessage struct {
	Message   string    `json:"message"`
	ErrorCode int       `json:"errorCode,omitempty"`
	ExtraInfo errorInfo `json:"extraInfo"`
}

type errorInfo struct {
	Callstack string `json:"py_callstack"`
	Timestamp string `json:"timestamp"`
	Nanos     string `json:"timestamp_ns,omitempty"`
	Panic     bool   `json:"panic,omitempty"`
	PeerLost  bool   `json:"peer_lost,omitempty"`
}

// maxErrorText bounds an error's text and its stack, each.
const maxErrorText = 64 << 10

// WriteErrorFile records err in torchelastic's format. It replaces the file in one step, so a reader never sees half of it.
func WriteErrorFile(path string, err error) error {
	now := time.Now()
	msg := errorFileMessage{Message: clip(err.Error(), maxErrorText), ErrorCode: ExitCode(err)}
	stack := msg.Message
	var panicked *PanicError
	if errors.As(err, &panicked) {
		msg.ExtraInfo.Panic = true
		stack += "\n\n" + string(panicked.Stack)
	} else if full := fmt.Sprintf("%+v", err); full != err.Error() {
		stack = full
	}
	var lost interface{ PeerLost() bool }
	msg.ExtraInfo.PeerLost = peerLost(msg.Message) || errors.As(err, &lost) && lost.PeerLost()
	msg.ExtraInfo.Callstack = clip(stack, maxErrorText)
	msg.ExtraInfo.Timestamp = strconv.FormatInt(now.Unix(), 10)
	msg.ExtraInfo.Nanos = strconv.FormatInt(now.UnixNano(), 10)

	data, e := json.Marshal(errorFile{msg})
	if e != nil {
		return fmt.Errorf("launch: error file: %w", e)
	}
	tmp, e := os.CreateTemp(filepath.Dir(path), ".error-*")
	if e != nil {
		return fmt.Errorf("launch: error file: %w", e)
	}
	_, e = tmp.Write(data)
	if e2 := tmp.Close(); e == nil {
		e = e2
	}
	if e == nil {
		e = os.Rename(tmp.Name(), path)
	}
	if e != nil {
		os.Remove(tmp.Name())
		return fmt.Errorf("launch: error file %s: %w", path, e)
	}
	return nil
}

// ReadErrorFile reads what a worker recorded, in Go or in Python. Rank, PID and exit are for the caller to fill in.
func ReadErrorFile(path string) (*RankError, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("launch: error file: %w", err)
	}
	// Older writers have plain text under "message" and the time beside it.
	var old struct {
		Message   string      `json:"message"`
		Timestamp json.Number `json:"timestamp"`
	}
	if json.Unmarshal(data, &old) == nil {
		e := &RankError{Message: old.Message, PeerLost: peerLost(old.Message)}
		if s, err := old.Timestamp.Int64(); err == nil {
			e.Time = time.Unix(s, 0)
		}
		return e, nil
	}
	var f errorFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("launch: error file %s is not torchelastic's JSON: %w", path, err)
	}
	info := f.Message.ExtraInfo
	e := &RankError{Message: f.Message.Message, Stack: info.Callstack, Panic: info.Panic,
		PeerLost: info.PeerLost || peerLost(f.Message.Message)}
	if ns, err := strconv.ParseInt(info.Nanos, 10, 64); err == nil {
		e.Time = time.Unix(0, ns)
	} else if s, err := strconv.ParseInt(info.Timestamp, 10, 64); err == nil {
		e.Time = time.Unix(s, 0)
	}
	return e, nil
}

// clip keeps the head and the tail of a long text.
func clip(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	half := limit / 2
	return strings.ToValidUTF8(s[:half], "") + fmt.Sprintf("\n… %d bytes left out …\n", len(s)-2*half) + strings.ToValidUTF8(s[len(s)-half:], "")
}

// Record calls fn and gives its error; a panic becomes a [PanicError]. When this process is a rank whose launcher
// named an error file (TORCHELASTIC_ERROR_FILE), the error is written there, as Python's @record does.
//
// [Main] does this for every program; Record is for programs that cannot use Main.
func Record(fn func() error) error {
	err := catch(fn)
	if path := os.Getenv("TORCHELASTIC_ERROR_FILE"); err != nil && path != "" {
		if e := WriteErrorFile(path, err); e != nil {
			fmt.Fprintf(os.Stderr, "%v; the error was: %+v\n", e, err)
		}
	}
	return err
}

// catch turns a panic into an error.
func catch(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return fn()
}
