package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"go.uber.org/multierr"
	"golang.org/x/sys/unix"
)

// ExitResume is the exit status of a job that stopped before its end and wants to be started again (EX_TEMPFAIL of sysexits.h).
const ExitResume = 75

var (
	// ErrResume is what a rank returns after it saved its state because its context was cancelled: the process ends with
	// [ExitResume], which is no failure, and Spawn returns an error that matches ErrResume.
	ErrResume = errors.New("launch: stopped before the end; start the job again to resume")

	// ErrNoMain is returned by Spawn in a program that does not run under [Main].
	ErrNoMain = errors.New("launch: Spawn needs launch.Main around the program: func main() { os.Exit(launch.Main(run)) }")

	// ErrInRank is returned by Spawn in a process that already is a rank.
	ErrInRank = errors.New("launch: this process already is a rank and may not spawn ranks of its own")
)

// RankError says how one rank failed.
type RankError struct {
	Rank      int       `json:"rank"`
	LocalRank int       `json:"local_rank"`
	WorldSize int       `json:"world_size"`
	PID       int       `json:"pid"`
	Host      string    `json:"host,omitempty"`       // the node, in a job of several
	ErrorFile string    `json:"error_file,omitempty"` // what the rank wrote, where it is kept
	ExitCode  int       `json:"exit_code"`            // -1 when a signal ended it
	Signal    string    `json:"signal,omitempty"`     // such as SIGKILL
	Message   string    `json:"message"`              // the error's text, or the panic's value
	Stack     string    `json:"stack,omitempty"`      // stack of the panic, or the error in full (%+v)
	Hint      string    `json:"hint,omitempty"`       // what to look at, where the exit alone says little
	Time      time.Time `json:"time"`                 // when the rank recorded its error, or else when its end was seen
	Panic     bool      `json:"panic,omitempty"`      //
	PeerLost  bool      `json:"peer_lost,omitempty"`  // the error tells of another rank's end, so it is a consequence
}

// Error is one line, or as many as the rank's own error text has.
func (e *RankError) Error() string {
	at := ""
	if e.Host != "" {
		at = " on " + e.Host
	}
	s := fmt.Sprintf("rank %d%s (pid %d, %s) failed: %s", e.Rank, at, e.PID, e.ending(), e.Message)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

func (e *RankError) ending() string {
	if e.Signal != "" {
		return e.Signal
	}
	return fmt.Sprintf("exit code %d", e.ExitCode)
}

// Format prints the stack as well for %+v.
func (e *RankError) Format(f fmt.State, verb rune) {
	if verb == 'q' {
		fmt.Fprintf(f, "%q", e.Error())
		return
	}
	io.WriteString(f, e.Error())
	if verb == 'v' && f.Flag('+') && e.Stack != "" {
		io.WriteString(f, "\n"+strings.TrimRight(e.Stack, "\n"))
	}
}

// Is lets errors.Is find ErrResume in a rank that ended with ExitResume.
func (e *RankError) Is(target error) bool {
	return target == ErrResume && e.ExitCode == ExitResume
}

// PanicError is a panic of a rank's function, as an error.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap gives the panic's value where that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Format prints the stack as well for %+v.
func (e *PanicError) Format(f fmt.State, verb rune) {
	if verb == 'q' {
		fmt.Fprintf(f, "%q", e.Error())
		return
	}
	io.WriteString(f, e.Error())
	if verb == 'v' && f.Flag('+') {
		fmt.Fprintf(f, "\n%s", e.Stack)
	}
}

// ExitError carries an exit status out of the function given to [Main]. Err may be nil: then nothing is printed.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit status %d", e.Code)
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// Exit is nil for 0, or an *ExitError that prints nothing: in a TestMain, return launch.Exit(m.Run()).
func Exit(code int) error {
	if code == 0 {
		return nil
	}
	return &ExitError{Code: code}
}

// SignalError is the cause (context.Cause) of a context that a signal cancelled. It matches context.Canceled.
type SignalError struct{ Signal unix.Signal }

func (e *SignalError) Error() string { return "received " + signalName(e.Signal) }

// Is lets errors.Is find context.Canceled.
func (e *SignalError) Is(target error) bool { return target == context.Canceled }

func signalName(s unix.Signal) string {
	if n := unix.SignalName(s); n != "" {
		return n
	}
	return fmt.Sprintf("signal %d", int(s))
}

// ExitCode is the exit status for an error: 0 for nil, an [ExitError]'s code, ExitResume, the code of the first failing rank, 128 plus
// the number for a signal as shells have it, 2 for a panic, else 1.
func ExitCode(err error) int {
	var (
		exit  *ExitError
		rank  *RankError
		sig   *SignalError
		panik *PanicError
	)
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.Code
	case errors.As(err, &rank):
		if rank.Signal != "" {
			if n := unix.SignalNum(rank.Signal); n != 0 {
				return 128 + int(n)
			}
			return 1
		}
		return max(rank.ExitCode, 1)
	case errors.Is(err, ErrResume):
		return ExitResume
	case errors.As(err, &sig):
		return 128 + int(sig.Signal)
	case errors.As(err, &panik):
		return 2
	}
	return 1
}

// printError writes what a person needs: the root cause with its stack, then the others in short.
func printError(w io.Writer, err error) {
	var exit *ExitError
	if errors.As(err, &exit) && exit.Err == nil {
		return
	}
	errs := multierr.Errors(err)
	for i, e := range errs {
		var rank *RankError
		var panicked *PanicError
		switch {
		case errors.As(e, &rank) && i == 0:
			fmt.Fprintf(w, "%s\n", e)
			if s := strings.TrimSpace(rank.Stack); s != "" && s != rank.Message {
				fmt.Fprintf(w, "--- rank %d ---\n%s\n--- end of rank %d ---\n", rank.Rank, s, rank.Rank)
			}
		case errors.As(e, &rank):
			fmt.Fprintf(w, "also: %s\n", e)
		case errors.As(e, &panicked):
			fmt.Fprintf(w, "%s\n%s\n", e, panicked.Stack)
		default:
			fmt.Fprintf(w, "%s: %s\n", progName(), e)
		}
	}
}

func progName() string {
	if len(os.Args) == 0 {
		return "program"
	}
	return os.Args[0][strings.LastIndexByte(os.Args[0], '/')+1:]
}

// peerLost says whether an error's text is what c10d, Gloo and NCCL say when another process went away.
func peerLost(text string) bool {
	t := strings.ToLower(text)
	for _, s := range []string{"connection closed by peer", "connection reset by peer", "broken pipe", "connection was likely closed",
		"remote process exited", "connection refused", "peer closed", "failed to recv, got 0 bytes"} {
		if strings.Contains(t, s) {
			return true
		}
	}
	return false
}
