package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/launch/rendezvous"
	"github.com/goddp/goddp/launch/tcpstore"
	"golang.org/x/sys/unix"
)

// Std is a set of a worker's output streams, by torchrun's numbers.
type Std int

const (
	StdNone Std = 0
	StdOut  Std = 1
	StdErr  Std = 2
	StdAll  Std = 3
)

// Default ports of the rendezvous.
const (
	DefaultMasterPort     = 29500
	DefaultRendezvousPort = 29400
)

// Elastic is a launcher: one node's agent of a job, what `goddp run` and Python's torchrun are. It starts Workers processes of a program, takes part in the
// rendezvous with the agents of the other nodes (package rendezvous), and starts all workers of the job again when one fails, a node is lost or
// a node joins. Workers find their place in torchrun's environment variables, so Go programs that use [Run] and Python programs that call
// init_process_group work alike. The zero value, with Command and Workers, runs a job of one node.
type Elastic struct {
	Command []string // the program and its arguments; ${local_rank} in an argument is replaced
	Workers int      // on this node; 0: 1
	Role    string   // "": default
	Env     []string // more variables for the workers

	MinNodes, MaxNodes int    // 0: 1, and Min
	Static             bool   // nodes have their numbers from NodeRank, and node 0 is the host
	Endpoint           string // HOST:PORT of the rendezvous; "" for a job of one node: a free port here
	NodeRank           int    // when Static
	Host               *bool  // whether this node is the host; nil: when the endpoint's address is its own
	RunID              string // "": made up, for a job of one node
	LocalAddr          string // this node's address as others are to use it; "": the endpoint's host
	MaxRestarts        int

	JoinTimeout   time.Duration // until MinNodes are there; 0: 600 s
	LastCall      time.Duration // for more nodes once MinNodes are there; 0: 30 s
	KeepAlive     time.Duration // between signs of life; 0: 5 s
	KeepAliveTry  int           // signs of life that may be missed; 0: 3
	RejoinTimeout time.Duration // how long a node without its host tries to find it again; 0: 30 s

	Grace     time.Duration // between SIGTERM and SIGKILL after a failure; 0: 3 s
	StopGrace time.Duration // the same after a signal, or when a node joins or leaves: time to save; 0: 10 s
	Signals   []unix.Signal // that are handled; nil: SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1

	LogDir           string // for the workers' output and error files; "": a temporary folder
	Redirects, Tee   map[int]Std
	RedirectAll      Std // for local ranks that Redirects does not have
	TeeAll           Std
	ShowRanks        []int // local ranks whose output is shown; nil: all
	OutFilter        []string
	ErrFilter        []string
	Prefix           Prefix
	PrefixTemplate   string // with ${role_name}, ${rank} and ${local_rank}; "": [rankN]
	VirtualLocalRank bool   // each worker sees one GPU, and LOCAL_RANK is 0

	Stdout, Stderr io.Writer // nil: this process's own
	Logger         *slog.Logger
}

// ElasticStats says what a job took, as this node saw it.
type ElasticStats struct {
	Rounds   int // groups of workers that were started
	Restarts int // of them counted as restarts
	// Store is what the workers' store of the last round has done, on the node that served it.
	Store tcpstore.Stats
	// Starting is how long it took in the last round to start all workers of this node.
	Starting time.Duration
}

// JobError says that a job failed, and by what.
type JobError struct {
	Program  string
	Restarts int
	Text     string       // when no worker is to blame
	Failures []*RankError // the root cause first
}

func (e *JobError) Error() string {
	if len(e.Failures) == 0 {
		return "launch: " + e.Text
	}
	s := e.Failures[0].Error()
	if e.Text != "" {
		s = e.Text + ": " + s
	}
	if n := len(e.Failures) - 1; n > 0 {
		s += fmt.Sprintf(" (and %d more)", n)
	}
	return s
}

// Unwrap gives the failures, the root cause first.
func (e *JobError) Unwrap() []error {
	errs := make([]error, len(e.Failures))
	for i, f := range e.Failures {
		errs[i] = f
	}
	return errs
}

// WriteReport writes the job's exit record: who failed first, where, how and why, and what followed.
func (e *JobError) WriteReport(w io.Writer) {
	const rule = "============================================================"
	fmt.Fprintf(w, "%s\n%s failed", rule, e.Program)
	if e.Restarts > 0 {
		fmt.Fprintf(w, " after %d restarts", e.Restarts)
	}
	if e.Text != "" {
		fmt.Fprintf(w, ": %s", e.Text)
	}
	fmt.Fprintln(w)
	for i, f := range e.Failures {
		if i == 1 {
			fmt.Fprintln(w, strings.Repeat("-", len(rule))+"\nOther failures:")
		}
		if i == 0 {
			fmt.Fprintln(w, strings.Repeat("-", len(rule))+"\nRoot cause (first failure):")
		}
		line := func(name, format string, args ...any) {
			fmt.Fprintf(w, "  %-10s: %s\n", name, fmt.Sprintf(format, args...))
		}
		line("time", "%s", f.Time.Format("2006-01-02 15:04:05.000"))
		line("host", "%s", f.Host)
		if f.Rank >= 0 {
			line("rank", "%d (local rank %d, world size %d)", f.Rank, f.LocalRank, f.WorldSize)
		}
		line("pid", "%d", f.PID)
		line("exit", "%s", f.ending())
		line("error", "%s", strings.ReplaceAll(strings.TrimSpace(f.Message), "\n", "\n              "))
		if f.Hint != "" {
			line("hint", "%s", f.Hint)
		}
		if f.ErrorFile != "" {
			line("file", "%s", f.ErrorFile)
		}
		if s := strings.TrimSpace(f.Stack); i == 0 && s != "" && s != f.Message {
			fmt.Fprintf(w, "  stack     :\n    %s\n", strings.ReplaceAll(s, "\n", "\n    "))
		}
	}
	fmt.Fprintln(w, rule)
}

