package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/cmd/internal/program"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// DataParallel's side has a process of its own, so that neither side sees the other's memory. Rank 0 starts it and waits.
const (
	childVar    = "GODDP_DPVSDDP_DIR"     // where the child leaves what it found
	devicesVar  = "GODDP_DPVSDDP_DEVICES" // how many it uses
	figuresFile = "figures.json"
	weightsFile = "weights.pt"
)

// figures are what one process found.
type figures struct {
	Rounds     []time.Duration // a step's time
	Memory     []uint64        // peak bytes of each process, or of each GPU
	Parameters int64
	State      int64 // bytes of parameters and buffers
	Gradients  int64 // bytes
	Threads    int
}

// runChild measures DataParallel on n devices, and leaves the weights in dir.
func runChild(ctx context.Context, dir string, n int) (f figures, err error) {
	self, err := os.Executable()
	if err != nil {
		return f, err
	}
	cmd := exec.CommandContext(ctx, self, os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Env = []string{childVar + "=" + dir, devicesVar + "=" + strconv.Itoa(n)}
	for _, v := range os.Environ() {
		if !ofRank(v) {
			cmd.Env = append(cmd.Env, v)
		}
	}
	if err := cmd.Run(); err != nil {
		return f, fmt.Errorf("the process that runs DataParallel failed (its own message stands above): %w", err)
	}
	text, err := os.ReadFile(filepath.Join(dir, figuresFile))
	if err != nil {
		return f, err
	}
	return f, json.Unmarshal(text, &f)
}

// ofRank tells whether a variable makes a process a rank.
func ofRank(v string) bool {
	for _, p := range []string{"RANK=", "WORLD_SIZE=", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_",
		"OMPI_", "GODDP_SPAWN=", "GODDP_LISTEN_FD="} {
		if strings.HasPrefix(v, p) {
			return true
		}
	}
	return false
}

// childMain is the child.
func (c *config) childMain(_ context.Context, dir string) error {
	n, err := strconv.Atoi(os.Getenv(devicesVar))
	if err != nil || n < 1 {
		return fmt.Errorf("%s=%q: not a number of devices", devicesVar, os.Getenv(devicesVar))
	}
	devices := make([]gotch.Device, n)
	for i := range devices {
		if devices[i] = gotch.CPU; c.ranks.NCCL() {
			devices[i] = gotch.CudaBuilder(uint(i))
		}
	}
	// The one process has the cores of all the others.
	threads, err := threadsOfRank(n)
	if err != nil {
		return err
	}
	if err := torchddp.SetNumThreads(threads * n); err != nil {
		return err
	}
	f := figures{Threads: threads * n}
	if err := c.dataParallel(devices, dir, &f); err != nil {
		return err
	}
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, figuresFile), text, 0o600)
}

func (c *config) dataParallel(devices []gotch.Device, dir string, f *figures) (err error) {
	memory, err := watchMemory(devices)
	if err != nil {
		return err
	}
	b, err := c.newBatches(devices[0], 0, 1)
	defer b.drop()
	if err != nil {
		return err
	}
	var nets []network
	defer func() {
		for _, net := range nets {
			net.Drop()
		}
	}()
	replicate := func(dev gotch.Device) (torchddp.Module, error) {
		net, err := c.newNetwork(dev)
		if net != nil {
			nets = append(nets, net)
		}
		return net, err
	}
	module, err := replicate(devices[0])
	if err != nil {
		return err
	}
	dp, err := torchddp.NewDataParallel(module, devices, replicate)
	if err != nil {
		return err
	}
	if f.Rounds, err = c.measure(parallelSide{dp}, b, func() error { return nil }); err != nil {
		return err
	}
	if f.Memory, err = memory.peak(); err != nil {
		return err
	}
	path := filepath.Join(dir, weightsFile)
	return checkpoint.Save(path, checkpoint.ModuleState(nets[0]), checkpoint.SaveOptions{NoSync: true})
}

type parallelSide struct{ *torchddp.DataParallel }

func (s parallelSide) forward(x *ts.Tensor) (*ts.Tensor, error) { return s.Forward(x, true) }
func (s parallelSide) backward(loss *ts.Tensor) error           { return s.Backward(loss) }

// difference is the largest one between the weights that DataParallel left in dir and a model's.
func difference(dir string, model checkpoint.Module) (largest float64, err error) {
	opts := checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CPU)}
	sd, err := checkpoint.LoadStateDictFile(filepath.Join(dir, weightsFile), opts)
	if err != nil {
		return 0, err
	}
	defer func() {
		for _, t := range sd.All() {
			t.MustDrop()
		}
	}()
	for name, t := range model.NamedParameters() {
		other, ok := sd.Get(name)
		if !ok {
			return 0, fmt.Errorf("DataParallel has no weight %s", name)
		}
		d := t.MustDetach(false).MustTo(gotch.CPU, true).MustSub(other, true).MustAbs(true).MustMax(true)
		largest = max(largest, d.Float64Values()[0])
		d.MustDrop()
	}
	return largest, nil
}

// threadsOfRank is how many threads a rank's operations use, of n on this machine.
func threadsOfRank(n int) (int, error) {
	if v := os.Getenv("OMP_NUM_THREADS"); v != "" {
		t, err := strconv.Atoi(v)
		if err != nil || t < 1 {
			return 0, fmt.Errorf("OMP_NUM_THREADS=%q is no number of threads", v)
		}
		return t, nil
	}
	return program.Threads(n), nil
}

var errOneMachine = errors.New("DataParallel's devices are all on one machine: start ranks on one machine only")

// oneMachine refuses ranks on several.
func oneMachine(world int) error {
	env, ok, err := launch.FromEnv()
	if err != nil {
		return err
	}
	if ok && env.LocalWorldSize != world {
		return &launch.ExitError{Code: 2, Err: errOneMachine}
	}
	return nil
}
