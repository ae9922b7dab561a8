package amp

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/torchddp/optim"
)

// Errors of a scaler whose methods are called in the wrong order, as Python has them.
var (
	ErrUnscaledTwice = errors.New("unscale_() has already been called on this optimizer since the last update()")
	ErrUnscaleLate   = errors.New("unscale_() is being called after step()")
	ErrSteppedTwice  = errors.New("step() has already been called since the last update()")
	ErrNoInfChecks   = errors.New("no inf checks were recorded")
	ErrNotScaled     = errors.New("the scaler has no scale yet: Scale was not called earlier in the iteration")
	ErrEmptyState    = errors.New("the source state dict is empty, possibly because it was saved from a disabled instance of GradScaler")
)

// ScalerOptions are the options of a [GradScaler]. Zeros stand for Python's defaults.
type ScalerOptions struct {
	Device         gotch.Device // where the losses are; the zero value is the CPU
	InitScale      float64      // 0 stands for 65536
	GrowthFactor   float64      // 0 stands for 2
	BackoffFactor  float64      // 0 stands for 0.5
	GrowthInterval int          // steps without infinities before the scale grows; 0 stands for 2000
	// Disabled makes a scaler that does nothing: Scale gives its argument, Step steps.
	Disabled bool
}

type stage int

const (
	ready stage = iota
	unscaled
	stepped
)

// perOptimizer is what the scaler knows of an optimizer in the running iteration.
type perOptimizer struct {
	native   *tdp.Optim
	stage    stage
	foundInf *ts.Tensor // nil: not checked, or nothing to check
}

// GradScaler multiplies losses so that small gradients survive float16, divides gradients again before the optimizer
// sees them, skips steps whose gradients have infinities or NaNs, and finds the largest scale that works.
type GradScaler struct {
	enabled         bool
	device          gotch.Device
	scale, tracker  *ts.Tensor
	initScale       float64
	initTracker     int64
	growth, backoff float64
	interval        int64
	optimizers      []*perOptimizer // in the order in which they were met
}

// NewGradScaler makes a scaler. For CUDA where there is none it is disabled, with a warning, as in Python.
func NewGradScaler(o ScalerOptions) (*GradScaler, error) {
	s := &GradScaler{enabled: !o.Disabled, device: o.Device, initScale: o.InitScale, growth: o.GrowthFactor, backoff: o.BackoffFactor,
		interval: int64(o.GrowthInterval)}
	if s.enabled && isCUDA(o.Device) {
		ok, err := tdp.CUDAAvailable()
		if err != nil {
			return nil, err
		}
		if !ok {
			slog.Warn("GradScaler is enabled for CUDA, but CUDA is not available: disabled")
			s.enabled = false
		}
	}
	orDefault(&s.initScale, 65536)
	orDefault(&s.growth, 2)
	orDefault(&s.backoff, 0.5)
	if s.interval == 0 {
		s.interval = 2000
	}
	if s.growth <= 1 {
		return nil, errors.New("the growth factor must be > 1.0")
	}
	if s.backoff >= 1 {
		return nil, errors.New("the backoff factor must be < 1.0")
	}
	return s, nil
}

func orDefault(p *float64, v float64) {
	if *p == 0 {
		*p = v
	}
}

// Enabled tells whether the scaler does anything.
func (s *GradScaler) Enabled() bool { return s.enabled }

func (s *GradScaler) init(device gotch.Device) error {
	scale, err := scalar([]float32{float32(s.initScale)}, device)
	if err != nil {
		return err
	}
	tracker, err := scalar([]int32{int32(s.initTracker)}, device)
	if err != nil {
		return err
	}
	s.scale, s.tracker = scale, tracker
	return nil
}

func scalar[T tdp.Element](v []T, device gotch.Device) (*ts.Tensor, error) {
	return tdp.FromSlice(v, nil, device)
}

// Scale gives output times the scale; use it on the loss that backward starts from. A disabled scaler gives a second
// handle on output. The result is the caller's to drop.
func (s *GradScaler) Scale(output *ts.Tensor) (*ts.Tensor, error) {
	if !s.enabled {
		return tdp.Share(output)
	}
	if s.scale == nil {
		info, err := tdp.Describe(output)
		if err != nil {
			return nil, err
		}
		if err := s.init(info.Device); err != nil {
			return nil, err
		}
	}
	return tdp.AMPScale(output, s.scale)
}

