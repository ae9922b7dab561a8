package testenv

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Main runs a package's tests and removes the programs that they built:
//
//	func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }
func Main(m *testing.M) int {
	code := m.Run()
	if programs.dir != "" {
		_ = os.RemoveAll(programs.dir)
	}
	return code
}

var programs struct {
	sync.Mutex
	dir   string
	built map[string]string // by package path
}

// Program builds a command of this module, such as "./cmd/goddp", once for all tests of a package, and gives its path.
// The package's TestMain calls Main.
func Program(t testing.TB, pkg string) string {
	t.Helper()
	programs.Lock()
	defer programs.Unlock()
	if path, ok := programs.built[pkg]; ok {
		return path
	}
	if programs.dir == "" {
		dir, err := os.MkdirTemp("", "goddp-test")
		if err != nil {
			t.Fatal(err)
		}
		programs.dir, programs.built = dir, map[string]string{}
	}
	path := filepath.Join(programs.dir, filepath.Base(pkg))
	cmd := exec.Command("go", "build", "-o", path, "github.com/goddp/goddp/"+strings.TrimPrefix(pkg, "./"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build %s: %v\n%s", pkg, err, out)
	}
	programs.built[pkg] = path
	return path
}

// FreePort gives a loopback port that nobody listens on.
func FreePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// CleanEnv is the environment without what a launcher around the tests may have set.
func CleanEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(s string) bool {
		for _, p := range []string{"PET_", "RANK=", "WORLD_SIZE=", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS=", "SLURM_",
			"OMPI_", "CUDA_VISIBLE_DEVICES="} {
			if strings.HasPrefix(s, p) {
				return true
			}
		}
		return false
	})
}

// Result is how a program ended.
type Result struct {
	Out, Err string
	Code     int
}

// Lines are those of standard output.
func (r Result) Lines() []string { return strings.Split(strings.TrimSpace(r.Out), "\n") }

// Run runs a program in a folder, in a clean environment and more variables, to its end.
func Run(t testing.TB, dir string, env []string, program string, args ...string) Result {
	t.Helper()
	p := Start(t, dir, env, program, args...)
	return p.Wait()
}

// Process is a program that runs.
type Process struct {
	Cmd      *exec.Cmd
	t        testing.TB
	out, err output
}

// output may be read while the program runs.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// Until waits for a text on standard output.
func (p *Process) Until(text string) {
	p.t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); !strings.Contains(p.out.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Fatalf("no %q within five minutes\n%s\n%s", text, p.out.String(), p.err.String())
		}
	}
}

// Start starts a program. It is ended after ten minutes, which no test should need, and when the test ends.
func Start(t testing.TB, dir string, env []string, program string, args ...string) *Process {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	p := &Process{t: t, Cmd: exec.CommandContext(ctx, program, args...)}
	p.Cmd.Dir, p.Cmd.Env = dir, append(CleanEnv(), env...)
	p.Cmd.Stdout, p.Cmd.Stderr = &p.out, &p.err
	p.Cmd.WaitDelay = 5 * time.Second
	if err := p.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return p
}

// Wait waits for the end.
func (p *Process) Wait() Result {
	p.t.Helper()
	_ = p.Cmd.Wait() // the exit status tells
	return Result{p.out.String(), p.err.String(), p.Cmd.ProcessState.ExitCode()}
}

// Way is one of the ways to start a training program with two ranks.
type Way struct {
	Name string
	// Run runs the program, which exits with status 0, and gives what its ranks printed, without the launcher's prefixes.
	Run func(t testing.TB, dir, program string, args ...string) Result
}

// Ways are all of them: by itself, told the number of ranks by a flag, under goddp run, under Python's torchrun, and as
// two tasks of Slurm.
func Ways(flag string) []Way {
	return []Way{
		{"plainly", func(t testing.TB, dir, program string, args ...string) Result {
			return ok(t, Run(t, dir, nil, program, append(slices.Clone(args), "--"+flag, "2", "--backend", "gloo")...))
		}},
		{"goddp run", func(t testing.TB, dir, program string, args ...string) Result {
			all := append([]string{"run", "--nproc-per-node", "2", program}, args...)
			return ok(t, Run(t, dir, nil, Program(t, "./cmd/goddp"), append(all, "--backend", "gloo")...))
		}},
		{"torchrun", func(t testing.TB, dir, program string, args ...string) Result {
			all := []string{"-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", "--master-port", strconv.Itoa(FreePort(t)), program}
			return ok(t, Run(t, dir, nil, Python(t), append(append(all, args...), "--backend", "gloo")...))
		}},
		{"slurm", func(t testing.TB, dir, program string, args ...string) Result {
			var tasks [2]*Process
			for i := range tasks {
				env := strings.Fields(fmt.Sprintf("SLURM_PROCID=%d SLURM_LOCALID=%d SLURM_STEP_NUM_TASKS=2 SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost "+
					"SLURM_STEP_TASKS_PER_NODE=2 SLURM_JOB_ID=7 SLURM_STEP_ID=0 OMP_NUM_THREADS=1", i, i))
				if i == 0 { // the job's own port could be taken on this machine
					env = append(env, "MASTER_PORT="+strconv.Itoa(FreePort(t)))
				} else {
					env = append(env, tasks[0].Cmd.Env[len(tasks[0].Cmd.Env)-1])
				}
				tasks[i] = Start(t, dir, env, program, append(slices.Clone(args), "--backend", "gloo")...)
			}
			var all Result
			for _, p := range tasks {
				r := ok(t, p.Wait())
				all.Out, all.Err = all.Out+r.Out, all.Err+r.Err
			}
			return all
		}},
	}
}

func ok(t testing.TB, r Result) Result {
	t.Helper()
	if r.Code != 0 {
		t.Fatalf("exit status %d\n%s\n%s", r.Code, r.Out, r.Err)
	}
	var out strings.Builder
	for line := range strings.Lines(r.Out) {
		if strings.HasPrefix(line, "[rank") || strings.HasPrefix(line, "[default") {
			if _, after, found := strings.Cut(line, "] "); found {
				line = after
			}
		}
		out.WriteString(line)
	}
	r.Out = out.String()
	return r
}
