package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Main runs a program that may spawn ranks or be one, and gives its exit status. It belongs at the top:
//
//	func main() { os.Exit(launch.Main(run)) }
//
// run is called on a locked OS thread. Its context is cancelled by SIGINT, SIGTERM, SIGHUP and SIGUSR1; context.Cause
// tells which. An error, or a panic, is printed on standard error (the first failing rank's with its stack) and recorded in
// torchelastic's error file when this process is a rank; see [ExitCode] for the status it becomes.
//
// In a rank that [Spawn] started, run is called too and leads to the same call of Spawn, where the rank's function runs. Deferred
// functions of run are called then, but nothing that follows Spawn.
func Main(run func(context.Context) error) int {
	ctx, err := process.begin()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer process.end()
	// A rank that has one core: with one processor of Go's, every call of C that takes some time has the runtime hand the
	// processor to another thread and take it back. Two spare a small DDP iteration a sixth of its time.
	if runtime.GOMAXPROCS(0) == 1 && os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(2)
	}

	over := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine.
		runtime.LockOSThread()
		process.setMainThread(unix.Gettid())
		err := errGoexit
		defer func() {
			if v := recover(); v != nil {
				err = &PanicError{Value: v, Stack: debug.Stack()}
			}
			over <- err
		}()
		if c := process.spawned(); c != nil && c.Name != "" {
			err = runEntry(ctx, c)
		} else {
			err = run(ctx)
		}
	}()

	c := process.spawned()
	if c == nil {
		if err = stoppedBySignal(<-over); err == nil {
			return 0
		}
		if path := os.Getenv("TORCHELASTIC_ERROR_FILE"); path != "" {
			if _, isRank, e := FromEnv(); isRank && e == nil {
				if e := WriteErrorFile(path, err); e != nil {
					fmt.Fprintln(os.Stderr, e)
				}
			}
		}
		printError(os.Stderr, err)
		return ExitCode(err)
	}

	// A rank. Its function's end counts, not what run gives after it.
	select {
	case <-c.leftElsewhere: // on another goroutine than run's: what follows Spawn there must not get a chance to run
	case err = <-over:
		select {
		case <-c.left: // the rank's function ended; after it, only a deferred function can have failed
			var panicked *PanicError
			if c.err == nil && errors.As(err, &panicked) {
				c.setErr(panicked)
			}
		default:
			switch {
			case c.entered:
			case err == nil || err == errGoexit:
				err = fmt.Errorf("launch: this process was started as a rank for call %d of Spawn, but the program ended without coming to it: "+
					"what leads to Spawn must be the same in every rank", c.Call)
			default:
				err = fmt.Errorf("launch: a rank failed on its way to Spawn: %w", err)
			}
			c.setErr(err)
		}
	}
	return ExitCode(c.err)
}

var errGoexit = errors.New("launch: the goroutine ended by runtime.Goexit")

// Run calls fn as one rank of a job: in this process when the environment already makes it a rank (see [FromEnv]),
// or else in n processes that Spawn starts. n and opts are not looked at in the first case. In a task of Slurm or Open
// MPI it sets torchrun's variables, for torchddp.InitProcessGroup and whatever else asks.
func Run(ctx context.Context, n int, fn func(context.Context, Env) error, opts ...SpawnOptions) error {
	if c := process.spawned(); c != nil && !c.entered {
		return Spawn(ctx, n, fn, opts...)
	}
	env, isRank, err := FromEnv()
	if err != nil {
		return err
	}
	if !isRank {
		return Spawn(ctx, n, fn, opts...)
	}
	if env.Source == SourceSlurm || env.Source == SourceOpenMPI {
		// InitProcessGroup looks for torchrun's variables.
		for _, v := range env.Environ() {
			name, value, _ := strings.Cut(v, "=")
			if err := os.Setenv(name, value); err != nil {
				return fmt.Errorf("launch: %s: %w", v, err)
			}
		}
	}
	runtime.LockOSThread()
	ctx, cancel := process.watch(ctx)
	defer cancel()
	return fn(ctx, env)
}

// Entry is a rank's function known by name; see [Register].
type Entry struct {
	name string
	fn   func(context.Context, Env) error
	dup  bool
}

// Register names a rank's function, in a package variable or in init. [Entry.Spawn] starts ranks that go straight to it from
// Main, without the program's way to the call of Spawn. Tests need that:
//
//	var sum = launch.Register("sum", func(ctx context.Context, env launch.Env) error { ... })
//
//	func TestMain(m *testing.M) {
//		os.Exit(launch.Main(func(context.Context) error { return launch.Exit(m.Run()) }))
//	}
//
//	func TestSum(t *testing.T) {
//		if err := sum.Spawn(t.Context(), 2); err != nil { t.Fatal(err) }
//	}
func Register(name string, fn func(context.Context, Env) error) *Entry {
	entries.Lock()
	defer entries.Unlock()
	e := &Entry{name: name, fn: fn}
	if entries.byName[name] != nil || name == "" || fn == nil {
		e.dup = true
		return e
	}
	if entries.byName == nil {
		entries.byName = map[string]*Entry{}
	}
	entries.byName[name] = e
	return e
}

