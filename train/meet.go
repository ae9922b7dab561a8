package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/train/report"
)

// flush ends a window of steps: the ranks meet, and report what happened in it. It tells whether the run is over.
func (t *Trainer[B]) flush(ctx context.Context, steps int) (over bool, err error) {
	p := &t.progress
	logging, err := t.Model.LoggingData()
	if err != nil {
		return false, err
	}
	own, err := t.meter.read()
	if err != nil {
		return false, err
	}
	t.watch.lap(partOther) // the wait for the device
	own[figSteps] = float64(steps)
	for i, d := range t.watch.parts {
		own[figSeconds+i] = d.Seconds()
	}
	t.watch.parts = [parts]time.Duration{}
	exposed := time.Duration(max(0, logging.BackwardCommTime-logging.BackwardComputeCommOverlapTime))
	own[figComm] = min(exposed.Seconds()*float64(steps), own[figSeconds+partBackward])
	t.wish(ctx, own)
	all, ranks, err := reduce(t.pg, own, t.opts.Stragglers)
	if err != nil {
		return false, err
	}
	t.epoch.own, t.epoch.all = t.epoch.own.add(own), t.epoch.all.add(all)

	s := report.Step{
		Time: time.Now(), Epoch: p.Epoch, Step: p.Step, GlobalStep: p.GlobalStep, Steps: steps, LR: p.LR,
		Values: own.values(t.meter.names), Times: own.times(), Throughput: own.throughput(1),
	}
	sizes := logging.RebuiltBucketSizes
	if len(sizes) == 0 {
		sizes = logging.BucketSizes
	}
	for _, bytes := range sizes {
		s.Bytes += int64(bytes)
		s.Buckets = append(s.Buckets, report.Bucket{Bytes: int64(bytes)})
	}
	if len(s.Buckets) == 1 { // c10d times all buckets together
		s.Buckets[0].Time = time.Duration(max(0, logging.BackwardCommTime))
	}
	total := s
	total.Values, total.Times, total.Throughput = all.values(t.meter.names), all.times(), all.throughput(p.World)
	for rank, f := range ranks {
		total.Ranks = append(total.Ranks, report.RankFigures{Rank: rank, Times: f.times()})
	}
	t.tell(&t.sink, func(sink report.Sink) error { return sink.Step(total) })
	t.tell(&t.opts.OwnSink, func(sink report.Sink) error { return sink.Step(s) })
	for _, c := range t.opts.Callbacks {
		if c.AfterLog != nil {
			if err := c.AfterLog(p, s, total); err != nil {
				return false, err
			}
		}
	}
	return t.obey(ctx, all)
}

// obey ends the run where a rank was told to stop, and tells whether one wants to.
func (t *Trainer[B]) obey(ctx context.Context, all figures) (stop bool, err error) {
	if all[figPreempt] > 0 {
		return false, t.preempted(ctx)
	}
	if all[figStop] > 0 && t.progress.stop == "" {
		t.progress.stop = "another rank asked for it"
	}
	return all[figStop] > 0, nil
}

// wish puts in whether this rank wants to stop.
func (t *Trainer[B]) wish(ctx context.Context, f figures) {
	if t.progress.stop != "" {
		f[figStop] = 1
	}
	if ctx.Err() != nil {
		f[figPreempt] = 1
	}
}

// meet adds figures up over the ranks.
func (t *Trainer[B]) meet(ctx context.Context, own figures) (figures, error) {
	t.wish(ctx, own)
	all, _, err := reduce(t.pg, own, false)
	if err == nil {
		_, err = t.obey(ctx, all)
	}
	return all, err
}

// preempted saves and gives the error that Run ends with.
func (t *Trainer[B]) preempted(ctx context.Context) error {
	cause := context.Cause(ctx)
	if cause == nil {
		cause = fmt.Errorf("another rank was told to stop: %w", context.Canceled)
	}
	if err := t.save(ctx, nil); err != nil {
		return errors.Join(cause, err)
	}
	if t.saver == nil {
		return cause
	}
	if err := t.saver.Wait(); err != nil {
		return errors.Join(cause, err)
	}
	return fmt.Errorf("%w (%v; saved as %s)", launch.ErrResume, cause, t.saver.Path(t.progress.GlobalStep))
}

// reduce adds figures up over the ranks, in one collective, and with each gives those of every rank, in one more.
func reduce(pg *torchddp.ProcessGroup, own figures, each bool) (all figures, ranks []figures, err error) {
	n := int64(len(own))
	sum, err := tdp.FromSlice(own, []int64{n}, pg.Device())
	if err != nil {
		return nil, nil, err
	}
	defer sum.MustDrop()
	if each {
		size := int64(pg.Size())
		list, err := tdp.FromSlice(make([]float64, n*size), []int64{n * size}, pg.Device())
		if err != nil {
			return nil, nil, err
		}
		defer list.MustDrop()
		if err := pg.AllGatherIntoTensor(list, sum); err != nil {
			return nil, nil, err
		}
		flat, err := tdp.ToSlice[float64](list)
		if err != nil {
			return nil, nil, err
		}
		for f := range slices.Chunk(flat, int(n)) {
			ranks = append(ranks, f)
		}
	}
	if err := pg.AllReduce(sum, torchddp.Sum); err != nil {
		return nil, nil, err
	}
	all, err = tdp.ToSlice[float64](sum)
	return all, ranks, err
}

// agree gives every rank an error where one rank brings one.
func agree(pg *torchddp.ProcessGroup, mine error) error {
	text := ""
	if mine != nil {
		text = mine.Error()
	}
	texts, err := torchddp.AllGatherObject(pg, text)
	if err != nil {
		return errors.Join(mine, err)
	}
	if mine != nil {
		return mine
	}
	for rank, text := range texts {
		if text != "" {
			return fmt.Errorf("rank %d failed: %s", rank, text)
		}
	}
	return nil
}
