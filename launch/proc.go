package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// proc is a started process that leads a process group of its own.
type proc struct {
	cmd *exec.Cmd
	pid int

	mu     sync.Mutex
	reaped bool
	killed bool // we sent SIGKILL

	onEnd func() // called when the process has ended and its number is not yet free

	pipes   []*os.File
	streams sync.WaitGroup
	lines   []*lines
}

// startProc starts cmd with its output going to out and err, line by line; nil there leaves cmd's own setting. It must be called on
// a locked thread that lives until the process was waited for: the parent-death signal is tied to the thread.
func startProc(cmd *exec.Cmd, out, err *lines, parentDeath syscall.Signal) (*proc, error) {
	p := &proc{cmd: cmd}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: parentDeath}
	var childEnds []*os.File
	defer func() {
		for _, f := range childEnds {
			f.Close()
		}
	}()
	pipe := func(l *lines, dst *io.Writer) error {
		if l == nil {
			return nil
		}
		r, w, e := os.Pipe()
		if e != nil {
			return e
		}
		p.pipes, p.lines, childEnds = append(p.pipes, r), append(p.lines, l), append(childEnds, w)
		*dst = w
		return nil
	}
	e := errors.Join(pipe(out, &cmd.Stdout), pipe(err, &cmd.Stderr))
	if e == nil {
		e = cmd.Start()
	}
	if e != nil {
		for _, r := range p.pipes {
			r.Close()
		}
		return nil, e
	}
	p.pid = cmd.Process.Pid
	for i, r := range p.pipes {
		p.streams.Go(func() { io.Copy(p.lines[i], r) })
	}
	return p, nil
}

// wait waits for the process's end, ends what it left behind in its group, and collects its last output.
func (p *proc) wait() (state *os.ProcessState, ended time.Time) {
	// Not reaped yet, the dead leader still holds its number, so the group is its own.
	for {
		err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	ended = time.Now()
	if p.onEnd != nil {
		p.onEnd()
	}
	p.mu.Lock()
	unix.Kill(-p.pid, unix.SIGKILL)
	p.cmd.Wait() //nolint:errcheck // the state says it
	p.reaped = true
	p.mu.Unlock()

	// A process that left the group may hold the pipe open for ever.
	drained := make(chan struct{})
	go func() { p.streams.Wait(); close(drained) }()
	select {
	case <-drained:
	case <-time.After(2 * time.Second):
	}
	for _, r := range p.pipes {
		r.Close()
	}
	<-drained
	for _, l := range p.lines {
		l.Close()
	}
	return p.cmd.ProcessState, ended
}

// signal sends a signal to the whole group, or to its leader alone.
func (p *proc) signal(sig unix.Signal, group bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped {
		return
	}
	if sig == unix.SIGKILL {
		p.killed = true
	}
	to := p.pid
	if group {
		to = -to
	}
	unix.Kill(to, sig)
}

func (p *proc) wasKilled() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.killed
}

// selfPath is the running binary, also when its file was replaced or removed meanwhile.
func selfPath() (string, error) {
	const proc = "/proc/self/exe"
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("launch: cannot find this program's own file: %w", err)
	}
	a, err1 := os.Stat(path)
	b, err2 := os.Stat(proc)
	if err2 == nil && (err1 != nil || !os.SameFile(a, b)) {
		return proc, nil
	}
	return path, nil
}

// oomKills counts the processes that the kernel's out-of-memory killer ended in our control group; -1: unknown.
func oomKills() int {
	return oomKillsUnder("/sys/fs/cgroup", "/proc/self/cgroup")
}

func oomKillsUnder(root, self string) int {
	const v2, v1 = "memory.events", "memory.oom_control"
	var files []string
	if data, err := os.ReadFile(self); err == nil {
		for line := range strings.Lines(string(data)) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3) // number:controllers:path
			switch {
			case len(f) != 3:
			case f[1] == "":
				files = append(files, filepath.Join(root, f[2], v2))
			case slices.Contains(strings.Split(f[1], ","), "memory"):
				files = append(files, filepath.Join(root, "memory", f[2], v1))
			}
		}
	}
	// In a container the path may be the host's, and the root our own group.
	files = append(files, filepath.Join(root, v2), filepath.Join(root, "memory", v1))
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(data)) {
			if n, ok := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); ok {
				if i, err := strconv.Atoi(n); err == nil {
					return i
				}
			}
		}
	}
	return -1
}
