package report

import (
	"errors"
	"fmt"
	"log/slog"
)

// Multi hands everything to several sinks. One that fails is reported once by [slog.Default] and left out from then
// on; the others go on, and so does the run: only Close returns errors. A nil sink is left out.
func Multi(sinks ...Sink) Sink {
	m := &multi{}
	for _, s := range sinks {
		if s != nil {
			m.sinks = append(m.sinks, s)
		}
	}
	return m
}

type multi struct {
	sinks []Sink
}

func (m *multi) Begin(r Run) error {
	m.each(func(s Sink) error { return s.Begin(r) })
	return nil
}

func (m *multi) Step(r Step) error {
	m.each(func(s Sink) error { return s.Step(r) })
	return nil
}

func (m *multi) Epoch(r Epoch) error {
	m.each(func(s Sink) error { return s.Epoch(r) })
	return nil
}

func (m *multi) Close() error {
	var all error
	for _, s := range m.sinks {
		if err := s.Close(); err != nil {
			all = errors.Join(all, fmt.Errorf("%s: %w", label(s), err))
		}
	}
	m.sinks = nil
	return all
}

func (m *multi) each(call func(Sink) error) {
	live := m.sinks[:0]
	for _, s := range m.sinks {
		err := call(s)
		if err == nil {
			live = append(live, s)
			continue
		}
		slog.Warn("report: this output ends here, training goes on", "output", label(s), "err", errors.Join(err, s.Close()))
	}
	clear(m.sinks[len(live):])
	m.sinks = live
}

func label(s Sink) string {
	if n, ok := s.(fmt.Stringer); ok {
		return n.String()
	}
	return fmt.Sprintf("%T", s)
}
