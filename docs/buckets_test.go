package docs

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// TestBuckets cuts the buckets that how-ddp-works.md shows.
func TestBuckets(t *testing.T) {
	blocks := onePage(t, "how-ddp-works.md").blocks
	i := slices.IndexFunc(blocks, func(b block) bool { return b.mark == "buckets" })
	if i < 0 {
		t.Fatal("how-ddp-works.md does not show any buckets")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	store, err := torchddp.NewHashStore()
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	pg, err := torchddp.InitProcessGroup(t.Context(), torchddp.InitOptions{
		Backend: torchddp.Gloo, Store: store, WorldSize: 1, GlooInterfaces: []string{"lo"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pg.Destroy()
	model, err := models.NewResNet50(models.ResNetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer model.Drop()
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer ddp.Close()
	x := ts.MustZeros([]int64{2, 3, 32, 32}, gotch.Float, gotch.CPU)
	defer x.MustDrop()
	for range 3 { // the record of the second iteration is made in the third
		out, err := ddp.Forward(x)
		if err != nil {
			t.Fatal(err)
		}
		loss := out.MustSum(gotch.Float, true)
		err = ddp.Backward(loss)
		loss.MustDrop()
		if err != nil {
			t.Fatal(err)
		}
	}
	l, err := ddp.LoggingData()
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("TotalParameterSizeBytes: %d\nBucketSizes:             %v\nRebuiltBucketSizes:      %v\n",
		l.TotalParameterSizeBytes, l.BucketSizes, l.RebuiltBucketSizes)
	if want := blocks[i].text; got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if l.NumParameterTensors != 161 {
		t.Errorf("ResNet-50 has %d parameters, not the 161 of the page", l.NumParameterTensors)
	}
}
