package launch

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Where an [Env] came from.
const (
	SourceSpawn    = "spawn"
	SourceTorchrun = "torchrun" // torchrun, goddp run, Kubeflow's PyTorchJob, or RANK and friends set by hand
	SourceSlurm    = "slurm"
	SourceOpenMPI  = "openmpi"
	SourceNone     = "none"
)

// Names of our own variables.
const (
	envSpawn    = "GODDP_SPAWN"     // the marker of a spawned rank, JSON
	envListenFD = "GODDP_LISTEN_FD" // the master port as an inherited, listening socket
)

// ErrEnv is matched by every error of [FromEnv]: variables that contradict each other, are incomplete or hold nonsense.
var ErrEnv = errors.New("launch: bad rank environment")

// Env is a rank's place in its job: what torchrun puts in environment variables.
type Env struct {
	Rank, WorldSize           int
	LocalRank, LocalWorldSize int // among the ranks of this node
	GroupRank, GroupWorldSize int // the node's number, and the number of nodes (0: unknown)

	RoleName                string
	RoleRank, RoleWorldSize int

	MasterAddr string // where rank 0's store listens
	MasterPort int

	// UseAgentStore says that the launcher itself hosts the store at MasterAddr:MasterPort: every rank, rank 0 too, is a client.
	UseAgentStore bool
	// ListenFD is a socket that already listens on MasterPort, for rank 0's store to take over (c10d's masterListenFd); 0: none.
	ListenFD int

	RestartCount, MaxRestarts int
	RunID                     string
	ErrorFile                 string // where a failing rank writes its error, "" for nowhere
	Source                    string // one of the Source constants
}

// FromEnv finds this process's rank. It asks, in this order: torchrun's variables (which Spawn, goddp run and
// Kubeflow set as well), Open MPI's, a Slurm step of several tasks. Nothing there: ok is false and Source is "none".
//
// Variables that are half set, contradict each other or hold nonsense give an error (see [ErrEnv]) that names the variable
// and its value. Without LOCAL_RANK a process counts as the only one of its node, which is what PyTorchJob means by that.
//
// A Slurm step of a single task, such as an interactive shell, is no distributed job: ok is false and the program may spawn.
func FromEnv() (env Env, ok bool, err error) {
	return fromEnv(os.LookupEnv)
}

func fromEnv(lookup func(string) (string, bool)) (Env, bool, error) {
	v := vars{lookup: lookup}
	none := Env{Source: SourceNone}

	slurm, mpi := v.inSlurmStep(), v.has("OMPI_COMM_WORLD_RANK") || v.has("OMPI_COMM_WORLD_SIZE")
	if !v.has("RANK") && !v.has("LOCAL_RANK") && (slurm || mpi) {
		// Batch scripts often export WORLD_SIZE and MASTER_ADDR and leave the rank to the launcher.
		// Within a Slurm job mpirun starts its own helpers by srun, and its ranks inherit their SLURM_ variables: not the ranks' own.
		if mpi {
			return v.finish(v.openMPI())
		}
		return v.finish(v.slurm())
	}
	if !v.has("RANK") && !v.has("WORLD_SIZE") && !v.has("LOCAL_RANK") {
		return none, false, nil
	}

	env := Env{
		Source:     SourceTorchrun,
		Rank:       v.number("RANK"),
		WorldSize:  v.number("WORLD_SIZE"),
		MasterAddr: v.text("MASTER_ADDR"),
		MasterPort: v.number("MASTER_PORT"),
		RunID:      v.textOr("TORCHELASTIC_RUN_ID", ""),
	}
	env.LocalRank = v.numberOr("LOCAL_RANK", 0)
	env.LocalWorldSize = v.numberOr("LOCAL_WORLD_SIZE", env.LocalRank+1)
	env.GroupRank = v.numberOr("GROUP_RANK", 0)
	if !v.has("LOCAL_RANK") && !v.has("GROUP_RANK") {
		env.GroupRank = env.Rank
	}
	env.GroupWorldSize = v.numberOr("GROUP_WORLD_SIZE", 0)
	v.common(&env)
	if v.has(envSpawn) || process.isRank.Load() {
		env.Source = SourceSpawn
	}
	return v.finish(env)
}

