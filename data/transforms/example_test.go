package transforms_test

import (
	"fmt"

	"github.com/goddp/goddp/data/transforms"
)

func Example() {
	p, err := transforms.Compose(
		transforms.CenterCrop{Height: 1, Width: 2},
		transforms.ToTensor{},
		transforms.Normalize{Mean: []float64{0.5}, Std: []float64{0.5}},
	)
	if err != nil {
		panic(err)
	}
	img := transforms.Image{Pix: []byte{0, 0, 0, 0, 0, 255, 51, 0, 0, 0, 0, 0}, Height: 3, Width: 4, Channels: 1}
	out := make([]float32, 2)
	if err := p.Apply(img, out, nil); err != nil {
		panic(err)
	}
	fmt.Println(out)
	// Output: [1 -0.6]
}
