package checkpoint_test

import (
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
)

// Save a state_dict and a few numbers, as a training loop of PyTorch does, and read them back.
func Example() {
	dir, err := os.MkdirTemp("", "checkpoint")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "model.pt")

	weight := ts.MustOfSlice([]float32{1, 2, 3})
	model := checkpoint.NewStateDict().Set("weight", weight).SetVersion("", 1)
	if err := checkpoint.Save(path, checkpoint.NewDict().Set("epoch", 3).Set("model", model)); err != nil {
		log.Fatal(err)
	}

	ckpt, err := checkpoint.Load(path, checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CPU)})
	if err != nil {
		log.Fatal(err)
	}
	epoch, err := checkpoint.Get[int64](ckpt, "epoch")
	if err != nil {
		log.Fatal(err)
	}
	sd, err := checkpoint.Get[*checkpoint.StateDict](ckpt, "model")
	if err != nil {
		log.Fatal(err)
	}
	w, _ := sd.Get("weight")
	fmt.Println(epoch, sd.Names(), w.MustSize())
	// Output: 3 [weight] [3]
}