// Run runs the job to its end: nil, a [*JobError], an error that matches [ErrResume], or a [*SignalError]. See [ExitCode].
func (e Elastic) Run(ctx context.Context) error {
	_, err := e.RunStats(ctx)
	return err
}

// RunStats is Run and says what it took.
func (e Elastic) RunStats(ctx context.Context) (ElasticStats, error) {
	if err := e.defaults(); err != nil {
		return ElasticStats{}, err
	}
	a := &agent{Elastic: e, name: rendezvous.NewID(), ooms: oomKills()}
	err := a.run(ctx)
	var job *JobError
	if path := os.Getenv("TORCHELASTIC_ERROR_FILE"); path != "" && errors.As(err, &job) {
		WriteErrorFile(path, err) //nolint:errcheck // this launcher is a worker of another one; its exit code tells as well
	}
	return a.stats, err
}

func (e *Elastic) defaults() error {
	set := func(d *time.Duration, otherwise time.Duration) {
		if *d <= 0 {
			*d = otherwise
		}
	}
	set(&e.JoinTimeout, 600*time.Second)
	set(&e.LastCall, 30*time.Second)
	set(&e.KeepAlive, 5*time.Second)
	set(&e.RejoinTimeout, 30*time.Second)
	set(&e.Grace, DefaultGrace)
	set(&e.StopGrace, DefaultStopGrace)
	number := func(n *int, otherwise int) {
		if *n == 0 {
			*n = otherwise
		}
	}
	number(&e.KeepAliveTry, 3)
	number(&e.Workers, 1)
	number(&e.MinNodes, 1)
	number(&e.MaxNodes, e.MinNodes)
	if e.Role == "" {
		e.Role = "default"
	}
	if e.Logger == nil {
		e.Logger = slog.Default()
	}
	if e.Stdout == nil {
		e.Stdout = os.Stdout
	}
	if e.Stderr == nil {
		e.Stderr = os.Stderr
	}
	if e.Signals == nil {
		e.Signals = []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1}
	}
	switch {
	case len(e.Command) == 0:
		return errors.New("launch: no program to run")
	case e.Workers < 1:
		return fmt.Errorf("launch: %d workers on this node: at least 1 is needed", e.Workers)
	case e.MinNodes < 1 || e.MaxNodes < e.MinNodes:
		return fmt.Errorf("launch: %d to %d nodes: the least must be 1 or more, and the most no less", e.MinNodes, e.MaxNodes)
	case e.Static && e.MinNodes != e.MaxNodes:
		return fmt.Errorf("launch: %d to %d nodes, but a static rendezvous has a fixed number: use c10d", e.MinNodes, e.MaxNodes)
	case e.Static && (e.NodeRank < 0 || e.NodeRank >= e.MaxNodes):
		return fmt.Errorf("launch: node rank %d is outside 0 to %d", e.NodeRank, e.MaxNodes-1)
	case e.MaxRestarts < 0:
		return fmt.Errorf("launch: %d restarts at most: it must be 0 or more", e.MaxRestarts)
	case e.Endpoint == "" && e.MaxNodes > 1:
		return fmt.Errorf("launch: a job of %d nodes needs an endpoint, HOST:PORT of one of them", e.MaxNodes)
	}
	if e.RunID == "" {
		e.RunID = "none"
	}
	return nil
}

// endpoint splits the rendezvous's address. A free local port when there is none.
func (e *Elastic) endpoint() (host string, port int, err error) {
	if e.Endpoint == "" {
		return "127.0.0.1", 0, nil
	}
	otherwise := DefaultRendezvousPort
	if e.Static {
		otherwise = DefaultMasterPort
	}
	return splitEndpoint(e.Endpoint, otherwise)
}

func splitEndpoint(s string, otherwise int) (host string, port int, err error) {
	bad := func(why string) (string, int, error) {
		return "", 0, fmt.Errorf("launch: endpoint %q: %s; it is HOST:PORT, with an IPv6 address in brackets", s, why)
	}
	host, portText := s, ""
	switch {
	case strings.HasPrefix(s, "["):
		end := strings.IndexByte(s, ']')
		if end < 0 || end+1 < len(s) && s[end+1] != ':' {
			return bad("unbalanced brackets")
		}
		host, portText = s[1:end], strings.TrimPrefix(s[end+1:], ":")
	case strings.Count(s, ":") == 1:
		host, portText, _ = strings.Cut(s, ":")
	case strings.Contains(s, ":"):
		if net.ParseIP(s) == nil {
			return bad("more than one colon")
		}
	}
	if host == "" {
		return bad("no host")
	}
	if portText == "" {
		return host, otherwise, nil
	}
	port, err = strconv.Atoi(portText)
	if err != nil || port < 0 || port > 65535 {
		return bad("no such port")
	}
	return host, port, nil
}
