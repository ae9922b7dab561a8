package behave

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// rss is the resident memory of this process in bytes.
func rss(t *testing.T) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Skipf("no /proc/self/statm to read the resident memory from: %v", err)
	}
	var size, resident int64
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * int64(os.Getpagesize())
}

// flat runs fn many times and fails if the resident memory grows by more than a few bytes each time: the smallest thing that
// can leak, a handle, takes 32. What the allocators and libtorch keep for later is theirs after the first half.
func flat(t *testing.T, times int, fn func()) {
	t.Helper()
	for range times / 2 {
		fn()
	}
	debug.FreeOSMemory()
	live, before := ts.LiveTensors(), rss(t)
	for range times {
		fn()
	}
	debug.FreeOSMemory()
	if grown := rss(t) - before; grown > 1<<20+int64(times)*8 {
		t.Errorf("%d rounds took %d bytes, %.1f each", times, grown, float64(grown)/float64(times))
	}
	if now := ts.LiveTensors(); now > live {
		t.Errorf("%d tensors live, %d before", now, live)
	}
}

// Each of gotch's 260 in-place operators left a C++ tensor behind.
func TestInPlaceLeaksNothing(t *testing.T) {
	x, y, s := ones(4), ones(4), ts.FloatScalar(1)
	address := x.Ctensor()
	flat(t, 100_000, func() {
		x.MustAdd_(y)
		x.MustMulScalar_(s)
		x.MustDetach_()
		x.MustZero_()
	})
	if x.Ctensor() != address {
		t.Error("the handle changed")
	}
}

// ZeroGrad left one as well, and through it every gradient.
func TestGradientsAreFreed(t *testing.T) {
	x := ts.MustOnes([]int64{1000}, gotch.Float, gotch.CPU)
	x.MustRequiresGrad_(true)
	flat(t, 20_000, func() {
		y := x.MustMul(x, false)
		z := y.MustSum(gotch.Float, true)
		z.MustBackward()
		z.MustDrop()
		x.ZeroGrad()
	})
}

func TestSlotsLeakNothing(t *testing.T) {
	x := ts.MustRandn([]int64{3, 4}, gotch.Float, gotch.CPU)
	flat(t, 100_000, func() {
		y := x.MustT(false)
		y.MustDrop()
		a, b := x.MustTopK(2, 1, true, true)
		a.MustDrop()
		b.MustDrop()
		for _, p := range x.MustSplit(1, 0, false) {
			p.MustDrop()
		}
		x.MustSize()
	})
}

// Errors are freed, and leave nothing half made.
func TestErrorsLeakNothing(t *testing.T) {
	x, y := ones(2), ones(3)
	flat(t, 40_000, func() {
		if _, err := x.Add(y, false); err == nil {
			t.Fatal("no error")
		}
	})
}

// Names and saved tensors that C gets as strings are freed.
func TestStringsLeakNothing(t *testing.T) {
	x := ts.MustOnes([]int64{2, 2}, gotch.Float, gotch.CPU)
	iv := ts.NewIValue(strings.Repeat("x", 200))
	s := ts.FloatScalar(2)
	flat(t, 50_000, func() {
		if _, err := x.ToString(80); err != nil {
			t.Fatal(err)
		}
		if _, err := s.ToString(); err != nil {
			t.Fatal(err)
		}
		c, err := iv.ToCIValue()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ts.IValueFromC(c); err != nil {
			t.Fatal(err)
		}
	})
}

//go:noinline
func longCall(x []float32) *ts.Tensor {
	// a and b have their last use in the call; without KeepAlive the collector frees them under C++'s hands.
	a := ts.MustOfSlice(x)
	b := ts.MustOfSlice(x)
	return a.MustOuter(b, false)
}

func TestCollectionDuringCall(t *testing.T) {
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !stop.Load() {
			runtime.GC() // and the finalizers that it finds
		}
	}()
	defer func() { stop.Store(true); <-done }()
	x := make([]float32, 1500)
	for i := range x {
		x[i] = 1
	}
	for i := range 200 {
		y := longCall(x)
		z := y.MustSum(gotch.Double, true)
		if got := z.Float64Values(true)[0]; got != 1500*1500 {
			t.Fatalf("round %d: got %v, want %d", i, got, 1500*1500)
		}
	}
}

// Tensors that nobody drops are freed by the collector, some time.
func TestCollectorIsTheSafetyNet(t *testing.T) {
	before := ts.LiveTensors()
	for range 10_000 {
		ones(10)
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
		if ts.LiveTensors() <= before {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d tensors are left of 10000", ts.LiveTensors()-before)
		}
	}
}

// A tensor is the same through a copy of the struct; the copy keeps it alive.
func TestCopyKeepsAlive(t *testing.T) {
	x := *ts.MustOfSlice([]float32{1, 2, 3})
	for range 3 {
		runtime.GC()
		time.Sleep(5 * time.Millisecond)
	}
	if got := x.Float64Values(); len(got) != 3 || got[2] != 3 {
		t.Errorf("got %v", got)
	}
	x.MustDrop()
}

func TestLiveCount(t *testing.T) {
	before := ts.LiveTensors()
	x := ones(1)
	if got := ts.LiveTensors() - before; got != 1 {
		t.Errorf("one tensor counts as %d", got)
	}
	x.MustDrop()
	x.MustDrop()
	if got := ts.LiveTensors() - before; got != 0 {
		t.Errorf("after Drop %d are left", got)
	}
	if text := ts.CheckCMemLeak(); !strings.Contains(text, fmt.Sprint(before)) {
		t.Errorf("%q does not say %d", text, before)
	}
}
