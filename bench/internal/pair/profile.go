package pair

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
)

// ProfileVar is the environment variable that has a Go side write profiles: the folder and the start of the names.
const ProfileVar = "GODDP_BENCH_PROFILE"

// startProfile profiles the process until stop is called, if that is wanted.
func startProfile() (stop func() error, err error) {
	prefix := os.Getenv(ProfileVar)
	if prefix == "" {
		return func() error { return nil }, nil
	}
	if err := os.MkdirAll(filepath.Dir(prefix), 0o777); err != nil {
		return nil, err
	}
	if rank := os.Getenv("RANK"); rank != "" {
		prefix += "-rank" + rank
	}
	cpu, err := os.Create(prefix + ".cpu.pprof")
	if err != nil {
		return nil, err
	}
	runtime.MemProfileRate = 1 // every allocation, so that they can be counted
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, errors.Join(err, cpu.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		heap, err := os.Create(prefix + ".allocs.pprof")
		if err != nil {
			return errors.Join(err, cpu.Close())
		}
		err = errors.Join(pprof.Lookup("allocs").WriteTo(heap, 0), heap.Close(), cpu.Close())
		fmt.Fprintf(os.Stderr, "profiles: %s.{cpu,allocs}.pprof\n", prefix)
		return err
	}, nil
}
