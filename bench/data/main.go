// Command data holds the Go loader against Python's DataLoader with torchvision's transforms: one run, one machine,
// one core each, the two sides taking turns round by round. Times are processor time of the whole process, the Go
// collector's included, so that other work on the machine does not count.
//
//	GODDP_PYTHON=... go run ./bench/data
//
// It prints the medians and what the data issue asks for.
package main

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/spf13/pflag"
	"github.com/sugarme/gotch"
)

//go:embed peer.py
var script string

func main() {
	python := pflag.String("python", os.Getenv("GODDP_PYTHON"), "interpreter with torch and torchvision (default $GODDP_PYTHON)")
	rounds := pflag.Int("rounds", 5, "times each side measures")
	images := pflag.Int("images", 10000, "CIFAR images made")
	pflag.Parse()
	if err := run(*python, *rounds, *images); err != nil {
		fmt.Fprintln(os.Stderr, "bench/data:", err)
		os.Exit(1)
	}
}

// peer is the Python process.
type peer struct {
	cmd *exec.Cmd
	in  interface{ Write([]byte) (int, error) }
	out *bufio.Scanner
}

func start(python, root string, images int) (*peer, error) {
	if python == "" {
		return nil, errors.New("no Python: set GODDP_PYTHON or --python (make setup-python installs one)")
	}
	cmd := exec.Command(python, "-c", script, root, fmt.Sprint(images))
	cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &peer{cmd, in, bufio.NewScanner(out)}, cmd.Start()
}

func (p *peer) read(v any) error {
	if !p.out.Scan() {
		return errors.New("the Python side ended")
	}
	return json.Unmarshal(p.out.Bytes(), v)
}

