package ptfile_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"log"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// A dict with a tensor, as torch.save writes it, and what is known of it before its bytes are read.
func Example() {
	var bytesOf []byte
	for _, v := range []float32{1, 2, 3, 4} {
		bytesOf, _ = binary.Append(bytesOf, binary.LittleEndian, v)
	}
	weight := &ptfile.Tensor{
		DType: ptfile.Float32, Shape: []int64{2, 2}, Stride: ptfile.ContiguousStride([]int64{2, 2}),
		Storage: ptfile.NewStorage(bytesOf, "cpu"),
	}
	var out bytes.Buffer
	value := pickle.NewOrderedDict().Set("weight", weight)
	if err := ptfile.Write(&out, ptfile.Stem("model.pt"), value, ptfile.WriteOptions{}); err != nil {
		log.Fatal(err)
	}

	file, err := ptfile.ReadBytes(out.Bytes(), ptfile.ReadOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for name, v := range file.Value.(*pickle.Dict).Strings() {
		t := v.(*ptfile.Tensor)
		data, err := t.Storage.Data()
		fmt.Println(name, t.DType, t.Shape, len(data), "bytes", err)
	}
	// Output: weight float32 [2 2] 16 bytes <nil>
}