// Environ is env as variables, the same set that torchrun gives its workers; for starting a rank.
func (e Env) Environ() []string {
	s := []string{
		"RANK=" + strconv.Itoa(e.Rank),
		"LOCAL_RANK=" + strconv.Itoa(e.LocalRank),
		"WORLD_SIZE=" + strconv.Itoa(e.WorldSize),
		"LOCAL_WORLD_SIZE=" + strconv.Itoa(e.LocalWorldSize),
		"GROUP_RANK=" + strconv.Itoa(e.GroupRank),
		"GROUP_WORLD_SIZE=" + strconv.Itoa(e.GroupWorldSize),
		"ROLE_NAME=" + e.RoleName,
		"ROLE_RANK=" + strconv.Itoa(e.RoleRank),
		"ROLE_WORLD_SIZE=" + strconv.Itoa(e.RoleWorldSize),
		"MASTER_ADDR=" + e.MasterAddr,
		"MASTER_PORT=" + strconv.Itoa(e.MasterPort),
		"TORCHELASTIC_RESTART_COUNT=" + strconv.Itoa(e.RestartCount),
		"TORCHELASTIC_MAX_RESTARTS=" + strconv.Itoa(e.MaxRestarts),
		"TORCHELASTIC_RUN_ID=" + e.RunID,
		"TORCHELASTIC_ERROR_FILE=" + e.ErrorFile,
	}
	// Always there, so that a value inherited from an outer launcher does not reach this rank.
	store := "False"
	if e.UseAgentStore {
		store = "True"
	}
	s = append(s, "TORCHELASTIC_USE_AGENT_STORE="+store)
	if e.ListenFD > 0 {
		s = append(s, envListenFD+"="+strconv.Itoa(e.ListenFD))
	} else {
		s = append(s, envListenFD+"=")
	}
	return s
}

// String is short enough for a log line.
func (e Env) String() string {
	if e.Source == SourceNone || e.WorldSize == 0 {
		return "no rank"
	}
	return fmt.Sprintf("rank %d of %d (local %d of %d, node %d, master %s, from %s)", e.Rank, e.WorldSize,
		e.LocalRank, e.LocalWorldSize, e.GroupRank, net.JoinHostPort(e.MasterAddr, strconv.Itoa(e.MasterPort)), e.Source)
}

// GPU is the CUDA device number for this rank among the visible ones. It is the local rank; where Slurm or Open MPI shows
// each task a single device of its own (--gpus-per-task), it is 0.
func (e Env) GPU(visible int) (int, error) {
	switch {
	case visible <= 0:
		return 0, fmt.Errorf("launch: rank %d (local rank %d) has no GPU: none is visible", e.Rank, e.LocalRank)
	case e.LocalRank < visible:
		return e.LocalRank, nil
	case visible == 1 && (e.Source == SourceSlurm || e.Source == SourceOpenMPI):
		return 0, nil
	}
	return 0, fmt.Errorf("launch: rank %d has local rank %d, but only %d GPU(s) are visible: start at most %d ranks on this node, "+
		"or look at CUDA_VISIBLE_DEVICES", e.Rank, e.LocalRank, visible, visible)
}

// vars reads variables and keeps the first thing wrong with them.
type vars struct {
	lookup func(string) (string, bool)
	err    error
}

func (v *vars) has(name string) bool { return v.textOr(name, "") != "" }

func (v *vars) textOr(name, otherwise string) string {
	if s, ok := v.lookup(name); ok && strings.TrimSpace(s) != "" {
		return strings.TrimSpace(s)
	}
	return otherwise
}

