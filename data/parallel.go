package data

import (
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// job is a batch in the making, shared by the workers that write parts of it.
type job[B any] struct {
	group
	seq, first int
	work       work[B]

	mu    sync.Mutex
	left  int // parts not yet written
	at    int // place of the first sample that failed
	err   error
	batch B
	made  bool          // batch is set
	ready chan struct{} // closed when batch or err is final
}

// part is a run of samples of a job.
type part[B any] struct {
	job    *job[B]
	lo, hi int
}

// crew is what the goroutines of one parallel pass share.
type crew[B any] struct {
	*pass[B]
	tokens chan struct{} // one for each batch that may be in the making or waiting
	parts  chan part[B]
	out    chan *job[B] // in order of the sampler, or of completion
	jobs   sync.WaitGroup
	drawn  chan struct{} // closed once the sampler has drawn its order

	mu   sync.Mutex
	live map[*job[B]]struct{} // made or begun, and not yet handed over
}

// parallel loads with workers. A feeder walks the sampler and deals batches out in parts; the loop waits for the next.
func (p *pass[B]) parallel(yield func(B, error) bool) error {
	depth, workers := p.opts.Prefetch, p.opts.Workers
	c := &crew[B]{pass: p, tokens: make(chan struct{}, depth), parts: make(chan part[B], workers),
		out: make(chan *job[B], depth+1), drawn: make(chan struct{}), live: make(map[*job[B]]struct{})}
	var all sync.WaitGroup
	all.Go(c.feed)
	for range workers {
		all.Go(c.write)
	}
	p.wait = func() {
		all.Wait()
		for j := range c.live {
			if j.made {
				p.maker.release(j.batch)
			} else if j.work != nil {
				j.work.drop()
			}
		}
	}
	// Python draws the order when the loop begins, on the loop's thread: what the loop draws itself comes after it.
	select {
	case <-c.drawn:
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	}
	var timeout <-chan time.Time
	var timer *time.Timer
	if p.opts.Timeout > 0 {
		timer = time.NewTimer(p.opts.Timeout)
		defer timer.Stop()
		timeout = timer.C
	}
	late := func() error {
		p.late = true
		return fmt.Errorf("%w after %v", ErrTimeout, p.opts.Timeout)
	}
	for {
		if timer != nil {
			timer.Reset(p.opts.Timeout)
		}
		var j *job[B]
		select {
		case <-p.ctx.Done():
			return context.Cause(p.ctx)
		case <-timeout:
			return late()
		case j = <-c.out:
		}
		if j == nil { // closed: the sampler has no more
			if p.ctx.Err() != nil {
				return context.Cause(p.ctx)
			}
			p.complete()
			return nil
		}
		select {
		case <-p.ctx.Done():
			return context.Cause(p.ctx)
		case <-timeout:
			return late()
		case <-j.ready:
		}
		c.mu.Lock()
		delete(c.live, j)
		c.mu.Unlock()
		if j.err != nil {
			return j.err
		}
		<-c.tokens
		if err := p.hand(yield, j.batch, len(j.indices)); err != nil {
			return err
		}
	}
}

// feed deals the sampler's batches out to the workers.
func (c *crew[B]) feed() {
	begun := false
	draw := func() {
		if !begun {
			begun = true
			close(c.drawn)
		}
	}
	defer func() {
		v := recover()
		if v != nil {
			c.fail(fmt.Errorf("data: sampler: %w", &PanicError{v, debug.Stack()}))
		}
		draw()
		close(c.parts)
		if c.opts.Unordered {
			c.jobs.Wait()
		}
		close(c.out)
	}()
	seq, first := 0, 0
	for g, err := range c.groups(c.ctx) {
		draw()
		if err != nil {
			c.fail(err)
			return
		}
		select {
		case c.tokens <- struct{}{}:
		case <-c.ctx.Done():
			return
		}
		j := &job[B]{group: group{slices.Clone(g.indices), slices.Clone(g.items)}, seq: seq, first: first, ready: make(chan struct{})}
		w, err := c.maker.begin(len(j.indices))
		if err != nil {
			c.fail(err)
			return
		}
		j.work = w
		if !c.deal(j) {
			return
		}
		first += len(j.indices)
		seq++
	}
}

// deal hands a job to the workers, in as many parts as keep all of them busy.
func (c *crew[B]) deal(j *job[B]) bool {
	n := len(j.indices)
	parts := max(1, min(n, (2*c.opts.Workers+c.opts.Prefetch-1)/c.opts.Prefetch))
	j.left, j.at = parts, n
	c.mu.Lock()
	c.live[j] = struct{}{}
	c.mu.Unlock()
	if !c.opts.Unordered {
		c.out <- j // never blocks: there are as many places as tokens, and one for a failure
	}
	c.jobs.Add(parts)
	for k := range parts {
		select {
		case c.parts <- part[B]{j, k * n / parts, (k + 1) * n / parts}:
		case <-c.ctx.Done():
			c.jobs.Add(k - parts)
			return false
		}
	}
	return true
}

// fail puts an error in place of the next batch.
func (c *crew[B]) fail(err error) {
	j := &job[B]{err: err, ready: make(chan struct{})}
	close(j.ready)
	if c.opts.Unordered {
		c.jobs.Wait() // what was begun before comes first
	}
	c.out <- j
}

// write is a worker.
func (c *crew[B]) write() {
	rnd := newSampleRand()
	for p := range c.parts {
		c.part(p, rnd)
		c.jobs.Done()
	}
}

func (c *crew[B]) part(p part[B], rnd sampleRand) {
	j := p.job
	at, err := p.lo, error(nil)
	if c.ctx.Err() == nil {
		at, err = c.fill(j.work, j.group, p.lo, p.hi, j.first, rnd)
	} else {
		err = context.Cause(c.ctx)
	}
	j.mu.Lock()
	if err != nil && at < j.at { // of several, the first in the batch is reported, whichever worker came first
		j.at, j.err = at, &ItemError{Index: j.indices[at], Batch: j.seq, Err: err}
	}
	j.left--
	last := j.left == 0
	j.mu.Unlock()
	if !last {
		return
	}
	if j.err != nil {
		j.work.drop()
		j.work = nil
	} else {
		batch, err := c.seal(j.work, j.group, j.seq)
		j.batch, j.err, j.made, j.work = batch, err, err == nil, nil
	}
	close(j.ready)
	if c.opts.Unordered {
		c.out <- j
	}
}
