package train

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/train/report"
)

// The parts of a step that are timed.
const (
	partData = iota
	partForward
	partBackward
	partOptimizer
	partOther // callbacks
	parts
)

// stopwatch says how long the parts took.
type stopwatch struct {
	last  time.Time
	parts [parts]time.Duration
}

// lap books the time since the last lap for a part.
func (w *stopwatch) lap(part int) {
	now := time.Now()
	w.parts[part] += now.Sub(w.last)
	w.last = now
}

// figures are sums over steps, samples and, after a reduction, ranks. They travel as they are.
type figures []float64

// The fixed places of figures. The sums of the step function follow, its loss first.
const (
	figSteps = iota
	figSamples
	figStop    // ranks that want to stop
	figPreempt // ranks that were told to stop
	figSeconds // the parts' times
	figComm    = figSeconds + parts
	figSums    = figComm + 1
)

func (f figures) add(g figures) figures {
	if len(f) == 0 {
		return slices.Clone(g)
	}
	for i := range f {
		f[i] += g[i]
	}
	return f
}

func (f figures) seconds() (s float64) {
	for _, v := range f[figSeconds : figSeconds+parts] {
		s += v
	}
	return s
}

// values are means over samples.
func (f figures) values(names []string) []report.Value {
	if len(f) == 0 || f[figSamples] == 0 {
		return nil
	}
	out := make([]report.Value, len(names))
	for i, name := range names {
		out[i] = report.Value{Name: name, Value: f[figSums+i] / f[figSamples]}
	}
	return out
}

// times are means over steps. What of the communication backward did not hide counts apart.
func (f figures) times() report.Times {
	mean := func(seconds float64) time.Duration {
		return time.Duration(seconds / max(f[figSteps], 1) * float64(time.Second))
	}
	return report.Times{
		Data: mean(f[figSeconds+partData]), Forward: mean(f[figSeconds+partForward]),
		Backward: mean(f[figSeconds+partBackward] - f[figComm]), Communication: mean(f[figComm]),
		Optimizer: mean(f[figSeconds+partOptimizer]), Total: mean(f.seconds()),
	}
}

// throughput is in samples a second, of ranks that worked side by side.
func (f figures) throughput(ranks int) float64 {
	if len(f) == 0 || f.seconds() == 0 {
		return 0
	}
	return f[figSamples] / (f.seconds() / float64(ranks))
}

// meter adds up what a rank's batches give, on its device: nobody waits for the device before read.
type meter struct {
	device  gotch.Device
	names   []string
	totals  []*ts.Tensor // float64 scalars by name
	samples int
}

// declare fixes the names of the figures: those of the first batch count.
func (m *meter) declare(names []string) error {
	if m.names != nil {
		if !slices.Equal(m.names, names) {
			return fmt.Errorf("the step function gives the figures %q, and before gave %q: they must be the same for every batch", names, m.names)
		}
		return nil
	}
	for range names {
		t, err := tdp.FromSlice([]float64{0}, nil, m.device)
		if err != nil {
			return err
		}
		m.totals = append(m.totals, t)
	}
	m.names = names
	return nil
}

// add takes the figures of a batch.
func (m *meter) add(r Result) error {
	if r.Loss == nil || r.Samples < 1 {
		return errors.New("the step function must give a Loss and the number of Samples")
	}
	same := len(m.names) == 1+len(r.Sums)
	for i := 0; same && i < len(r.Sums); i++ {
		same = m.names[1+i] == r.Sums[i].Name
	}
	if !same {
		names := []string{lossName}
		for _, s := range r.Sums {
			names = append(names, s.Name)
		}
		if err := m.declare(names); err != nil {
			return err
		}
	}
	m.samples += r.Samples
	if err := m.addTo(0, r.Loss, float64(r.Samples)); err != nil {
		return err
	}
	for i, s := range r.Sums {
		if err := m.addTo(1+i, s.Total, 1); err != nil {
			return err
		}
	}
	return nil
}

func (m *meter) addTo(i int, v *ts.Tensor, factor float64) error {
	if v == nil {
		return fmt.Errorf("the step function gives no tensor for %q", m.names[i])
	}
	x, err := v.Detach(false)
	if err != nil {
		return err
	}
	defer func() { x.MustDrop() }()
	wide, err := x.Totype(gotch.Double, false)
	if err != nil {
		return err
	}
	x.MustDrop()
	x = wide
	if factor != 1 {
		scaled, err := x.MulScalar(ts.FloatScalar(factor), false)
		if err != nil {
			return err
		}
		x.MustDrop()
		x = scaled
	}
	if err := m.totals[i].Add_(x); err != nil {
		return fmt.Errorf("figure %q must be a scalar: %w", m.names[i], err)
	}
	return nil
}

// read waits for the device, gives the sums, and starts anew.
func (m *meter) read() (figures, error) {
	f := make(figures, figSums+len(m.names))
	f[figSamples] = float64(m.samples)
	m.samples = 0
	if len(m.names) == 0 {
		return f, nil
	}
	all, err := ts.Stack(m.totals, 0)
	if err != nil {
		return nil, err
	}
	defer all.MustDrop()
	sums, err := tdp.ToSlice[float64](all)
	if err != nil {
		return nil, err
	}
	copy(f[figSums:], sums)
	for _, t := range m.totals {
		if err := t.Zero_(); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (m *meter) drop() {
	for _, t := range m.totals {
		drop(t)
	}
	m.names, m.totals, m.samples = nil, nil, 0
}
