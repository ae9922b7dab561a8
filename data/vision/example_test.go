package vision_test

import (
	"context"
	"fmt"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/data/vision"
)

// Made-up digits stand in for MNIST where there are no files; without Synthetic the same code reads them from Root.
func Example() {
	ctx := context.Background()
	p, err := transforms.Compose(transforms.ToTensor{}, transforms.Normalize{Mean: []float64{0.1307}, Std: []float64{0.3081}})
	if err != nil {
		panic(err)
	}
	train, err := vision.MNIST(ctx, vision.Options{Root: "data", Synthetic: true, Transform: p})
	if err != nil {
		panic(err)
	}
	loader, err := data.NewDataLoader(train, data.Options{BatchSize: 64, Shuffle: true, Workers: 2})
	if err != nil {
		panic(err)
	}
	defer loader.Close()
	for batch, err := range loader.All(ctx) {
		if err != nil {
			panic(err)
		}
		fmt.Println(train.Name(), train.Len(), batch.Input().MustSize(), batch.Target().MustSize())
		break
	}
	// Output: MNIST (train) 60000 [64 1 28 28] [64]
}