func (s *GradScaler) of(o optim.Optimizer) *perOptimizer {
	n := o.Native()
	for _, p := range s.optimizers {
		if p.native == n {
			return p
		}
	}
	p := &perOptimizer{native: n}
	s.optimizers = append(s.optimizers, p)
	return p
}

// Unscale divides the gradients of an optimizer's parameters by the scale and looks for infinities and NaNs. It is
// needed only to use the gradients before Step, for instance to clip them; Step does it otherwise.
func (s *GradScaler) Unscale(o optim.Optimizer) error {
	if !s.enabled {
		return nil
	}
	if s.scale == nil {
		return fmt.Errorf("unscale_: %w", ErrNotScaled)
	}
	p := s.of(o)
	switch p.stage {
	case unscaled:
		return ErrUnscaledTwice
	case stepped:
		return ErrUnscaleLate
	}
	found, err := tdp.AMPUnscale(p.native, s.scale, false, false)
	if err != nil {
		return err
	}
	p.foundInf, p.stage = found, unscaled
	return nil
}

// gradScaled is an optimizer whose fused kernels unscale and skip by themselves.
type gradScaled interface {
	TakesGradScaling() bool
	SetGradScaling(gradScale, foundInf *ts.Tensor)
}

// Step unscales the gradients if Unscale did not, and steps the optimizer unless there were infinities or NaNs. It tells
// whether the optimizer stepped; with fused optimizers on CUDA nobody on the host knows, and the answer is true.
func (s *GradScaler) Step(o optim.Optimizer) (bool, error) {
	if !s.enabled {
		return true, o.Step()
	}
	if s.scale == nil {
		return false, fmt.Errorf("step: %w", ErrNotScaled)
	}
	p := s.of(o)
	if p.stage == stepped {
		return false, ErrSteppedTwice
	}
	if g, ok := o.(gradScaled); ok && g.TakesGradScaling() {
		return s.stepFused(o, g, p)
	}
	if p.stage == ready {
		if err := s.Unscale(o); err != nil {
			return false, err
		}
	}
	if p.foundInf == nil {
		return false, fmt.Errorf("%w for this optimizer: no parameter has a gradient", ErrNoInfChecks)
	}
	inf, err := value(p.foundInf)
	if err != nil {
		return false, err
	}
	if inf == 0 {
		if err := o.Step(); err != nil {
			return false, err
		}
	}
	p.stage = stepped
	return inf == 0, nil
}

func (s *GradScaler) stepFused(o optim.Optimizer, g gradScaled, p *perOptimizer) (bool, error) {
	var gradScale *ts.Tensor
	if p.stage == ready {
		found, err := tdp.AMPUnscale(p.native, s.scale, true, true)
		if err != nil {
			return false, err
		}
		p.foundInf, gradScale = found, s.scale
	}
	if p.foundInf == nil {
		return false, fmt.Errorf("%w for this optimizer: no parameter has a gradient", ErrNoInfChecks)
	}
	g.SetGradScaling(gradScale, p.foundInf)
	defer g.SetGradScaling(nil, nil)
	if err := o.Step(); err != nil {
		return false, err
	}
	p.stage = stepped
	info, err := tdp.Describe(p.foundInf)
	if err != nil || isCUDA(info.Device) {
		return err == nil, err
	}
	inf, err := value(p.foundInf)
	return inf == 0, err
}

func value(t *ts.Tensor) (float64, error) {
	v, err := tdp.ToSlice[float32](t)
	if err != nil {
		return 0, err
	}
	if len(v) != 1 {
		return 0, fmt.Errorf("a tensor of %d elements is no number", len(v))
	}
	return float64(v[0]), nil
}

// Update ends the iteration: the scale shrinks if a step was skipped, and grows after enough clean ones.
func (s *GradScaler) Update() error {
	if !s.enabled {
		return nil
	}
	if s.scale == nil {
		return fmt.Errorf("update: %w", ErrNotScaled)
	}
	var found []*ts.Tensor
	for _, p := range s.optimizers {
		if p.foundInf != nil {
			found = append(found, p.foundInf)
		}
	}
	if len(found) == 0 {
		return fmt.Errorf("%w prior to update", ErrNoInfChecks)
	}
	if err := tdp.AMPUpdate(s.scale, s.tracker, found, s.growth, s.backoff, s.interval); err != nil {
		return err
	}
	return s.endIteration()
}

