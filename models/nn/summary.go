package nn

import (
	"fmt"
	"strings"

	"github.com/goddp/goddp/internal/tdp"
)

// Summary counts what a model holds. Shared weights count once, in the module that has them first.
type Summary struct {
	Model string
	Rows  []SummaryRow // modules with tensors of their own, in the order of NamedModules

	Parameters, Trainable, Buffers int64 // elements
	ParameterBytes, BufferBytes    int64
}

// SummaryRow is one module's own share.
type SummaryRow struct {
	Path, Module   string
	Parameters     int64
	Trainable      int64
	Buffers        int64
	ParameterBytes int64
	BufferBytes    int64
}

// Bytes is the memory of parameters and buffers together. Training needs as much again for the gradients, and more for
// the optimizer's state and the activations.
func (s *Summary) Bytes() int64 { return s.ParameterBytes + s.BufferBytes }

// Summarize counts the parameters and buffers of a model and their memory.
func Summarize(m Module) (*Summary, error) {
	s := &Summary{Model: typeName(m)}
	seen := newIdentity()
	for path, k := range NamedModules(m) {
		row := SummaryRow{Path: path, Module: head(k)}
		b := k.base()
		for _, p := range b.params {
			t := *p.slot
			if t == nil || !seen.first(t) {
				continue
			}
			info, err := tdp.Describe(t)
			if err != nil {
				return nil, fmt.Errorf("parameter %s: %w", join(path, p.name), err)
			}
			row.Parameters += info.Numel
			row.ParameterBytes += info.Numel * int64(info.ElementSize)
			if info.RequiresGrad {
				row.Trainable += info.Numel
			}
		}
		for _, p := range b.buffers {
			t := *p.slot
			if t == nil || !seen.first(t) {
				continue
			}
			info, err := tdp.Describe(t)
			if err != nil {
				return nil, fmt.Errorf("buffer %s: %w", join(path, p.name), err)
			}
			row.Buffers += info.Numel
			row.BufferBytes += info.Numel * int64(info.ElementSize)
		}
		s.Parameters += row.Parameters
		s.Trainable += row.Trainable
		s.Buffers += row.Buffers
		s.ParameterBytes += row.ParameterBytes
		s.BufferBytes += row.BufferBytes
		if row.Parameters+row.Buffers > 0 {
			s.Rows = append(s.Rows, row)
		}
	}
	return s, nil
}

func (s *Summary) String() string {
	path, module := len("path"), len("module")
	for _, r := range s.Rows {
		path, module = max(path, len(name(r.Path))), max(module, len(r.Module))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%-*s  %-*s  %12s  %10s\n", path, "path", module, "module", "parameters", "memory")
	for _, r := range s.Rows {
		fmt.Fprintf(&b, "%-*s  %-*s  %12d  %10s\n", path, name(r.Path), module, r.Module, r.Parameters, bytes(r.ParameterBytes+r.BufferBytes))
	}
	fmt.Fprintf(&b, "%s: %d parameters (%d trainable, %s), %d buffer elements (%s)", s.Model, s.Parameters, s.Trainable,
		bytes(s.ParameterBytes), s.Buffers, bytes(s.BufferBytes))
	return b.String()
}

func name(path string) string {
	if path == "" {
		return "(itself)"
	}
	return path
}

func bytes(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
