package torchddp

import (
	"errors"
	"fmt"
	"testing"

	"github.com/goddp/goddp/models/nn"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

func TestJoinIsLocalTraining(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		m, alone, err := pairOf(mlp)
		if err != nil {
			return err
		}
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		count := func(rank int) int { return 2 * rank } // rank 0 has none
		batch := func(rank, k int) (x, y *ts.Tensor, err error) {
			xy, err := draws(uint64(10*rank+k), []int64{2, 4}, []int64{2, 3})
			if err != nil {
				return nil, nil, err
			}
			return xy[0], xy[1], nil
		}
		err = d.Join(JoinOptions{DivideByActive: true}, func() error {
			for k := range count(pg.Rank()) {
				liveZero(m)
				x, y, err := batch(pg.Rank(), k)
				if err != nil {
					return err
				}
				if err := ddpStep(d, x, y); err != nil {
					return err
				}
				g, err := gradList(m)
				if err != nil {
					return err
				}
				if err := descend(m, g); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		for k := range count(2) {
			liveZero(alone)
			active := 0.0
			for rank := range 3 {
				if k < count(rank) {
					active++
					x, y, err := batch(rank, k)
					if err != nil {
						return err
					}
					if err := localStep(alone, x, y); err != nil {
						return err
					}
				}
			}
			g, err := gradList(alone)
			if err != nil {
				return err
			}
			for _, g := range g {
				g.MustDivScalar_(ts.FloatScalar(active))
			}
			if err := descend(alone, g); err != nil {
				return err
			}
		}
		want := collect(alone.NamedParameters())
		for i, p := range collect(m.NamedParameters()) {
			if err := near(p.Name, p.Tensor, want[i].Tensor, 1e-12); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestJoinWithEverything(t *testing.T) {
	conv := func() nn.Module {
		return nn.NewSequential(nn.Must(nn.NewConv2d(1, 2, nn.Size{3}, nn.ConvOptions{})), nn.Must(nn.NewBatchNorm2d(2, nn.BatchNormOptions{})),
			nn.NewReLU(), nn.NewFlatten(), denseLayer(2*4*4, 3))
	}
	for _, c := range []struct {
		name   string
		unused bool
		o      DDPOptions
		hook   bool
		sync   int // every so many steps are synchronised
		counts []int
	}{
		{name: "buffers", sync: 1, counts: []int{3, 5}},
		{name: "a rank without batches", sync: 1, counts: []int{0, 3}},
		{name: "view", o: DDPOptions{GradientAsBucketView: true}, sync: 1, counts: []int{4, 1}},
		{name: "hook", hook: true, sync: 1, counts: []int{2, 5, 3}},
		{name: "no sync", sync: 2, counts: []int{3, 6}},
		{name: "unused", unused: true, o: DDPOptions{FindUnusedParameters: true}, sync: 1, counts: []int{2, 4}},
		{name: "small buckets", o: DDPOptions{BucketCapMB: 0.0001}, sync: 1, counts: []int{5, 2}},
		{name: "even", sync: 1, counts: []int{3, 3}},
	} {
		t.Run(c.name, func(t *testing.T) {
			group(t, len(c.counts), func(pg *ProcessGroup) error {
				net := nn.NewSequential(conv())
				if c.unused {
					net = nn.NewSequential(conv(), denseLayer(3, 3))
				}
				d, err := NewDDP(net, pg, c.o)
				if err != nil {
					return err
				}
				defer d.Close()
				if c.hook {
					if err := d.RegisterBuiltinCommHook(AllReduceHook); err != nil {
						return err
					}
				}
				step := func() error {
					return runOne(d, func() *ts.Tensor {
						return sumOf(net.At(0), ts.MustRand([]int64{4, 1, 6, 6}, gotch.Float, gotch.CPU))
					})
				}
				err = d.Join(JoinOptions{}, func() error {
					for k := range c.counts[pg.Rank()] {
						if (k+1)%c.sync != 0 {
							if err := d.NoSync(step); err != nil {
								return err
							}
							continue
						}
						if err := step(); err != nil {
							return err
						}
						liveDescend(net.At(0))
						liveZero(net)
					}
					return nil
				})
				if err != nil {
					return err
				}
				if err := d.Audit(); err != nil {
					return err
				}
				data, err := d.LoggingData()
				if err == nil && !data.JoinUnevenInputs {
					err = errors.New("the logging data does not tell of the join")
				}
				if err == nil && c.name == "even" {
					err = step() // and training goes on as before
				}
				return err
			})
		})
	}
}

func TestJoinPassesErrorsOn(t *testing.T) {
	mine := errors.New("mine")
	group(t, 2, func(pg *ProcessGroup) error {
		d, err := NewDDP(product(1), pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		if err := d.Join(JoinOptions{}, func() error { return mine }); !errors.Is(err, mine) {
			return fmt.Errorf("got %v", err)
		}
		if err := d.Join(JoinOptions{}, func() error { return d.Join(JoinOptions{}, func() error { return nil }) }); !errors.Is(err, ErrValue) {
			return fmt.Errorf("a join in a join: %v", err)
		}
		return nil
	})
}
