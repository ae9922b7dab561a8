package safetensors_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/checkpoint/safetensors"
)

func Example() {
	mask := &ptfile.Tensor{
		DType: ptfile.Uint8, Shape: []int64{3}, Stride: []int64{1}, Storage: ptfile.NewStorage([]byte{1, 0, 1}, "cpu"),
	}
	var out bytes.Buffer
	tensors := []safetensors.Tensor{{Name: "mask", Tensor: mask}}
	if err := safetensors.Write(&out, tensors, map[string]string{"format": "pt"}); err != nil {
		log.Fatal(err)
	}

	file, err := safetensors.Read(bytes.NewReader(out.Bytes()), int64(out.Len()))
	if err != nil {
		log.Fatal(err)
	}
	for _, t := range file.Tensors {
		fmt.Println(t.Name, t.DType, t.Shape)
	}
	fmt.Println(file.Metadata)
	// Output:
	// mask uint8 [3]
	// map[format:pt]
}
