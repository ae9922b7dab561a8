package main

import (
	"context"

	"github.com/sugarme/gotch"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/internal/tdp"
)

type loaderArgs struct{ Root string }

var loader = benchmark{
	name: "loader", title: "The loader",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		root, err := h.imageFiles(ctx)
		if err != nil {
			return nil, err
		}
		t := record.Table{First: "one of", Ratio: "ratio"}
		behind := record.Table{Caption: "Behind a batch:", First: "in one batch", Sides: []string{"Go"}}
		err = h.both(ctx, "loader", setup{args: loaderArgs{root}}, func(players ...pair.Player) error {
			for _, c := range []struct {
				do, theirs, what, batch string
				atMost                  float64
			}{
				{"cifar", "cifar", "CIFAR-10, an image", "CIFAR-10", 0.1},
				{"cifar reuse", "cifar", "CIFAR-10 with `Reuse`, an image", "CIFAR-10 with `Reuse`", 0},
				{"mnist", "mnist", "MNIST, an image", "MNIST", 0},
				{"toy", "toy", "toy set, a batch", "toy set", 0},
			} {
				plan := h.plan(5, 2)
				plan.Say = prefixed(plan.Say, c.batch+", ")
				turns, err := plan.PlayEach(ctx, func(p pair.Player) pair.Request {
					if p == players[0] {
						return pair.Request{Do: c.do, N: h.pick(50, 10)}
					}
					// Python needs no long passes to be measured.
					return pair.Request{Do: c.theirs, N: h.pick(5, 2), Size: h.pick(4000, 1000)}
				}, players...)
				if err != nil {
					return err
				}
				row := record.Compare(c.what, record.Seconds, "cpu", turns)
				if c.atMost > 0 {
					row = row.AtMost("", c.atMost)
				}
				t.Sides, t.Rows = record.Names(turns), append(t.Rows, row)
				for _, m := range []struct {
					metric, what string
					unit         record.Unit
				}{
					{"batch allocs", "allocations", record.Count}, {"batch bytes", "bytes of them", record.Bytes},
					{"batch cgo", "calls of C", record.Count},
				} {
					behind.Rows = append(behind.Rows, record.Compare(c.batch+", "+m.what, m.unit, m.metric, turns[:1]))
				}
			}
			return nil
		})
		return []record.Table{t, behind}, err
	},
}

// loaderSide passes over data sets.
func loaderSide(ctx context.Context, args loaderArgs) error {
	ofCIFAR := transforms.Normalize{Mean: []float64{0.4914, 0.4822, 0.4465}, Std: []float64{0.2470, 0.2435, 0.2616}}
	ofMNIST := transforms.Normalize{Mean: []float64{0.1307}, Std: []float64{0.3081}}
	augment, err := transforms.Compose(transforms.RandomCrop{Height: 32, Padding: 4}, transforms.RandomHorizontalFlip{},
		transforms.ToTensor{}, ofCIFAR)
	if err != nil {
		return err
	}
	normal, err := transforms.Compose(transforms.ToTensor{}, ofMNIST)
	if err != nil {
		return err
	}
	cifar, err := vision.CIFAR10(ctx, vision.Options{Root: args.Root, Transform: augment})
	if err != nil {
		return err
	}
	digits, err := vision.MNIST(ctx, vision.Options{Root: args.Root, Transform: normal})
	if err != nil {
		return err
	}
	toy, err := data.NewRandomToy(2048)
	if err != nil {
		return err
	}
	// pass goes over a set so many times, and counts by images or by batches.
	pass := func(src data.Source, times int, byBatch bool, o data.Options) (pair.Answer, error) {
		l, err := data.NewDataLoader(src, o)
		if err != nil {
			return nil, err
		}
		defer l.Close()
		images, batches := 0, 0
		a, err := pair.Measure(1, func() error {
			for epoch := range times {
				l.SetEpoch(epoch)
				for batch, err := range l.All(ctx) {
					if err != nil {
						return err
					}
					images += batch.Len()
					batches++
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		one := float64(images)
		if byBatch {
			one = float64(batches)
		}
		each := func(metric string, by float64) []float64 { return []float64{a[metric][0] / by} }
		n := float64(batches)
		return pair.Answer{"cpu": each("cpu", one), "seconds": each("seconds", one),
			"batch allocs": each("allocs", n), "batch bytes": each("bytes", n), "batch cgo": each("cgo", n)}, nil
	}
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		switch r.Do {
		case "cifar":
			return pass(cifar, 1, false, data.Options{BatchSize: 128, Shuffle: true})
		case "cifar reuse":
			return pass(cifar, 1, false, data.Options{BatchSize: 128, Shuffle: true, Reuse: true})
		case "mnist":
			return pass(digits, 1, false, data.Options{BatchSize: 64, Shuffle: true})
		case "toy":
			s, err := data.NewDistributedSampler(toy.Len(), data.DistributedOptions{Replicas: 1})
			if err != nil {
				return nil, err
			}
			return pass(toy, r.N, true, data.Options{BatchSize: 32, Sampler: s})
		case "create": // the two tensors of a toy batch alone
			return pair.Measure(r.N, func() error {
				for range r.N {
					for _, width := range []int64{20, 1} {
						x, err := tdp.Empty([]int64{32, width}, gotch.Float, gotch.CPU, false)
						if err != nil {
							return err
						}
						x.MustDrop()
					}
				}
				return nil
			})
		}
		return nil, pair.Unknown(r)
	})
}