func (p *peer) ask(what string) (v float64, err error) {
	if _, err := fmt.Fprintln(p.in, what); err != nil {
		return 0, err
	}
	return v, p.read(&v)
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

func run(python string, rounds, images int) error {
	runtime.GOMAXPROCS(1) // one core, like the Python side
	if err := tdp.SetNumThreads(1); err != nil {
		return err
	}
	root, err := os.MkdirTemp("", "goddp-bench-data-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(root)
	p, err := start(python, root, images)
	if err != nil {
		return err
	}
	defer func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
	}()
	var versions map[string]string
	if err := p.read(&versions); err != nil {
		return err
	}
	fmt.Printf("Go %s against Python torch %s, torchvision %s; one core each, processor time, medians of %d rounds in turn\n\n",
		runtime.Version(), versions["torch"], versions["torchvision"], rounds)
	b, err := load(root)
	if err != nil {
		return err
	}
	var cifar, cifarReuse, cifarPy, mnist, mnistPy, train, toy, create, toyPy, files []float64
	for range rounds {
		for _, m := range []struct {
			to   *[]float64
			what func() (float64, error)
		}{
			{&cifar, func() (float64, error) { return b.rate(b.cifar, data.Options{BatchSize: 128, Shuffle: true}) }},
			{&cifarReuse, func() (float64, error) {
				return b.rate(b.cifar, data.Options{BatchSize: 128, Shuffle: true, Reuse: true})
			}},
			{&cifarPy, func() (float64, error) { return p.ask("cifar10") }},
			{&files, b.files},
			{&mnist, func() (float64, error) { return b.rate(b.mnist, data.Options{BatchSize: 64, Shuffle: true}) }},
			{&mnistPy, func() (float64, error) { return p.ask("mnist_load") }},
			{&train, func() (float64, error) { return p.ask("mnist_train") }},
			{&toy, b.toyBatch},
			{&create, b.create},
			{&toyPy, func() (float64, error) { return p.ask("toy_batch") }},
		} {
			v, err := m.what()
			if err != nil {
				return err
			}
			*m.to = append(*m.to, v)
		}
	}
	fmt.Printf("CIFAR-10, crop+flip+tensor+normalise, batch 128, images/s   Go %8.0f   Go Reuse %8.0f   Python %7.0f   ratio %.1f (wanted: 10)\n",
		median(cifar), median(cifarReuse), median(cifarPy), median(cifar)/median(cifarPy))
	fmt.Printf("MNIST, tensor+normalise, batch 64, images/s                 Go %8.0f   Python %7.0f   ratio %.1f\n",
		median(mnist), median(mnistPy), median(mnist)/median(mnistPy))
	epoch := 60000 / median(mnist)
	fmt.Printf("MNIST MLP epoch: loading %.0f ms + %.0f ms once for the raw files; training steps (PyTorch's) %.0f ms   loading's part %.1f %% (wanted: under 5)\n",
		1000*epoch, 1000*median(files), 1000*median(train), 100*epoch/(epoch+median(train)))
	fmt.Printf("Toy set, batch 32, us a batch                               Go %.2f, of which making the tensors %.2f, the rest %.2f (wanted: under 5)   Python %.1f   ratio %.0f\n",
		1e6*median(toy), 1e6*median(create), 1e6*(median(toy)-median(create)), 1e6*median(toyPy), median(toyPy)/median(toy))
	return nil
}

// used is the processor time that this process has taken.
func used() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic(err) // cannot fail on itself
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

type bench struct {
	root         string
	cifar, mnist *vision.Images
	toy          *data.TensorDataset
	norm         *transforms.Pipeline
}

func load(root string) (b *bench, err error) {
	ctx := context.Background()
	b = &bench{root: root}
	augment, err := transforms.Compose(transforms.RandomCrop{Height: 32, Padding: 4}, transforms.RandomHorizontalFlip{},
		transforms.ToTensor{}, transforms.Normalize{Mean: []float64{0.4914, 0.4822, 0.4465}, Std: []float64{0.2470, 0.2435, 0.2616}})
	if err != nil {
		return nil, err
	}
	if b.norm, err = transforms.Compose(transforms.ToTensor{}, transforms.Normalize{Mean: []float64{0.1307}, Std: []float64{0.3081}}); err != nil {
		return nil, err
	}
	if b.cifar, err = vision.CIFAR10(ctx, vision.Options{Root: root, Transform: augment}); err != nil {
		return nil, err
	}
	if b.mnist, err = vision.MNIST(ctx, vision.Options{Root: root, Transform: b.norm}); err != nil {
		return nil, err
	}
	b.toy, err = data.NewRandomToy(2048)
	return b, err
}

// files is how long reading MNIST's raw files takes, in seconds.
func (b *bench) files() (float64, error) {
	if _, err := os.Stat(filepath.Join(b.root, "MNIST")); err != nil {
		return 0, err
	}
	t := used()
	_, err := vision.MNIST(context.Background(), vision.Options{Root: b.root, Transform: b.norm})
	return (used() - t).Seconds(), err
}

// rate is images a second over one pass.
func (b *bench) rate(src data.Source, o data.Options) (float64, error) {
	l, err := data.NewDataLoader(src, o)
	if err != nil {
		return 0, err
	}
	defer l.Close()
	n, t := 0, used()
	for batch, err := range l.All(context.Background()) {
		if err != nil {
			return 0, err
		}
		n += batch.Len()
	}
	return float64(n) / (used() - t).Seconds(), nil
}

const toyEpochs = 50

// toyBatch is seconds a batch of the toy set.
func (b *bench) toyBatch() (float64, error) {
	s, err := data.NewDistributedSampler(b.toy.Len(), data.DistributedOptions{Replicas: 1})
	if err != nil {
		return 0, err
	}
	l, err := data.NewDataLoader(b.toy, data.Options{BatchSize: 32, Sampler: s})
	if err != nil {
		return 0, err
	}
	defer l.Close()
	n, t := 0, used()
	for epoch := range toyEpochs {
		s.SetEpoch(epoch)
		for _, err := range l.All(context.Background()) {
			if err != nil {
				return 0, err
			}
			n++
		}
	}
	return (used() - t).Seconds() / float64(n), nil
}

// create is seconds for the two tensors of a batch alone.
func (b *bench) create() (float64, error) {
	const n = 64 * toyEpochs
	t := used()
	for range n {
		for _, width := range []int64{20, 1} {
			x, err := tdp.Empty([]int64{32, width}, gotch.Float, gotch.CPU, false)
			if err != nil {
				return 0, err
			}
			x.MustDrop()
		}
	}
	return (used() - t).Seconds() / n, nil
}
