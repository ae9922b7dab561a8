package libtorch

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"
)

// ErrNotSetUp: something is missing that Setup makes.
var ErrNotSetUp = errors.New("not set up: run `goddp setup` (`make setup` in a clone of goddp)")

// Installation is what set-up made, or found.
type Installation struct {
	Cache  string
	Flavor Flavor
	Why    string // why this flavour
	Tree   Tree
	Gotch  string // the prepared gotch, a Go module
	Link   string // the module with the linker flags, beside libtdp.a
	Worked bool   // something had to be made
	Took   time.Duration
}

// setup is one run.
type setup struct {
	cfg      Config
	flavor   Flavor
	ui       *progress
	lookOnly bool // make nothing: fail with ErrNotSetUp
	worked   atomic.Bool
	slots    chan struct{} // one for each compiler at a time
}

// Setup makes what is missing, and changes nothing when all is there. It is safe to run several at a time, and to kill.
func Setup(ctx context.Context, cfg Config) (*Installation, error) { return run(ctx, cfg, false) }

// Find gives what is there, or an error that is ErrNotSetUp. It changes nothing.
func Find(ctx context.Context, cfg Config) (*Installation, error) { return run(ctx, cfg, true) }

func run(ctx context.Context, cfg Config, lookOnly bool) (*Installation, error) {
	start := time.Now()
	if err := supported(); err != nil {
		return nil, err
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return nil, err
	}
	s := newSetup(cfg)
	s.lookOnly = lookOnly
	in := &Installation{Cache: cfg.Cache}
	s.flavor, in.Why = cfg.flavor()
	in.Flavor = s.flavor
	if err := s.run(ctx, in); err != nil {
		return nil, s.explain(err)
	}
	in.Worked, in.Took = s.worked.Load(), time.Since(start)
	if !lookOnly && (in.Worked || !cfg.Quiet) {
		s.ui.say("libtorch %s is set up in %s, flavor %s: %s", in.Tree.Version, cfg.Cache, in.Flavor, in.Why)
	}
	return in, nil
}

func (s *setup) run(ctx context.Context, in *Installation) (err error) {
	// Before half an hour of downloads: is the compiler there?
	compiler, err := s.compiler(ctx)
	if err != nil {
		return err
	}
	if in.Tree, err = s.tree(ctx); err != nil {
		return err
	}
	// Side by side: gotch's is one big file, ours are many. When one fails, the other is not wasted.
	var both sync.WaitGroup
	var gotchErr, tdpErr error
	both.Go(func() {
		var dir string
		dir, gotchErr = s.gotch(ctx, in.Tree, compiler)
		in.Gotch = filepath.Join(dir, "gotch")
	})
	both.Go(func() { in.Link, tdpErr = s.tdp(ctx, in.Tree, compiler) })
	both.Wait()
	if err := errors.Join(gotchErr, tdpErr); err != nil || !s.worked.Load() {
		return err
	}
	for _, name := range []string{"gotch", "tdp"} { // their locks guard the object files, too
		unlock, err := s.lock(ctx, name, "the object files")
		if err != nil {
			return err
		}
		defer unlock()
	}
	s.prune()
	// A run that was killed right after the tree got its name has left the wheels. Another may be using them.
	if unlock, err := s.tryLock("libtorch"); err == nil {
		defer unlock()
		for _, w := range s.cfg.seams.wheels(s.flavor) {
			os.Remove(filepath.Join(s.cfg.Cache, "downloads", w.file))
		}
	}
	return nil
}

func newSetup(cfg Config) *setup {
	return &setup{cfg: cfg, ui: newProgress(cfg.Out), slots: make(chan struct{}, cfg.seams.jobs)}
}

// exists tells a missing file from one that cannot be looked at.
func exists(path string) (bool, error) {
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
