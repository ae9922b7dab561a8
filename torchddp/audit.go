package torchddp

import (
	"fmt"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch/ts"
)

// AuditError says that ranks which should hold equal tensors do not. Every rank gets the same one.
type AuditError struct {
	Name  string // the first tensor that differs
	Ranks string // which ranks agree with one another
}

func (e *AuditError) Error() string {
	return fmt.Sprintf("the replicas have drifted apart: %q differs (%s). Did a rank skip a step, use other data types, or change parameters outside the optimizer?", e.Name, e.Ranks)
}

// Audit compares the parameters, the buffers (but local ones) and what DDPOptions.AuditAlso yields with all other
// ranks', by hash. All ranks call it.
func (d *DDP) Audit() error {
	var names []string
	var tensors []*ts.Tensor
	add := func(name string, t *ts.Tensor) {
		names = append(names, name)
		tensors = append(tensors, t)
	}
	for name, t := range d.parameters() {
		add(name, t)
	}
	// Buffers are equal just after they were made so; before that every rank's own forward has moved them.
	if d.syncBuffers {
		for name, t := range d.buffers() {
			if d.bufferMode(name) == BufferBroadcast && d.pending == noBackward && d.forwards > 0 {
				add(name, t)
			}
		}
	}
	if d.options.AuditAlso != nil {
		for name, t := range d.options.AuditAlso() {
			add(name, t)
		}
	}
	hashes, err := tdp.HashTensors(tdp.NewHandles(tensors))
	if err != nil {
		return d.errorf("audit", err)
	}
	row := make([]int64, len(hashes)+1)
	row[0] = int64(len(hashes))
	for i, h := range hashes {
		row[i+1] = int64(h)
	}
	counts, err := d.pg.gatherInts(row[:1])
	if err != nil {
		return err
	}
	ranks := seq(d.pg.size)
	for _, c := range counts {
		if c[0] != row[0] {
			return &AuditError{Name: "the number of tensors", Ranks: byValue(ranks, func(r int) string { return fmt.Sprint(counts[r][0]) })}
		}
	}
	all, err := d.pg.gatherInts(row)
	if err != nil {
		return err
	}
	for i, name := range names {
		for r := range all {
			if all[r][i+1] != all[0][i+1] {
				return &AuditError{Name: name, Ranks: byValue(ranks, func(r int) string { return fmt.Sprintf("%016x", uint64(all[r][i+1])) })}
			}
		}
	}
	return nil
}

// gatherInts collects every rank's numbers, equally many each.
func (p *ProcessGroup) gatherInts(mine []int64) ([][]int64, error) {
	in, err := tdp.FromSlice(mine, []int64{int64(len(mine))}, p.device)
	if err != nil {
		return nil, err
	}
	defer in.MustDrop()
	outs := make([]*ts.Tensor, p.size)
	for i := range outs {
		if outs[i], err = tdp.FromSlice(mine, []int64{int64(len(mine))}, p.device); err != nil {
			return nil, err
		}
		defer outs[i].MustDrop()
	}
	all := make([][]int64, p.size)
	err = p.run("audit", func(pg *tdp.ProcessGroup) error {
		if _, err := pg.AllGather(outs, in, 0, false); err != nil {
			return err
		}
		for i, o := range outs {
			if all[i], err = tdp.ToSlice[int64](o); err != nil {
				return err
			}
		}
		return nil
	})
	return all, err
}
