package main

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
)

var mnist = benchmark{
	name: "mnist", title: "An epoch of MNIST",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		root, err := h.imageFiles(ctx)
		if err != nil {
			return nil, err
		}
		t := record.Table{First: "60,000 images", Ratio: "ratio"}
		per := record.Table{First: "an image of one rank", Ratio: "ratio"}
		if h.options.quick {
			t.First = "12,000 images"
		}
		err = h.both(ctx, "mnist", setup{ranks: 2, args: mnistArgs{root}}, func(players ...pair.Player) error {
			for _, c := range []struct{ do, what string }{{"epoch", "epoch"}, {"load", "loading alone"}} {
				turns, err := h.plan(5, 2).Play(ctx, pair.Request{Do: c.do}, players...)
				if err != nil {
					return err
				}
				row := record.Compare(c.what, record.Seconds, "seconds", turns)
				if c.do == "epoch" {
					row = row.AtMost("mnist", 0.25)
				}
				t.Rows = append(t.Rows, row)
				per.Rows = append(per.Rows, record.Compare(c.what, record.Seconds, "an image", turns))
				t.Sides, per.Sides = record.Names(turns), record.Names(turns)
			}
			return nil
		})
		return []record.Table{t, per}, err
	},
}

// imageFiles makes image files in the formats of MNIST and CIFAR-10, once, and gives their folder.
func (h *harness) imageFiles(ctx context.Context) (string, error) {
	if h.images != "" {
		return h.images, nil
	}
	root := filepath.Join(h.tmp, "images")
	cmd := exec.CommandContext(ctx, h.python, h.script("files"), root,
		strconv.Itoa(h.pick(60000, 12000)), strconv.Itoa(h.pick(10000, 2000)))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(err, errors.New(string(out)))
	}
	h.images = root
	return root, nil
}

type mnistArgs struct{ Root string }

// mnistSide is a rank that trains on MNIST.
func mnistSide(ctx context.Context, args mnistArgs) (err error) {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()
	if err := torchddp.ManualSeed(0); err != nil {
		return err
	}
	toTensor, err := transforms.Compose(transforms.ToTensor{})
	if err != nil {
		return err
	}
	set, err := vision.MNIST(ctx, vision.Options{Root: args.Root, Transform: toTensor})
	if err != nil {
		return err
	}
	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()})
	if err != nil {
		return err
	}
	batches, err := data.NewDataLoader(set, data.Options{BatchSize: 64, Sampler: sampler})
	if err != nil {
		return err
	}
	defer batches.Close()
	model, err := models.NewSimpleNet()
	if err != nil {
		return err
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ddp.Close()) }()
	opt, err := optim.NewAdam(model.NamedParameters(), optim.AdamOptions{LR: 1e-3})
	if err != nil {
		return err
	}
	defer opt.Close()
	total := 0.0
	addLoss := func(loss *ts.Tensor) error {
		v, err := tdp.ToSlice[float32](loss)
		if err == nil {
			total += float64(v[0])
		}
		return err
	}
	epoch := 0
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		if r.Do != "epoch" && r.Do != "load" {
			return nil, pair.Unknown(r)
		}
		images := 0
		a, err := pair.Measure(1, func() error {
			sampler.SetEpoch(epoch)
			epoch++
			for batch, err := range batches.All(ctx) {
				if err != nil {
					return err
				}
				images += batch.Len()
				if r.Do == "load" {
					continue
				}
				if err := trainStep(ddp, opt, nn.CrossEntropyLoss{}, batch.Input(), batch.Target(), addLoss); err != nil {
					return err
				}
			}
			return nil
		})
		if err == nil {
			a["an image"] = []float64{a["seconds"][0] / float64(images)}
		}
		return a, err
	})
}
