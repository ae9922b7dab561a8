package libtorch

import (
	"context"
	"sync"
)

// group runs a few functions at a time, until the first error.
type group struct {
	slots  chan struct{}
	wg     sync.WaitGroup
	cancel context.CancelCauseFunc
	once   sync.Once
	err    error
}

func newGroup(ctx context.Context, limit int) (*group, context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	return &group{slots: make(chan struct{}, limit), cancel: cancel}, ctx
}

func (g *group) do(f func() error) {
	g.slots <- struct{}{}
	g.wg.Go(func() {
		defer func() { <-g.slots }()
		if err := f(); err != nil {
			g.once.Do(func() { g.err = err; g.cancel(err) })
		}
	})
}

func (g *group) wait() error {
	g.wg.Wait()
	g.cancel(nil)
	return g.err
}
