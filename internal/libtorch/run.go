package libtorch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// program runs other programs: pip, the compiler, the go command. Ctrl-C and the death of set-up end them.
type program struct {
	dir string
	env []string // added to set-up's own
}

// output runs argv and gives its standard output. The error holds all that the program printed.
func (p program) output(ctx context.Context, argv ...string) (string, error) {
	var out, both bytes.Buffer
	err := p.start(ctx, argv, &out, &both)
	if err != nil {
		return "", failed(argv, err, both.String()+out.String())
	}
	return out.String(), nil
}

// all runs argv and gives standard output and error in one.
func (p program) all(ctx context.Context, argv ...string) (string, error) {
	var both bytes.Buffer
	err := p.start(ctx, argv, &both, &both)
	if err != nil {
		err = failed(argv, err, both.String())
	}
	return both.String(), err
}

func (p program) start(ctx context.Context, argv []string, stdout, stderr *bytes.Buffer) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// A group of its own, so that what the program started (cc1plus of g++) ends with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// programError is a program that ended with an error.
type programError struct {
	Argv   []string
	Output string
	Err    error
}

func (e *programError) Error() string {
	return fmt.Sprintf("%s: %v\n%s", strings.Join(e.Argv, " "), e.Err, strings.TrimRight(e.Output, "\n"))
}

func (e *programError) Unwrap() error { return e.Err }

func failed(argv []string, err error, output string) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	return &programError{argv, output, err}
}

// printed is what the failed program of an error printed.
func printed(err error) string {
	var p *programError
	if errors.As(err, &p) {
		return p.Output
	}
	return ""
}
