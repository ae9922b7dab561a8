package pair

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Job is a player whose turn is a whole program, from its start to its end. It answers with "seconds", and with
// "until", the seconds until the program printed a line that holds Until.
type Job struct {
	Side    string
	Argv    []string
	Env     []string
	Dir     string
	Until   string
	Threads int // 0: the program decides
	Cores   []int
}

// Name is the side's.
func (j Job) Name() string { return j.Side }

// Turn runs the program.
func (j Job) Turn(ctx context.Context, _ Request) (Answer, error) {
	cmd := exec.Command(j.Argv[0], j.Argv[1:]...)
	cmd.Env, cmd.Dir = append(Environ(j.Threads), j.Env...), j.Dir
	var stderr tail
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	if err := startPinned(cmd, j.Cores); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer stop()
	var until float64
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if until == 0 && j.Until != "" && strings.Contains(lines.Text(), j.Until) {
			until = time.Since(begin).Seconds()
		}
	}
	err = cmd.Wait()
	took := time.Since(begin).Seconds()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s was ended: %w", j.Argv[0], context.Cause(ctx))
	case err != nil:
		return nil, fmt.Errorf("%s: %w; its standard error ends:\n%s", strings.Join(j.Argv, " "), err, stderr.String())
	case j.Until != "" && until == 0:
		return nil, errors.New(j.Argv[0] + ` never printed "` + j.Until + `"`)
	}
	return Answer{"seconds": {took}, "until": {until}}, nil
}
