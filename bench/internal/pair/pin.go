package pair

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// Cores are the cores that this process may use.
func Cores() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, fmt.Errorf("which cores are there: %w", err)
	}
	var out []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			out = append(out, i)
		}
	}
	return out, nil
}

// share are the cores of one rank: as many as the others have, or all where there are fewer cores than ranks.
func share(cores []int, rank, ranks int) []int {
	if len(cores) < ranks {
		return cores
	}
	return cores[rank*len(cores)/ranks : (rank+1)*len(cores)/ranks]
}

// startPinned starts a process on the cores; without any it may use all. A process has the cores of the thread that
// started it, and hands them on to what it starts itself.
func startPinned(cmd *exec.Cmd, cores []int) error {
	if len(cores) == 0 {
		return cmd.Start()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return fmt.Errorf("which cores are there: %w", err)
	}
	for _, c := range cores {
		set.Set(c)
	}
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("use of cores %v: %w", cores, err)
	}
	return errors.Join(cmd.Start(), unix.SchedSetaffinity(0, &before))
}