func (v *vars) fail(format string, args ...any) {
	if v.err == nil {
		v.err = fmt.Errorf("%w: %s", ErrEnv, fmt.Sprintf(format, args...))
	}
}

func (v *vars) text(name string) string {
	s := v.textOr(name, "")
	if s == "" {
		v.fail("%s is not set, but %s: set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of RANK, WORLD_SIZE and LOCAL_RANK",
			name, v.whatIsSet())
	}
	return s
}

func (v *vars) whatIsSet() string {
	for _, n := range []string{"RANK", "WORLD_SIZE", "LOCAL_RANK"} {
		if v.has(n) {
			return n + "=" + v.textOr(n, "") + " is"
		}
	}
	return "others are"
}

func (v *vars) number(name string) int {
	s := v.text(name)
	if s == "" {
		return 0
	}
	i, err := strconv.Atoi(s)
	if err != nil || i < 0 {
		v.fail("%s=%q is not a number of 0 or more", name, s)
		return 0
	}
	return i
}

func (v *vars) numberOr(name string, otherwise int) int {
	if !v.has(name) {
		return otherwise
	}
	return v.number(name)
}

// common reads what is the same for every source.
func (v *vars) common(e *Env) {
	e.RestartCount = v.numberOr("TORCHELASTIC_RESTART_COUNT", e.RestartCount)
	e.MaxRestarts = v.numberOr("TORCHELASTIC_MAX_RESTARTS", 0)
	e.RoleName = v.textOr("ROLE_NAME", "default")
	e.RoleRank = v.numberOr("ROLE_RANK", e.Rank)
	e.RoleWorldSize = v.numberOr("ROLE_WORLD_SIZE", e.WorldSize)
	e.ErrorFile = v.textOr("TORCHELASTIC_ERROR_FILE", "")
	// Python writes str(True) and compares with it, letter by letter.
	e.UseAgentStore = v.textOr("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
	if fd := v.numberOr(envListenFD, 0); fd > 2 && listensOn(fd, e.MasterPort) {
		e.ListenFD = fd
	}
}

// finish checks the numbers against each other, naming the variables of the launcher that gave them.
func (v *vars) finish(e Env) (Env, bool, error) {
	rank, world, localRank, localWorld := "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
	switch e.Source {
	case SourceSlurm:
		rank, world, localRank, localWorld = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
	case SourceOpenMPI:
		const p = "OMPI_COMM_WORLD_"
		rank, world, localRank, localWorld = p+"RANK", p+"SIZE", p+"LOCAL_RANK", p+"LOCAL_SIZE"
	}
	switch {
	case v.err != nil:
	case e.WorldSize < 1:
		v.fail("%s=%d: a job has at least one rank", world, e.WorldSize)
	case e.Rank >= e.WorldSize:
		v.fail("%s=%d is outside %s=%d (ranks count from 0)", rank, e.Rank, world, e.WorldSize)
	case e.LocalWorldSize < 1 || e.LocalWorldSize > e.WorldSize:
		v.fail("%s=%d does not fit %s=%d", localWorld, e.LocalWorldSize, world, e.WorldSize)
	case e.LocalRank >= e.LocalWorldSize:
		v.fail("%s=%d is outside %s=%d", localRank, e.LocalRank, localWorld, e.LocalWorldSize)
	case e.MasterPort < 1 || e.MasterPort > 65535:
		v.fail("MASTER_PORT=%d is not a port (1 to 65535)", e.MasterPort)
	}
	if v.err != nil {
		return Env{Source: SourceNone}, false, v.err
	}
	return e, true, nil
}

// listensOn says whether fd is a TCP socket that listens on port. The number alone proves nothing: the store that took the socket
// over may have closed it, and the number may be another file by now.
func listensOn(fd, port int) bool {
	if on, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || on == 0 {
		return false
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return a.Port == port
	case *unix.SockaddrInet6:
		return a.Port == port
	}
	return false
}
