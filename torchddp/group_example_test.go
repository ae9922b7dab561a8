package torchddp_test

import (
	"context"
	"fmt"
	"log"
	"runtime"
	"sync"

	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch/ts"
)

// Two ranks of one process, as tests have them. A job has one rank a process, and InitProcessGroup finds its place in
// the environment.
func ExampleProcessGroup_AllReduce() {
	store, err := torchddp.NewHashStore()
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	var wg sync.WaitGroup
	for rank := range 2 {
		wg.Go(func() {
			runtime.LockOSThread()
			pg, err := torchddp.InitProcessGroup(context.Background(), torchddp.InitOptions{
				Backend: torchddp.Gloo, Store: store, Rank: rank, WorldSize: 2, GlooInterfaces: []string{"lo"},
			})
			if err != nil {
				log.Fatal(err)
			}
			defer pg.Destroy()
			x := ts.MustOfSlice([]float32{float32(rank), 10})
			if err := pg.AllReduce(x, torchddp.Sum); err != nil {
				log.Fatal(err)
			}
			names, err := torchddp.AllGatherObject(pg, fmt.Sprintf("rank %d", rank))
			if err != nil {
				log.Fatal(err)
			}
			if rank == 0 {
				fmt.Println(x.Float64Values(), names)
			}
		})
	}
	wg.Wait()
	// Output: [1 20] [rank 0 rank 1]
}
