// Package launch starts the ranks of a distributed job and tells a process which rank it is.
//
// # Mental model
//
// A rank is a process, and one binary serves all of them. A program hands its work to [Main]:
//
//	func main() { os.Exit(launch.Main(run)) }
//
//	func run(ctx context.Context) error {
//		// flags, checks: everything up to here runs in the parent and again in every rank
//		return launch.Run(ctx, 2, train)
//	}
//
//	func train(ctx context.Context, env launch.Env) error { ... }
//
// [Run] looks at the environment. Under torchrun, Slurm, Open MPI or Kubernetes the process already is a rank, and train is
// called in it. Started plainly, the program becomes a parent: [Spawn] runs the binary again once a rank, with the same
// arguments and with torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, …); each of those processes comes to
// the same call of Spawn, runs train there, and ends: Spawn does not return in a rank. This is what mp.spawn does in Python.
//
// Ending a rank needs no os.Exit in a library: after train, Spawn runs the deferred functions of the goroutine
// (runtime.Goexit) and Main returns the exit status, which only main turns into the end of the process. A program that calls
// Spawn without Main is refused in the parent, before any process starts; a rank that never comes to its call of Spawn,
// because the program took another way, fails with an error that says so.
//
// A rank's function runs on one locked OS thread for its whole life, because libtorch keeps modes (grad mode, the current
// device and stream) in thread-local storage.
//
// # Several nodes, and restarts
//
// [Spawn] starts the ranks of one machine, once. [Elastic] is the launcher of bigger jobs, what `goddp run` and Python's torchrun are: one on each node, which
// meet (package rendezvous), start any program's workers (Go or Python) with torchrun's variables, and start all of them again
// when one fails, a node is lost or a node joins. It serves the workers' store itself (package tcpstore), a fresh one each time.
//
// # Failure
//
// The first rank that fails decides: its error text, panic value and stack, exit code or signal come back as a *[RankError],
// and the others are ended with SIGTERM, then SIGKILL, within five seconds. Errors of the others follow it in the returned
// error (go.uber.org/multierr), root cause first. Ranks write their errors in torchelastic's error-file format, so Python's
// torchrun shows them too.
//
// # Signals
//
// SIGINT, SIGTERM and SIGHUP to the parent are passed on to the process group of every rank; ranks see their context
// cancelled and have [SpawnOptions.StopGrace] to save, then SIGKILL follows. A second SIGINT or SIGTERM kills at once. SIGUSR1 (what
// Slurm sends ahead of a time limit) cancels the context as well and sets no deadline: a rank saves and returns [ErrResume], and
// the job ends with status [ExitResume]. A parent that is itself killed takes its ranks and their process groups with it.
package launch