// SetScale ends the iteration with a scale of the caller's choice: update(new_scale) in Python.
func (s *GradScaler) SetScale(scale float64) error {
	if !s.enabled {
		return nil
	}
	if s.scale == nil {
		return fmt.Errorf("update: %w", ErrNotScaled)
	}
	if err := fill(s.scale, []float32{float32(scale)}); err != nil {
		return err
	}
	return s.endIteration()
}

func (s *GradScaler) endIteration() error {
	var errs []error
	for _, p := range s.optimizers {
		if p.foundInf != nil {
			errs = append(errs, p.foundInf.Drop())
		}
	}
	s.optimizers = nil
	return errors.Join(errs...)
}

func fill[T tdp.Element](t *ts.Tensor, v []T) error {
	x, err := scalar(v, gotch.CPU)
	if err != nil {
		return err
	}
	return errors.Join(tdp.Copy(t, x, false), x.Drop())
}

// GetScale is the scale, 1 for a disabled scaler. On CUDA it waits for the device.
func (s *GradScaler) GetScale() (float64, error) {
	switch {
	case !s.enabled:
		return 1, nil
	case s.scale == nil:
		return s.initScale, nil
	}
	return value(s.scale)
}

func (s *GradScaler) growthTracker() (int64, error) {
	if s.tracker == nil {
		return s.initTracker, nil
	}
	v, err := tdp.ToSlice[int32](s.tracker)
	if err != nil {
		return 0, err
	}
	return int64(v[0]), nil
}

// GrowthFactor is what the scale grows by.
func (s *GradScaler) GrowthFactor() float64 { return s.growth }

// SetGrowthFactor changes what the scale grows by.
func (s *GradScaler) SetGrowthFactor(f float64) { s.growth = f }

// BackoffFactor is what the scale shrinks by.
func (s *GradScaler) BackoffFactor() float64 { return s.backoff }

// SetBackoffFactor changes what the scale shrinks by.
func (s *GradScaler) SetBackoffFactor(f float64) { s.backoff = f }

// GrowthInterval is how many clean steps it takes for the scale to grow.
func (s *GradScaler) GrowthInterval() int { return int(s.interval) }

// SetGrowthInterval changes how many clean steps it takes for the scale to grow.
func (s *GradScaler) SetGrowthInterval(n int) { s.interval = int64(n) }

// StateDict is the scaler's state in Python's layout, empty for a disabled one. Take it after Update.
func (s *GradScaler) StateDict() (*pickle.Dict, error) {
	d := pickle.NewDict()
	if !s.enabled {
		return d, nil
	}
	scale, err := s.GetScale()
	if err != nil {
		return nil, err
	}
	tracker, err := s.growthTracker()
	if err != nil {
		return nil, err
	}
	return d.Set("scale", scale).Set("growth_factor", s.growth).Set("backoff_factor", s.backoff).
		Set("growth_interval", s.interval).Set("_growth_tracker", tracker), nil
}

// LoadStateDict continues from a state that StateDict, here or in Python, gave.
func (s *GradScaler) LoadStateDict(d *pickle.Dict) error {
	if !s.enabled {
		return nil
	}
	if d.Len() == 0 {
		return ErrEmptyState
	}
	var numbers [5]float64
	for i, key := range []string{"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} {
		v, _ := d.Get(key)
		switch x := v.(type) {
		case float64:
			numbers[i] = x
		case int64:
			numbers[i] = float64(x)
		default:
			return fmt.Errorf("%w: the scaler's %s is a %T", optim.ErrStateDict, key, v)
		}
	}
	s.initScale, s.growth, s.backoff = numbers[0], numbers[1], numbers[2]
	s.interval, s.initTracker = int64(numbers[3]), int64(numbers[4])
	if s.scale == nil {
		return nil
	}
	return errors.Join(fill(s.scale, []float32{float32(s.initScale)}), fill(s.tracker, []int32{int32(s.initTracker)}))
}

// Close drops the scaler's tensors.
func (s *GradScaler) Close() error {
	err := s.endIteration()
	for _, t := range []*ts.Tensor{s.scale, s.tracker} {
		if t != nil {
			err = errors.Join(err, t.Drop())
		}
	}
	s.scale, s.tracker = nil, nil
	return err
}
