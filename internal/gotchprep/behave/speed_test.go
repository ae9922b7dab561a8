package behave

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
)

// The Python side adds n times when told to, and answers with the seconds of one.
const pythonAdd = `
import sys, time, torch
torch.set_num_threads(1)
a, b = torch.ones(20), torch.ones(20)
def run(n):
    start = time.perf_counter()
    for _ in range(n):
        t = a + b
    return (time.perf_counter() - start) / n
run(1000)
for line in sys.stdin:
    print(run(int(line)), flush=True)
`

func addAndDrop(n int) time.Duration {
	a, b := ones(20), ones(20)
	defer a.MustDrop()
	defer b.MustDrop()
	start := time.Now()
	for range n {
		c := a.MustAdd(b, false)
		c.MustDrop()
	}
	return time.Since(start)
}

// BenchmarkAddAgainstPython gives the time of a small add with its Drop as a multiple of Python's: the two run in turns,
// so that a busy machine slows both. It is a benchmark, not a test, because no bound on time holds on every machine.
func BenchmarkAddAgainstPython(t *testing.B) {
	cmd := exec.Command(testenv.Python(t), "-c", pythonAdd)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); cmd.Wait() }()
	reader := bufio.NewReader(out)
	const n = 20_000
	addAndDrop(1000)
	var ratios []float64
	for t.Loop() {
		mine := addAndDrop(n).Seconds() / n
		var theirs float64
		fmt.Fprintln(in, n)
		line, err := reader.ReadString('\n')
		if err != nil && err != io.EOF {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(line, &theirs); err != nil {
			t.Fatal(err)
		}
		ratios = append(ratios, mine/theirs)
	}
	slices.Sort(ratios)
	t.ReportMetric(ratios[len(ratios)/2], "of-Python's-time")
	t.ReportMetric(0, "ns/op") // of a turn: says nothing
}

func BenchmarkAdd(b *testing.B) {
	b.ReportAllocs()
	addAndDrop(b.N)
}

func BenchmarkAddInPlace(b *testing.B) {
	x, y := ones(20), ones(20)
	b.ReportAllocs()
	for b.Loop() {
		x.MustAdd_(y)
	}
}

func BenchmarkAddWithoutDrop(b *testing.B) {
	x, y := ones(20), ones(20)
	b.ReportAllocs()
	for b.Loop() {
		x.MustAdd(y, false)
	}
}