var entries struct {
	sync.Mutex
	byName map[string]*Entry
}

// Spawn is [Spawn] for a registered function.
func (e *Entry) Spawn(ctx context.Context, n int, opts ...SpawnOptions) error {
	if e.dup {
		return fmt.Errorf("launch: Register(%q): the name is taken or empty, or the function is nil", e.name)
	}
	if process.spawned() != nil {
		return ErrInRank
	}
	return spawn(ctx, n, e.name, opts)
}

func runEntry(ctx context.Context, c *child) error {
	entries.Lock()
	e := entries.byName[c.Name]
	entries.Unlock()
	if e == nil {
		return fmt.Errorf("launch: no function %q is registered in this process: call Register in a package variable or in init, under the same conditions in every rank", c.Name)
	}
	c.run(ctx, e.fn)
	return nil // not reached
}

// marker is what a parent tells a rank about itself, in the variable GODDP_SPAWN.
type marker struct {
	Call     int          `json:"call"`           // which call of Spawn, from 1
	Name     string       `json:"name,omitempty"` // the registered function, if one
	Parent   int          `json:"parent"`
	Lifeline int          `json:"lifeline"` // a pipe that ends when the parent does
	Crash    string       `json:"crash"`    // where the Go runtime shall write a fatal error
	Past     []*pastSpawn `json:"past"`     // how the calls before this one ended
}

// pastSpawn is the outcome of an earlier call of Spawn: nil for success.
type pastSpawn struct {
	Rank *RankError `json:"rank,omitempty"`
	Text string     `json:"text,omitempty"`
}

func (p *pastSpawn) asError() error {
	switch {
	case p == nil:
		return nil
	case p.Rank != nil:
		return p.Rank
	}
	return errors.New(p.Text)
}

func newPast(err error) *pastSpawn {
	if err == nil {
		return nil
	}
	var rank *RankError
	if errors.As(err, &rank) {
		r := *rank
		r.Stack, r.Message = "", clip(r.Message, 400)
		return &pastSpawn{Rank: &r}
	}
	return &pastSpawn{Text: clip(err.Error(), 400)}
}

// process is what this process is: a process is one rank or one parent, so there is one of it.
var process processState

type processState struct {
	mu         sync.Mutex
	active     bool // within Main
	mainThread int
	ctx        context.Context // cancelled by signals
	signals    *signals
	child      *child
	isRank     atomic.Bool // child is set; asked without the lock
	calls      int         // calls of Spawn so far
	spawning   bool
	past       []*pastSpawn
	noted      sync.Once // OMP_NUM_THREADS was announced
}

func (p *processState) begin() (context.Context, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active {
		return nil, errors.New("launch: Main was called within Main")
	}
	if text, ok := os.LookupEnv(envSpawn); ok && p.child == nil {
		c := &child{left: make(chan struct{}), leftElsewhere: make(chan struct{})}
		if err := json.Unmarshal([]byte(text), &c.marker); err != nil {
			return nil, fmt.Errorf("launch: %s=%q was not set by launch.Spawn: %w", envSpawn, text, err)
		}
		if err := c.attach(); err != nil {
			return nil, err
		}
		// Programs that this rank starts are not to take themselves for it.
		os.Unsetenv(envSpawn)
		p.child = c
		p.isRank.Store(true)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	p.signals = watchSignals(cancel, p.child, mainSignals)
	p.ctx, p.active = ctx, true
	return ctx, nil
}

func (p *processState) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.signals.stop()
	p.active = false
}

func (p *processState) setMainThread(tid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mainThread = tid
}

// onMainThread says whether the caller is the goroutine that runs Main's function: it is locked to its thread, so no other one can be there.
func (p *processState) onMainThread() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.active && p.mainThread == unix.Gettid()
}

func (p *processState) spawned() *child {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.child
}

// watch gives a context that signals to this process cancel too.
func (p *processState) watch(ctx context.Context) (context.Context, context.CancelFunc) {
	p.mu.Lock()
	own := p.ctx
	p.mu.Unlock()
	out, cancel := context.WithCancelCause(ctx)
	if own == nil {
		return out, func() { cancel(nil) }
	}
	stop := context.AfterFunc(own, func() { cancel(context.Cause(own)) })
	return out, func() { stop(); cancel(nil) }
}

// beginSpawn counts a call. Ranks find theirs by its number, so calls come one after the other.
func (p *processState) beginSpawn() (call int, past []*pastSpawn, sig *signals, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case !p.active:
		return 0, nil, nil, ErrNoMain
	case p.spawning:
		return 0, nil, nil, errors.New("launch: another call of Spawn is running: wait for its end first")
	}
	p.calls++
	p.spawning = true
	return p.calls, slices.Clone(p.past), p.signals, nil
}

func (p *processState) endSpawn(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.spawning = false
	p.past = append(p.past, newPast(err))
}
