package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// doneKey tells the other ranks that DataParallel has been measured. They wait at the store, which costs no core and no
// GPU.
const doneKey = "dpvsddp/done"

// rank is what every rank does.
func (c *config) rank(ctx context.Context, pg *torchddp.ProcessGroup) (err error) {
	if err := oneMachine(pg.Size()); err != nil {
		return err
	}
	b, err := c.newBatches(gotch.CPU, pg.Rank(), pg.Size())
	b.drop()
	if err != nil {
		return err // before anything is measured
	}
	var dir string
	var dp figures
	if pg.Rank() == 0 {
		if dir, err = os.MkdirTemp("", "dpvsddp"); err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		if dp, err = runChild(ctx, dir, pg.Size()); err != nil {
			return err
		}
		if err := pg.Store().Set(doneKey, []byte{1}); err != nil {
			return err
		}
	} else if err := pg.Store().Wait(ctx, time.Hour, doneKey); err != nil {
		return fmt.Errorf("waiting for rank 0 to measure DataParallel: %w", err)
	}
	ddp, apart, err := c.ddp(pg, dir)
	if err != nil || pg.Rank() != 0 {
		return err
	}
	return c.print(os.Stdout, pg, dp, ddp, apart)
}

// ddp measures DistributedDataParallel, and on rank 0 how far its weights are from those in dir.
func (c *config) ddp(pg *torchddp.ProcessGroup, dir string) (f figures, apart float64, err error) {
	memory, err := watchMemory([]gotch.Device{pg.Device()})
	if err != nil {
		return f, 0, err
	}
	b, err := c.newBatches(pg.Device(), pg.Rank(), pg.Size())
	defer b.drop()
	if err != nil {
		return f, 0, err
	}
	net, err := c.newNetwork(pg.Device())
	if err != nil {
		return f, 0, err
	}
	defer net.Drop()
	model, err := torchddp.NewDDP(net, pg, torchddp.DDPOptions{})
	if err != nil {
		return f, 0, err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	if f.Rounds, err = c.measure(ddpSide{model}, b, func() error { return pg.Barrier() }); err != nil {
		return f, 0, err
	}
	if f.Memory, err = memory.peak(); err != nil {
		return f, 0, err
	}
	for _, t := range net.NamedParameters() {
		f.Parameters += int64(t.Numel())
		f.Gradients += size(t)
		f.State += size(t)
	}
	for _, t := range net.NamedBuffers() {
		f.State += size(t)
	}
	all, err := torchddp.GatherObject(pg, f, 0)
	if err != nil || pg.Rank() != 0 {
		return f, 0, err
	}
	for _, other := range all[1:] {
		for i, d := range other.Rounds { // a step is over when the slowest rank's is
			f.Rounds[i] = max(f.Rounds[i], d)
		}
		f.Memory = append(f.Memory, other.Memory...)
	}
	apart, err = difference(dir, net)
	return f, apart, err
}

type ddpSide struct{ *torchddp.DDP }

func (s ddpSide) forward(x *ts.Tensor) (*ts.Tensor, error) { return s.Forward(x) }
func (s ddpSide) backward(loss *ts.Tensor) error           { return s.Backward(loss) }

func size(t *ts.Tensor) int64 { return int64(t.Numel()) * int64(t.DType().Size()) }

// print writes the table, and what it says.
func (c *config) print(w io.Writer, pg *torchddp.ProcessGroup, dp, ddp figures, apart float64) error {
	n := pg.Size()
	kind, place := "CPU replicas", "processes"
	if pg.Device().IsCuda() {
		kind, place = "GPUs", "GPUs"
	}
	fmt.Fprintf(w, "%s, %d parameters; batches of %d images of %dx%d, shared by %d %s; "+
		"median of %d rounds of %d steps\n\n",
		c.arch, ddp.Parameters, c.batchSize, c.image, c.image, n, kind, c.rounds, c.steps)
	dpStep, ddpStep := median(dp.Rounds), median(ddp.Rounds)
	rate := func(d time.Duration) float64 { return float64(c.batchSize) / d.Seconds() }
	ratio := func(a, b float64) string {
		if b == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f", a/b)
	}
	t := tabwriter.NewWriter(w, 0, 0, 3, ' ', tabwriter.AlignRight)
	row := func(cells ...string) { fmt.Fprintln(t, strings.Join(cells, "\t")+"\t") }
	bytes := func(name string, a, b int64) {
		row(name, mib(a), mib(b), ratio(float64(a), float64(b)))
	}
	row("", "DataParallel", "DDP", "DataParallel / DDP")
	row("step time, ms", ms(dpStep), ms(ddpStep), ratio(dpStep.Seconds(), ddpStep.Seconds()))
	row("images a second", fmt.Sprintf("%.1f", rate(dpStep)), fmt.Sprintf("%.1f", rate(ddpStep)),
		ratio(rate(dpStep), rate(ddpStep)))
	bytes("memory of all, MiB", sum(dp.Memory), sum(ddp.Memory))
	bytes("memory of the fullest, MiB", int64(slices.Max(dp.Memory)), int64(slices.Max(ddp.Memory)))
	copied := int64(n-1) * ddp.State
	bytes("weights copied a step, MiB", copied, 0)
	bytes("gradients collected on one device a step, MiB", int64(n-1)*ddp.Gradients, 0)
	// A ring sends every rank's gradients round once to add them up, and once to tell the sum.
	bytes("gradients exchanged by each device a step, MiB", 0, 2*int64(n-1)*ddp.Gradients/int64(n))
	if err := t.Flush(); err != nil {
		return err
	}
	verdict := fmt.Sprintf("DDP needs %s of DataParallel's time for a step", ratio(ddpStep.Seconds(), dpStep.Seconds()))
	if ddpStep > dpStep {
		verdict = fmt.Sprintf("Here DataParallel is the faster one, by %s: the exchange between %d processes costs more than it saves",
			ratio(ddpStep.Seconds(), dpStep.Seconds()), n)
	}
	_, err := fmt.Fprintf(w, "\n%s.\n"+
		"DataParallel copied %s MiB of weights and buffers to the other replicas before every forward, and collected\n"+
		"their gradients on the first one after every backward; DDP copied weights once, before the first step, and its\n"+
		"%d %s average gradients while backward still runs. Both train the same: after %d steps their weights differ\n"+
		"by %.1e at most. They add up gradients in different orders, and what that changes grows with every step.\n",
		verdict, mib(copied), n, place, c.warmup+c.rounds*c.steps, apart)
	return err
}

func median(list []time.Duration) time.Duration {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/2]
}

func sum(list []uint64) (s int64) {
	for _, v := range list {
		s += int64(v)
	}
	return s
}

func mib(bytes int64) string    { return fmt.Sprintf("%.1f", float64(bytes)/(1<<20)) }
func ms(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()*1000) }
