package report

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// HTML writes a page about the run, for people: curves, where the time went, which rank was slow, the settings. It is
// one file that needs nothing else, neither scripts nor a network. It is written by Close, so also when the run ends
// early, and now and then at the end of an epoch, for a run that is killed. What it keeps in memory does not grow with
// the run's length.
func HTML(path string) Sink { return &html{path: path} }

type html struct {
	path           string
	run            Run
	names          []string // of values, in the order in which they appeared
	values         map[string]*figure
	unnamed        int // values beyond maxNames
	throughput, lr series
	phases         []*series
	span           span
	total          time.Duration
	steps          int64
	bytes          int64
	buckets        []Bucket
	ranks          []rankSum
	epochs         []Epoch
	epochsDone     int
	ended          time.Time
	written        time.Time
	begun, closed  bool
}

// figure is a value as it goes: by steps, by epochs, and in evaluations.
type figure struct {
	splits map[string]*series
	oddAt  int64 // the first step at which it was no number
}

var splits = []struct{ key, name string }{{"step", "training, by steps"}, {"train", "training, whole epochs"},
	{"eval", "evaluation"}}

type rankSum struct {
	rank  int
	sum   Times
	steps int64
}

const (
	maxNames  = 48
	maxEpochs = 240
	// firstEpochs are kept when there are too many, and then the last ones.
	firstEpochs = 40
	// rewrite is how old the page may become while the run goes on.
	rewrite = time.Minute
)

func (h *html) String() string { return h.path }

func (h *html) Begin(r Run) error {
	h.run, h.begun, h.values = r, true, map[string]*figure{}
	h.span = span{math.Inf(1), math.Inf(-1)}
	h.run.Started = stamp(r.Started)
	h.written = time.Now()
	// A path that cannot be written should be known now rather than after the training.
	if err := os.MkdirAll(filepath.Dir(h.path), 0o755); err != nil {
		return fmt.Errorf("report: HTML: %w", err)
	}
	if info, err := os.Stat(h.path); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("report: HTML: %s is there and is no file: name another", h.path)
	}
	f, err := os.CreateTemp(filepath.Dir(h.path), "."+filepath.Base(h.path)+".tmp-*")
	if err != nil {
		return fmt.Errorf("report: HTML: %w", err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

func (h *html) Step(s Step) error {
	x, n := float64(s.GlobalStep), int64(s.steps())
	h.span = span{min(h.span.low, x-float64(n-1)), max(h.span.high, x)}
	h.add("step", s.GlobalStep, s.Values)
	h.throughput.add(x, s.Throughput)
	h.lr.add(x, s.LR)
	if h.phases == nil {
		for range phases {
			h.phases = append(h.phases, &series{})
		}
	}
	for i, p := range phases {
		h.phases[i].add(x, p.of(s.Times).Seconds())
	}
	h.total += s.Times.Total * time.Duration(n)
	h.steps += n
	if h.bytes = s.Bytes; len(s.Buckets) > 0 {
		h.buckets = append(h.buckets[:0], s.Buckets...)
	}
	for _, r := range s.Ranks {
		h.addRank(r, n)
	}
	h.ended = stamp(s.Time)
	return nil
}

func (h *html) Epoch(e Epoch) error {
	h.add("train", e.Step, e.Train)
	h.add("eval", e.Step, e.Eval)
	h.epochs = append(h.epochs, e)
	if len(h.epochs) > maxEpochs {
		h.epochs = slices.Delete(h.epochs, firstEpochs, firstEpochs+1)
	}
	h.epochsDone++
	h.ended = stamp(e.Time)
	if time.Since(h.written) < rewrite {
		return nil
	}
	return h.save()
}

func (h *html) Close() error {
	if !h.begun || h.closed {
		return nil
	}
	h.closed = true
	h.ended = time.Now()
	return h.save()
}

func (h *html) save() error {
	if err := replace(h.path, h.write); err != nil {
		return fmt.Errorf("report: HTML: %w", err)
	}
	h.written = time.Now()
	return nil
}

func (h *html) add(split string, step int64, list []Value) {
	for _, v := range list {
		name := cmp.Or(printable(v.Name), "value")
		f := h.values[name]
		if f == nil {
			if len(h.names) == maxNames {
				h.unnamed++
				continue
			}
			f = &figure{splits: map[string]*series{}}
			h.values[name] = f
			h.names = append(h.names, name)
		}
		s := f.splits[split]
		if s == nil {
			s = &series{}
			f.splits[split] = s
		}
		had := s.odd
		if s.add(float64(step), v.Value); s.odd > had && f.oddAt == 0 {
			f.oddAt = step
		}
	}
}

func (h *html) addRank(r RankFigures, n int64) {
	i, found := slices.BinarySearchFunc(h.ranks, r.Rank,
		func(s rankSum, rank int) int { return cmp.Compare(s.rank, rank) })
	if !found {
		h.ranks = slices.Insert(h.ranks, i, rankSum{rank: r.Rank})
	}
	s, k := &h.ranks[i], time.Duration(n)
	s.sum.Data += r.Times.Data * k
	s.sum.Forward += r.Times.Forward * k
	s.sum.Backward += r.Times.Backward * k
	s.sum.Communication += r.Times.Communication * k
	s.sum.Optimizer += r.Times.Optimizer * k
	s.sum.Total += r.Times.Total * k
	s.steps += n
}

// rankMeans are the ranks' mean times over the whole run.
func (h *html) rankMeans() []RankFigures {
	list := make([]RankFigures, len(h.ranks))
	for i, r := range h.ranks {
		n := time.Duration(r.steps)
		list[i] = RankFigures{r.rank, Times{r.sum.Data / n, r.sum.Forward / n, r.sum.Backward / n,
			r.sum.Communication / n, r.sum.Optimizer / n, r.sum.Total / n}}
	}
	return list
}
