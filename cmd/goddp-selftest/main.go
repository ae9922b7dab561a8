// Command goddp-selftest is one rank of the self-test that `goddp doctor` runs: it meets the others, checks that an all-reduce gives the right sum, and
// measures its latency and bandwidth. Rank 0 prints the result as one line of JSON.
//
//	goddp run --nproc-per-node 2 github.com/goddp/goddp/cmd/goddp-selftest --backend gloo
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// result is what rank 0 prints, after "goddp-selftest ".
type result struct {
	Backend   string  `json:"backend"`
	Ranks     int     `json:"ranks"`
	StartMS   float64 `json:"start_ms"`   // init_process_group
	LatencyUS float64 `json:"latency_us"` // median of all-reducing 4 bytes
	Bytes     int     `json:"bytes"`
	GBPerS    float64 `json:"gb_per_s"` // size of the tensor by time, the best of several
	BusGBPerS float64 `json:"bus_gb_per_s"`
}

var (
	backend = flag.String("backend", "gloo", "gloo or nccl")
	size    = flag.Int("mib", 64, "size of the large all-reduce in MiB")
)

func main() {
	flag.Parse()
	os.Exit(launch.Main(func(ctx context.Context) error { return launch.Run(ctx, 2, test) }))
}

func test(ctx context.Context, env launch.Env) (err error) {
	device := gotch.CPU
	if *backend == torchddp.NCCL {
		gpu, err := env.GPU(launch.GPUs().Count())
		if err != nil {
			return err
		}
		device = gotch.CudaBuilder(uint(gpu))
	}
	begin := time.Now()
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Backend: *backend, Device: device, Timeout: 30 * time.Second})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()
	r := result{Backend: *backend, Ranks: pg.Size(), Bytes: *size << 20, StartMS: milli(time.Since(begin))}

	small, err := tdp.FromSlice([]float32{float32(pg.Rank() + 1)}, []int64{1}, device)
	if err != nil {
		return err
	}
	if err := pg.AllReduce(small, torchddp.Sum); err != nil {
		return err
	}
	if err := holds(small, float32(pg.Size()*(pg.Size()+1)/2)); err != nil {
		return err
	}
	var times []time.Duration
	for range 200 {
		took, err := timed(pg, small)
		if err != nil {
			return err
		}
		times = append(times, took)
	}
	slices.Sort(times)
	r.LatencyUS = milli(times[len(times)/2]) * 1000

	large, err := tdp.FromSlice(make([]float32, r.Bytes/4), []int64{int64(r.Bytes / 4)}, device)
	if err != nil {
		return err
	}
	best := time.Hour
	for range 5 {
		took, err := timed(pg, large)
		if err != nil {
			return err
		}
		best = min(best, took)
	}
	if err := holds(large, 0); err != nil {
		return err
	}
	r.GBPerS = float64(r.Bytes) / best.Seconds() / 1e9
	r.BusGBPerS = r.GBPerS * 2 * float64(pg.Size()-1) / float64(pg.Size())
	if pg.Rank() == 0 {
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		fmt.Printf("goddp-selftest %s\n", line)
	}
	return pg.Barrier()
}

func milli(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// timed is how long an all-reduce takes until its result can be read.
func timed(pg *torchddp.ProcessGroup, t *ts.Tensor) (time.Duration, error) {
	begin := time.Now()
	if err := pg.AllReduce(t, torchddp.Sum); err != nil {
		return 0, err
	}
	if pg.Device().IsCuda() {
		one, err := t.Narrow(0, 0, 1, false)
		if err != nil {
			return 0, err
		}
		defer one.MustDrop()
		if _, err := tdp.ToSlice[float32](one); err != nil { // waits for the GPU
			return 0, err
		}
	}
	return time.Since(begin), nil
}

func holds(t *ts.Tensor, want float32) error {
	v, err := tdp.ToSlice[float32](t)
	if err != nil {
		return err
	}
	for _, i := range []int{0, len(v) - 1} {
		if v[i] != want {
			return fmt.Errorf("an all-reduce gave %v at %d and not %v", v[i], i, want)
		}
	}
	return nil
}
