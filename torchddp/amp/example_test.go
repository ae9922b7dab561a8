package amp_test

import (
	"fmt"
	"log"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/torchddp/amp"
)

// A matrix product of float32 matrices runs in bfloat16 under autocast; what follows in float32 is up to the operation.
func ExampleAutocast() {
	x := ts.MustOfSlice([]float32{1, 2, 3, 4}).MustView([]int64{2, 2}, true)
	err := amp.Autocast(amp.Options{}, func() error {
		y, err := x.Matmul(x, false)
		if err != nil {
			return err
		}
		fmt.Println(y.DType())
		return y.Drop()
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output: BFloat16
}
