package optim_test

import (
	"fmt"
	"log"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/torchddp/optim"
)

// Brings w to the minimum of (w-3)² with a learning rate that falls.
func Example() {
	w := ts.MustOfSlice([]float32{0}).MustSetRequiresGrad(true, true)
	opt, err := optim.NewSGD([]*ts.Tensor{w}, optim.SGDOptions{LR: 0.2, Momentum: 0.5})
	if err != nil {
		log.Fatal(err)
	}
	defer opt.Close()
	schedule, err := optim.NewStepLR(opt, 20, 0.5)
	if err != nil {
		log.Fatal(err)
	}
	for range 60 {
		if err := opt.ZeroGrad(true); err != nil {
			log.Fatal(err)
		}
		loss := w.MustSubScalar(ts.FloatScalar(3), false).MustSquare(true).MustSum(gotch.Float, true)
		if err := loss.Backward(); err != nil {
			log.Fatal(err)
		}
		loss.MustDrop()
		if err := opt.Step(); err != nil {
			log.Fatal(err)
		}
		if err := schedule.Step(); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Printf("w = %.4f, learning rate %.3f\n", w.Float64Values()[0], opt.ParamGroups()[0].LR())
	// Output: w = 3.0000, learning rate 0.025
}
