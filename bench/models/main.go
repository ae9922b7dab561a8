// Command models measures a training step of a residual network in Go beside the same step in Python.
//
//	go run ./bench/models [-net resnet50] [-batch 4] [-size 128] [-rounds 9]
//
// Both sides run as processes of their own and take turns, so that whatever else the machine does falls on both. It
// prints the median time of a step, the peak memory of each process, and their ratios; the losses must be equal.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
)

type options struct {
	Net                  string
	Batch, Size, Threads int
	Device               string
}

// report is what a side prints: Base once, the others after every turn.
type report struct {
	Base, Peak         int64
	Seconds, CPU, Loss float64 // CPU: the processor time of all threads
}

func main() {
	var o options
	flag.StringVar(&o.Net, "net", "resnet50", "torchvision's name of the network")
	flag.IntVar(&o.Batch, "batch", 4, "images a step")
	flag.IntVar(&o.Size, "size", 128, "height and width of an image")
	flag.IntVar(&o.Threads, "threads", runtime.NumCPU(), "threads of an operation")
	flag.StringVar(&o.Device, "device", "cpu", "cpu or cuda:N")
	rounds := flag.Int("rounds", 9, "turns of each side")
	steps := flag.Int("steps", 2, "steps a turn")
	python := flag.String("python", os.Getenv("GODDP_PYTHON"), "Python with torch and torchvision")
	script := flag.String("script", "bench/models/resnet.py", "the Python side")
	child := flag.String("child", "", "run the Go side with these options, as JSON")
	flag.Parse()
	var err error
	if *child != "" {
		err = train(*child)
	} else {
		err = compare(o, *rounds, *steps, *python, *script)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// side is one of the two processes.
type side struct {
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	base  int64
	peak  int64
	loss  []float64
	times []float64
	cpu   []float64
}

func start(name string, argv ...string) (*side, error) {
	s := &side{name: name, cmd: exec.Command(argv[0], argv[1:]...)}
	s.cmd.Stderr = os.Stderr
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.out = bufio.NewReader(out)
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	r, err := s.read()
	s.base = r.Base
	return s, err
}

func (s *side) read() (r report, err error) {
	line, err := s.out.ReadString('\n')
	if err != nil {
		return r, fmt.Errorf("%s ended: %w", s.name, err)
	}
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return r, fmt.Errorf("%s printed %q: %w", s.name, line, err)
	}
	return r, nil
}

func (s *side) turn(steps int) error {
	if _, err := fmt.Fprintln(s.in, steps); err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	r, err := s.read()
	s.times = append(s.times, r.Seconds)
	s.cpu = append(s.cpu, r.CPU)
	s.loss = append(s.loss, r.Loss)
	s.peak = r.Peak
	return err
}

func (s *side) end() error { return errors.Join(s.in.Close(), s.cmd.Wait()) }

func compare(o options, rounds, steps int, python, script string) error {
	if python == "" {
		return errors.New("where is Python with torch? Set GODDP_PYTHON or -python (`make setup-python` installs one)")
	}
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	g, err := start("Go", self, "-child", string(text))
	if err != nil {
		return err
	}
	p, err := start("Python", python, filepath.FromSlash(script), string(text))
	if err != nil {
		return errors.Join(err, g.end())
	}
	for round := range rounds + 1 {
		order := []*side{g, p}
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, s := range order {
			if err := s.turn(steps); err != nil {
				return err
			}
		}
	}
	same := slices.Equal(g.loss, p.loss)
	fmt.Printf("%s, batch %d of %dx%d on %s, %d threads; %d turns of %d steps each, after one to warm up\n", o.Net, o.Batch,
		o.Size, o.Size, o.Device, o.Threads, rounds, steps)
	for _, s := range []*side{g, p} {
		fmt.Printf("%-7s median %8.1f ms a step (best %.1f), processor time %8.1f ms, peak memory %6.0f MiB, before the first step %6.0f MiB\n",
			s.name, 1e3*median(s.times[1:]), 1e3*slices.Min(s.times[1:]), 1e3*median(s.cpu[1:]), mib(s.peak), mib(s.base))
	}
	var ratios []float64
	for i := range g.times[1:] {
		ratios = append(ratios, g.times[i+1]/p.times[i+1])
	}
	fmt.Printf("Go/Python: time %.3f (median of the turns' ratios %.3f), processor time %.3f, peak memory %.3f; losses equal: %v\n",
		median(g.times[1:])/median(p.times[1:]), median(ratios), median(g.cpu[1:])/median(p.cpu[1:]),
		float64(g.peak)/float64(p.peak), same)
	return errors.Join(g.end(), p.end())
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// train is the Go side.
func train(text string) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var o options
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	device := gotch.CPU
	if index, ok := strings.CutPrefix(o.Device, "cuda"); ok {
		n, _ := strconv.Atoi(strings.TrimPrefix(index, ":"))
		device = gotch.CudaBuilder(uint(n))
	}
	_, err = nn.Try(func() struct{} {
		nn.Check(tdp.SetNumThreads(o.Threads))
		nn.Check(tdp.ManualSeed(0))
		net := nn.Must(models.NewResNet(o.Net, models.ResNetOptions{}))
		nn.Check(net.To(device, gotch.Invalid))
		n := int64(o.Batch)
		host := nn.Must(tdp.Empty([]int64{n, 3, int64(o.Size), int64(o.Size)}, gotch.Float, gotch.CPU, false))
		nn.Check(tdp.Normal(host, 0, 1))
		nn.Check(tdp.Move(host, &device, gotch.Invalid, tdp.KeepFormat))
		labels := make([]int64, n)
		for i := range labels {
			labels[i] = int64(i) * 7 % 1000
		}
		y := nn.Must(tdp.FromSlice(labels, []int64{n}, device))
		opt := nn.Must(tdp.NewOptim(tdp.SGD))
		var params []*ts.Tensor
		for p := range net.Parameters() {
			params = append(params, p)
		}
		nn.Check(opt.AddGroup(params, tdp.OptimOptions{LR: 0.001, Momentum: 0.9}))
		say(report{Base: peak()})
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			steps := nn.Must(strconv.Atoi(lines.Text()))
			start, cpu := time.Now(), cpuTime()
			var value []float32
			for i := range steps {
				nn.Check(opt.ZeroGrad(true))
				out := net.ForwardT(host, true)
				loss := nn.CrossEntropyLoss{}.Forward(out, y)
				out.MustDrop()
				nn.Check(tdp.Backward(loss, nil, false, nil))
				nn.Check(opt.Step(nil, nil))
				if i == steps-1 {
					value = nn.Must(tdp.ToSlice[float32](loss))
				}
				loss.MustDrop()
			}
			n := float64(steps)
			say(report{Seconds: time.Since(start).Seconds() / n, CPU: (cpuTime() - cpu) / n, Loss: float64(value[0]), Peak: peak()})
		}
		nn.Check(lines.Err())
		nn.Check(opt.Close())
		return struct{}{}
	})
	return err
}

func say(r report) {
	text, err := json.Marshal(r)
	nn.Check(err)
	fmt.Println(string(text))
}

// cpuTime is the processor time that this process has used, in seconds.
func cpuTime() float64 {
	var u syscall.Rusage
	nn.Check(syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// peak is the most memory this process has had. On a GPU it is the host's: read the device's from nvidia-smi.
func peak() int64 {
	var u syscall.Rusage
	nn.Check(syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return u.Maxrss * 1024
}
