package train

import (
	"context"
	"errors"
	"fmt"

	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/train/report"
)

// Evaluate gives the figures of the evaluation data, each sample counted once, as means over all ranks. All ranks call
// it. Run does so by itself.
func (t *Trainer[B]) Evaluate(ctx context.Context) ([]report.Value, error) {
	if t.Eval == nil {
		return nil, errors.New("train: Task.Eval is nil: there is nothing to evaluate with")
	}
	_, all, err := t.evaluate(ctx)
	return all, err
}

func (t *Trainer[B]) evaluate(ctx context.Context) (own, all []report.Value, err error) {
	if !t.opts.KeepBuffers {
		for name, buffer := range t.Model.NamedBuffers() {
			if err := t.pg.Broadcast(buffer, 0); err != nil {
				return nil, nil, fmt.Errorf("buffer %s: %w", name, err)
			}
		}
	}
	defer t.evals.drop()
	if err := t.evalBatches(ctx); err != nil {
		return nil, nil, fmt.Errorf("evaluation: %w", err)
	}
	// A rank without a sample does not know which figures there are.
	lists, err := torchddp.AllGatherObject(t.pg, t.evals.names)
	if err != nil {
		return nil, nil, err
	}
	for _, names := range lists {
		if len(names) > 0 {
			if err := t.evals.declare(names); err != nil {
				return nil, nil, err
			}
		}
	}
	mine, err := t.evals.read()
	if err != nil {
		return nil, nil, err
	}
	sum, err := t.meet(ctx, mine)
	if err != nil {
		return nil, nil, err
	}
	if st, err := t.Eval.State(); err == nil && st.Sampler.Length > 0 && sum[figSamples] > float64(st.Sampler.Length) {
		return nil, nil, fmt.Errorf("evaluation: %v samples were seen of %d: some were counted twice; share them out by data.NewEvalSampler",
			sum[figSamples], st.Sampler.Length)
	}
	return mine.values(t.evals.names), sum.values(t.evals.names), nil
}

// evalBatches adds up the figures of this rank's share, without communication.
func (t *Trainer[B]) evalBatches(ctx context.Context) (err error) {
	if a := t.opts.Average; a != nil && a.Count() > 0 {
		if err := a.Swap(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, a.Swap()) }()
	}
	return torchddp.NoGrad(func() error {
		for batch, err := range t.Eval.All(context.WithoutCancel(ctx)) {
			if err != nil {
				return err
			}
			if ctx.Err() != nil {
				return nil // the ranks learn of it when they meet
			}
			r, err := t.forward(false, batch)
			if err != nil {
				return err
			}
			err = t.evals.add(r)
			r.drop()
			if err != nil {
				return err
			}
		}
		return nil
	})
}
