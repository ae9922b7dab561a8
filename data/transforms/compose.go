package transforms

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
)

// Transform is a step of a Pipeline: one of this package's types, or a Func.
type Transform interface{ name() string }

// onImage is a step on bytes.
type onImage interface {
	Transform
	check() error
	apply(f *frame, rng *rand.Rand) error
	// size tells what a size becomes. An edge of -1 is not known before the image is.
	size(in Size) Size
}

// onTensor is a step on floats.
type onTensor interface {
	Transform
	checkFor(channels int) error
	transform(t tensor, rng *rand.Rand)
}

// Size is that of an image. An edge of -1 varies from image to image.
type Size struct{ Height, Width, Channels int }

// tensor is CHW floats.
type tensor struct {
	v       []float32
	c, h, w int
}

// Pipeline is a list of transforms, made by Compose. Several goroutines may use one.
type Pipeline struct {
	image  []onImage
	float  bool
	norm   []Normalize // directly behind ToTensor: part of its table
	tensor []onTensor
	frames sync.Pool

	tables [maxChannels + 1]atomic.Pointer[[]*[256]float32] // by number of channels
}

// Compose checks a list of transforms and makes a pipeline of it. Without ToTensor the pipeline gives bytes, CHW, as
// torchvision's PILToTensor does.
func Compose(steps ...Transform) (*Pipeline, error) {
	p := &Pipeline{}
	p.frames.New = func() any { return new(frame) }
	for i, s := range steps {
		fail := func(err error) (*Pipeline, error) {
			return nil, fmt.Errorf("transforms: step %d, %s: %w", i, s.name(), err)
		}
		switch s := s.(type) {
		case nil:
			return nil, fmt.Errorf("transforms: step %d is nil", i)
		case onImage:
			if p.float {
				return fail(errors.New("it works on images: put it before ToTensor"))
			}
			if err := s.check(); err != nil {
				return fail(err)
			}
			p.image = append(p.image, s)
		case ToTensor:
			if p.float {
				return fail(errors.New("there is one already"))
			}
			p.float = true
		case onTensor:
			if !p.float {
				return fail(errors.New("it works on tensors: put it behind ToTensor"))
			}
			if err := s.checkFor(0); err != nil {
				return fail(err)
			}
			if n, ok := s.(Normalize); ok && len(p.tensor) == 0 {
				p.norm = append(p.norm, n)
			} else {
				p.tensor = append(p.tensor, s)
			}
		}
	}
	return p, nil
}

// Float tells whether the pipeline gives float32 elements rather than bytes.
func (p *Pipeline) Float() bool { return p.float }

// Output tells what an image of a given size becomes. Edges that the pipeline does not fix stay -1.
func (p *Pipeline) Output(in Size) (Size, error) {
	for _, s := range p.image {
		in = s.size(in)
	}
	for _, n := range p.norm {
		if err := n.checkFor(in.Channels); err != nil {
			return in, fmt.Errorf("transforms: %s: %w", n.name(), err)
		}
	}
	for _, s := range p.tensor {
		if err := s.checkFor(in.Channels); err != nil {
			return in, fmt.Errorf("transforms: %s: %w", s.name(), err)
		}
	}
	return in, nil
}

// run takes an image through the steps on bytes and checks what comes out.
func (p *Pipeline) run(img Image, n int, rng *rand.Rand) (*frame, error) {
	if err := img.Check(); err != nil {
		return nil, err
	}
	if rng == nil {
		rng = rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	}
	f := p.frames.Get().(*frame)
	f.set(img)
	for _, s := range p.image {
		if err := s.apply(f, rng); err != nil {
			p.release(f)
			return nil, fmt.Errorf("transforms: %s: %w", s.name(), err)
		}
	}
	if f.src.Channels*f.h*f.w != n {
		err := fmt.Errorf("transforms: an image of %dx%dx%d became %dx%dx%d, but a sample has room for %d values: end with CenterCrop, or Resize with Height and Width, so that all images get one size",
			img.Channels, img.Height, img.Width, f.src.Channels, f.h, f.w, n)
		p.release(f)
		return nil, err
	}
	return f, nil
}

func (p *Pipeline) release(f *frame) {
	f.src = Image{} // do not hold the caller's image
	p.frames.Put(f)
}

// Apply writes the image into dst as CHW floats. The pipeline must have a ToTensor. rng nil is random numbers that no
// seed repeats.
func (p *Pipeline) Apply(img Image, dst []float32, rng *rand.Rand) error {
	if !p.float {
		return errors.New("transforms: the pipeline has no ToTensor: it gives bytes")
	}
	f, err := p.run(img, len(dst), rng)
	if err != nil {
		return err
	}
	defer p.release(f)
	c, plane := f.src.Channels, f.h*f.w
	tables, err := p.table(c)
	if err != nil {
		return err
	}
	for ch := range c {
		write(f, ch, tables[ch], dst[ch*plane:(ch+1)*plane], 1)
	}
	for _, s := range p.tensor {
		if err := s.checkFor(c); err != nil {
			return fmt.Errorf("transforms: %s: %w", s.name(), err)
		}
		s.transform(tensor{dst, c, f.h, f.w}, rng)
	}
	return nil
}

// ApplyBytes writes the image into dst as CHW bytes. The pipeline must have no ToTensor.
func (p *Pipeline) ApplyBytes(img Image, dst []byte, rng *rand.Rand) error {
	if p.float {
		return errors.New("transforms: the pipeline has a ToTensor: it gives floats")
	}
	f, err := p.run(img, len(dst), rng)
	if err != nil {
		return err
	}
	defer p.release(f)
	plane := f.h * f.w
	for ch := range f.src.Channels {
		write(f, ch, &identity, dst[ch*plane:(ch+1)*plane], 1)
	}
	return nil
}

// table gives, a channel, what each byte becomes.
func (p *Pipeline) table(channels int) ([]*[256]float32, error) {
	if t := p.tables[channels].Load(); t != nil {
		return *t, nil
	}
	t := make([]*[256]float32, channels)
	for c := range t {
		t[c] = new([256]float32)
		for i := range t[c] {
			t[c][i] = float32(i) / 255
		}
		for _, n := range p.norm {
			if err := n.checkFor(channels); err != nil {
				return nil, fmt.Errorf("transforms: %s: %w", n.name(), err)
			}
			n.channel(t[c][:], c)
		}
	}
	p.tables[channels].Store(&t)
	return t, nil
}

// Func is a step of one's own on images. It must not keep or change the image it gets.
type Func struct {
	Label string
	Do    func(img Image, rng *rand.Rand) (Image, error)
	Sizes func(in Size) Size // nil: the size stays
}

func (t Func) name() string { return "Func " + t.Label }
func (t Func) check() error {
	if t.Do == nil {
		return errors.New("the function Do is missing")
	}
	return nil
}
func (t Func) size(in Size) Size {
	if t.Sizes == nil {
		return in
	}
	return t.Sizes(in)
}
func (t Func) apply(f *frame, rng *rand.Rand) error {
	img, err := t.Do(f.render(), rng)
	if err == nil {
		err = img.Check()
	}
	if err != nil {
		return err
	}
	f.set(img)
	return nil
}
