package pair

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Command is how a side's processes are started.
type Command struct {
	Name string   // of the side
	Argv []string // of each process
	Env  []string // more variables
	// Ranks makes as many processes the ranks of a job, with torchrun's variables. 0 is one process that is no rank.
	Ranks int
	// Threads is how many threads an operation of one process may use; 0 is 1.
	Threads int
	// Cores are those that the side may use; none: all. Each rank gets its share of them.
	Cores []int
}

// Side is an implementation at work.
type Side struct {
	command Command
	procs   []*process
	Ready   Answer // what the first rank had to tell when it was ready
}

// process is one of a side's.
type process struct {
	what   string
	cmd    *exec.Cmd
	in     io.WriteCloser
	lines  chan []byte // closed at the end of its output
	stderr tail
	wait   func() error // for its end, any number of times
	over   atomic.Bool  // it has been waited for: its number may be another process's
}

// Start starts a side and waits until all of its processes are ready.
func Start(ctx context.Context, c Command) (*Side, error) {
	s := &Side{command: c}
	port := 0
	if c.Ranks > 0 {
		var err error
		if port, err = freePort(); err != nil {
			return nil, err
		}
	}
	for rank := range max(c.Ranks, 1) {
		p, err := s.launch(rank, port)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("start %s: %w", c.Name, err), s.Kill())
		}
		s.procs = append(s.procs, p)
	}
	ready, err := s.collect(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start: %w", err), s.Kill())
	}
	s.Ready = ready[0]
	return s, nil
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("no free port: %w", err)
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// Environ are the variables that both sides of a comparison get, beside this process's own.
func Environ(threads int) []string {
	n := strconv.Itoa(max(threads, 1))
	return append(os.Environ(), "OMP_NUM_THREADS="+n, "MKL_NUM_THREADS="+n, "GLOO_SOCKET_IFNAME=lo",
		"TORCH_CPP_LOG_LEVEL=ERROR")
}

func (s *Side) launch(rank, port int) (*process, error) {
	c := s.command
	p := &process{what: c.Name, cmd: exec.Command(c.Argv[0], c.Argv[1:]...), lines: make(chan []byte)}
	p.cmd.Env = append(Environ(c.Threads), c.Env...)
	cores := c.Cores
	if c.Ranks > 0 {
		p.what = fmt.Sprintf("%s, rank %d", c.Name, rank)
		r, n := strconv.Itoa(rank), strconv.Itoa(c.Ranks)
		p.cmd.Env = append(p.cmd.Env, "RANK="+r, "LOCAL_RANK="+r, "WORLD_SIZE="+n, "LOCAL_WORLD_SIZE="+n,
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port))
		cores = share(cores, rank, c.Ranks)
	}
	p.cmd.Stderr = &p.stderr
	// A process group, so that what a process starts itself ends with it.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := startPinned(p.cmd, cores); err != nil {
		return nil, err
	}
	p.wait = sync.OnceValue(func() error {
		for range p.lines { // exec wants all output to be read first
		}
		defer p.over.Store(true)
		return p.cmd.Wait()
	})
	go p.read(out)
	return p, nil
}

// read passes on the lines that are answers. Libraries print others.
func (p *process) read(out io.Reader) {
	defer close(p.lines)
	r := bufio.NewReader(out)
	for {
		line, err := r.ReadBytes('\n')
		if bytes.HasPrefix(line, []byte("{")) {
			p.lines <- line
		}
		if err != nil {
			return
		}
	}
}

// Name is the side's.
func (s *Side) Name() string { return s.command.Name }

// Turn sends the request to all processes and gives the mean of their answers.
func (s *Side) Turn(ctx context.Context, r Request) (Answer, error) {
	line, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	line = append(line, '\n')
	for _, p := range s.procs {
		if _, err := p.in.Write(line); err != nil {
			return nil, p.failed(err)
		}
	}
	answers, err := s.collect(ctx)
	if err != nil {
		return nil, err
	}
	return mean(answers)
}

// reply is a line of a side.
type reply struct {
	Values Answer `json:"values"`
	Error  string `json:"error,omitempty"`
}

// collect gives one answer of each process.
func (s *Side) collect(ctx context.Context) ([]Answer, error) {
	answers := make([]Answer, len(s.procs))
	for i, p := range s.procs {
		select {
		case line, ok := <-p.lines:
			if !ok {
				return nil, p.failed(p.ended())
			}
			var r reply
			if err := json.Unmarshal(line, &r); err != nil {
				return nil, p.failed(fmt.Errorf("it said %q: %w", line, err))
			}
			if r.Error != "" {
				return nil, p.failed(errors.New(r.Error))
			}
			answers[i] = r.Values
		case <-ctx.Done():
			return nil, p.failed(fmt.Errorf("no answer: %w", context.Cause(ctx)))
		}
	}
	return answers, nil
}

// ended is the error of a process whose output has ended. All that it had to say is there when this returns.
func (p *process) ended() error {
	defer time.AfterFunc(10*time.Second, p.kill).Stop() // in case that it goes on without its output
	if err := p.wait(); err != nil {
		return fmt.Errorf("it ended: %w", err)
	}
	return errors.New("it ended")
}

// kill ends the process and what it started.
func (p *process) kill() {
	if !p.over.Load() {
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	}
}

func (p *process) failed(err error) error {
	if text := strings.TrimSpace(p.stderr.String()); text != "" {
		return fmt.Errorf("%s: %w; its standard error ends:\n%s", p.what, err, text)
	}
	return fmt.Errorf("%s: %w", p.what, err)
}

// Close ends the side: it closes its standard input and waits, not for ever.
func (s *Side) Close() error {
	var errs []error
	for _, p := range s.procs {
		_ = p.in.Close()
	}
	for _, p := range s.procs {
		stop := time.AfterFunc(2*time.Minute, p.kill)
		if err := p.wait(); err != nil {
			errs = append(errs, p.failed(fmt.Errorf("at its end: %w", err)))
		}
		stop.Stop()
	}
	s.procs = nil
	return errors.Join(errs...)
}

// Kill ends the side at once.
func (s *Side) Kill() error {
	for _, p := range s.procs {
		p.kill()
	}
	for _, p := range s.procs {
		_ = p.wait() // killed: its status says nothing
	}
	s.procs = nil
	return nil
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 4 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if over := len(t.text) - tailBytes; over > 0 {
		t.text = slices.Delete(t.text, 0, over)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.text)
}

// Fresh is a player that starts the side anew for every turn, and counts only what it answers.
type Fresh struct{ Command Command }

// Name is the side's.
func (f Fresh) Name() string { return f.Command.Name }

// Turn starts the side, asks it once and ends it.
func (f Fresh) Turn(ctx context.Context, r Request) (Answer, error) {
	s, err := Start(ctx, f.Command)
	if err != nil {
		return nil, err
	}
	answer, err := s.Turn(ctx, r)
	if err != nil {
		return nil, errors.Join(err, s.Kill())
	}
	return answer, s.Close()
}
