package ckptool_test

import (
	"fmt"
	"os"

	"github.com/goddp/goddp/checkpoint/ckptool"
)

// What is in a file that Python saved.
func ExampleShow() {
	err := ckptool.Show(os.Stdout, "../ptfile/testdata/linear.ckpt", ckptool.ShowOptions{Verify: true})
	fmt.Println(err)
	// Output:
	// ../ptfile/testdata/linear.ckpt: torch.save, 1.9 KiB
	// 2 tensors, 21 elements, 84 B of memory: 2 float32
	// serialization id 0561108523619670529407045371265209944524
	// all of it can be read, and the checksums are right
	// weight  float32 [1, 20]  80 B
	// bias    float32 [1]  4 B
	// module versions: 1 for 1 modules
	// <nil>
}
