package main

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/csrc"
	"github.com/goddp/goddp/internal/libtorch"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
)

var layer = benchmark{
	name: "layer", title: "The layer's own cost",
	run: runLayer,
}

// layerArgs say of what the model is: parameters of one float, and batch norms, each 2 parameters and 3 buffers.
type layerArgs struct{ Params, Norms int }

func runLayer(ctx context.Context, h *harness) ([]record.Table, error) {
	baseline, err := h.compileLayer(ctx)
	if err != nil {
		return nil, err
	}
	sides := []string{"Go", "C++", "Python", "Go beyond C++", "Python beyond C++"}
	t, cpu := record.Table{First: "an iteration", Sides: sides}, record.Table{First: "processor time of it", Sides: sides}
	for _, args := range []layerArgs{{1, 0}, {10, 0}, {100, 0}, {1000, 0}, {0, 53}} {
		o := setup{ranks: 1, args: args}
		n := args.Params + 2*args.Norms
		goSide, err := h.goSide("layer", o)
		if err != nil {
			return nil, err
		}
		pySide, err := h.pySide("layer", o)
		if err != nil {
			return nil, err
		}
		cppSide := pair.Command{Name: "C++", Ranks: 1,
			Argv: []string{baseline, strconv.Itoa(args.Params), strconv.Itoa(args.Norms)}}
		// One core for all of them: what is measured is work, not how threads are spread.
		goSide.Cores, cppSide.Cores, pySide.Cores = h.cpus(setup{}), h.cpus(setup{}), h.cpus(setup{})
		err = h.with(ctx, []pair.Command{goSide, cppSide, pySide}, func(players ...pair.Player) error {
			plan := h.plan(21, 5)
			plan.Say = nil
			turns, err := plan.Play(ctx, pair.Request{Do: "step", N: max(20, 10000/(n+20))}, players...)
			if err != nil {
				return err
			}
			name := fmt.Sprintf("%d parameters", n)
			if args.Norms > 0 {
				name += fmt.Sprintf(" and %d buffers", 3*args.Norms)
			}
			row := layerRow(name, "seconds", turns)
			own := row.Values[3].Median
			row.Target = &record.Target{Key: "layer", AtMost: 20e-6 + 0.1e-6*float64(n), Seen: own, Unit: record.Seconds}
			t.Rows, cpu.Rows = append(t.Rows, row), append(cpu.Rows, layerRow(name, "cpu", turns))
			h.say(row)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return []record.Table{t, cpu}, nil
}

// layerRow has what Go, C++ and Python took, and what Go and Python took more than C++.
func layerRow(name, metric string, turns []pair.Turns) record.Row {
	row := record.Row{Name: name, Unit: record.Seconds}
	for _, side := range turns {
		row.Values = append(row.Values, side.Summary(metric))
	}
	for _, side := range []int{0, 2} {
		row.Values = append(row.Values, pair.Difference(turns[side], turns[1], metric))
	}
	return row
}

// manyParams is a model of many small parameters, and of batch norms that are not run.
type manyParams struct {
	nn.Base
	params []*ts.Tensor
	norms  nn.Module
}

func newManyParams(args layerArgs) (*manyParams, error) {
	return nn.Try(func() *manyParams {
		m := &manyParams{params: make([]*ts.Tensor, args.Params)}
		for i := range m.params {
			m.params[i] = nn.Must(nn.Trainable(ts.MustOnes([]int64{1}, gotch.Float, gotch.CPU)))
			nn.Check(m.RegisterParameter("p"+strconv.Itoa(i), &m.params[i]))
		}
		var norms []nn.Module
		for range args.Norms {
			norms = append(norms, nn.Must(nn.NewBatchNorm2d(1, nn.BatchNormOptions{})))
		}
		m.norms = nn.NewModuleList(norms...)
		nn.Check(nn.Register(m, "norms", &m.norms))
		return m
	})
}

// ForwardT is not called: the side adds up by itself, to keep its list of tensors.
func (m *manyParams) ForwardT(*ts.Tensor, bool) *ts.Tensor { panic("not used") }

// layerSide is DDP around many small parameters.
func layerSide(ctx context.Context, args layerArgs) (err error) {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()
	model, err := newManyParams(args)
	if err != nil {
		return err
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ddp.Close()) }()
	params := optim.Parameters(model)
	step := func() error {
		if err := tdp.ZeroGrad(params, true); err != nil {
			return err
		}
		outs, err := ddp.Run(func() ([]*ts.Tensor, error) {
			all := ts.MustCat(params, 0)
			defer all.MustDrop()
			return []*ts.Tensor{all.MustSum(gotch.Float, false)}, nil
		})
		if err != nil {
			return err
		}
		defer outs[0].MustDrop()
		return ddp.Backward(outs[0])
	}
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		return pair.Measure(r.N, func() error {
			for range r.N {
				if err := step(); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

//go:embed cpp/layer.cpp
var layerSource []byte

// compileLayer compiles the C++ side, once for each state of its source.
func (h *harness) compileLayer(ctx context.Context) (string, error) {
	cfg, err := libtorch.FromEnv()
	if err != nil {
		return "", err
	}
	in, err := libtorch.Find(ctx, cfg)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(slices.Concat(layerSource, []byte(in.Tree.Torch), []byte(csrc.Key())))
	dir := filepath.Join(in.Cache, "bench", hex.EncodeToString(sum[:8]))
	program := filepath.Join(dir, "layer")
	if _, err := os.Stat(program); err == nil {
		return program, nil
	}
	h.plan(1, 1).Say("compiling the C++ side, once: some minutes")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return "", err
	}
	source := filepath.Join(h.tmp, "layer.cpp")
	// Gloo's headers, which the wheel lacks and csrc stands in for.
	headers, err := fs.Sub(csrc.Files(), "tdp")
	if err != nil {
		return "", err
	}
	stand := filepath.Join(h.tmp, "headers")
	if err := errors.Join(os.WriteFile(source, layerSource, 0o666), os.CopyFS(stand, headers)); err != nil {
		return "", err
	}
	argv := []string{"-std=c++17", "-O2", "-g0", "-DUSE_C10D_GLOO", "-I" + stand}
	for _, d := range in.Tree.Include() {
		argv = append(argv, "-isystem", d)
	}
	lib := in.Tree.Lib()
	tmp := program + "." + strconv.Itoa(os.Getpid())
	argv = append(argv, source, "-o", tmp, "-L"+lib, "-Wl,-rpath,"+lib, "-Wl,--as-needed", "-ltorch_cpu", "-lc10")
	for _, d := range in.Tree.LibDirs {
		argv = append(argv, "-Wl,-rpath-link,"+d)
	}
	cxx := cfg.CXX
	if cxx == "" {
		cxx = "g++"
	}
	if out, err := exec.CommandContext(ctx, cxx, argv...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s bench/cpp/layer.cpp: %w\n%s", cxx, err, out)
	}
	return program, os.Rename(tmp, program)
}
