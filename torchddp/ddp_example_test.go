package torchddp_test

import (
	"context"
	"fmt"
	"log"
	"runtime"
	"sync"

	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Two ranks feed the same model different data, and get the same gradients: the mean of what each would have got alone.
func ExampleNewDDP() {
	store, err := torchddp.NewHashStore()
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	rank := func(rank int) (gradient float64, err error) {
		pg, err := torchddp.InitProcessGroup(context.Background(), torchddp.InitOptions{
			Backend: torchddp.Gloo, Store: store, Rank: rank, WorldSize: 2, GlooInterfaces: []string{"lo"},
		})
		if err != nil {
			return 0, err
		}
		defer pg.Destroy()
		model, err := nn.NewLinear(1, 1, nn.LinearOptions{NoBias: true})
		if err != nil {
			return 0, err
		}
		defer model.Drop()
		ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
		if err != nil {
			return 0, err
		}
		defer ddp.Close()

		x := ts.MustOfSlice([]float32{float32(10 * (rank + 1))}).MustView([]int64{1, 1}, true)
		defer x.MustDrop()
		out, err := ddp.Forward(x)
		if err != nil {
			return 0, err
		}
		loss := out.MustSum(gotch.Float, true) // its gradient is x: 10 on rank 0, 20 on rank 1
		defer loss.MustDrop()
		if err := ddp.Backward(loss); err != nil {
			return 0, err
		}
		g := model.Weight.MustGrad(false)
		defer g.MustDrop()
		return g.Float64Values()[0], nil
	}

	var gradients [2]float64
	var wg sync.WaitGroup
	for r := range gradients {
		wg.Go(func() {
			runtime.LockOSThread() // package launch does that for ranks that are processes
			var err error
			if gradients[r], err = rank(r); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	fmt.Println(gradients)
	// Output: [15 15]
}
