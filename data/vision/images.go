package vision

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/sugarme/gotch"
)

// Sample is one labelled image. Its bytes are the set's: they must not be changed.
type Sample struct {
	Image transforms.Image
	Label int
}

// Images is a labelled set of images of one size, in memory. It is a data.Dataset[Sample] and a data.Source.
type Images struct {
	name      string
	classes   []string
	shape     transforms.Image // without pixels
	pix       []byte
	labels    []byte
	synthetic *synthetic // makes the images, where they are made up
	encoder
}

// Name is what the set is.
func (d *Images) Name() string { return d.name }

// Classes names the labels. It may be empty where the files do not tell.
func (d *Images) Classes() []string { return d.classes }

// Len implements data.Dataset.
func (d *Images) Len() int { return len(d.labels) }

// Label is that of image i.
func (d *Images) Label(i int) int { return int(d.labels[i]) }

// Item implements data.Dataset.
func (d *Images) Item(_ context.Context, i int) (Sample, error) {
	if uint(i) >= uint(len(d.labels)) {
		return Sample{}, &data.IndexError{Index: i, Len: len(d.labels)}
	}
	m := d.shape
	size := m.Height * m.Width * m.Channels
	if d.synthetic != nil {
		m.Pix = make([]byte, size)
		d.synthetic.draw(m.Pix, i, int(d.labels[i]))
	} else {
		m.Pix = d.pix[i*size : (i+1)*size : (i+1)*size]
	}
	return Sample{m, int(d.labels[i])}, nil
}

// Fields implements data.Source: the image's floats (or bytes, without ToTensor) and its label.
func (d *Images) Fields() ([]data.Field, error) {
	return d.fields(transforms.Size{Height: d.shape.Height, Width: d.shape.Width, Channels: d.shape.Channels})
}

// Write implements data.Source.
func (d *Images) Write(ctx context.Context, i int, dst data.Row, rng *rand.Rand) error {
	s, err := d.Item(ctx, i)
	if err != nil {
		return err
	}
	return d.Encode(s, dst, rng)
}

// With is the same images through another transform, such as one without augmentation.
func (d *Images) With(t *transforms.Pipeline) (*Images, error) {
	enc, err := newEncoder(t)
	if err != nil {
		return nil, err
	}
	c := *d
	c.encoder = enc
	if _, err := c.Fields(); err != nil {
		return nil, err
	}
	return &c, nil
}

// encoder writes samples into batches through a pipeline.
type encoder struct{ pipeline *transforms.Pipeline }

func newEncoder(t *transforms.Pipeline) (encoder, error) {
	if t == nil {
		var err error
		if t, err = transforms.Compose(transforms.ToTensor{}); err != nil {
			return encoder{}, err
		}
	}
	return encoder{t}, nil
}

func (e encoder) fields(in transforms.Size) ([]data.Field, error) {
	out, err := e.pipeline.Output(in)
	if err != nil {
		return nil, err
	}
	if out.Height < 0 || out.Width < 0 || out.Channels < 0 {
		return nil, errors.New("vision: the transform lets images keep different sizes, which no batch can hold: end it with CenterCrop, or Resize with Height and Width")
	}
	dtype := gotch.Uint8
	if e.pipeline.Float() {
		dtype = gotch.Float
	}
	return []data.Field{
		{Name: "input", DType: dtype, Shape: []int64{int64(out.Channels), int64(out.Height), int64(out.Width)}},
		{Name: "target", DType: gotch.Int64},
	}, nil
}

// Encode implements data.Encoder.
func (e encoder) Encode(s Sample, dst data.Row, rng *rand.Rand) error {
	label, err := data.Elements[int64](dst, 1)
	if err != nil {
		return err
	}
	label[0] = int64(s.Label)
	if !e.pipeline.Float() {
		return e.pipeline.ApplyBytes(s.Image, dst.Bytes(0), rng)
	}
	v, err := data.Elements[float32](dst, 0)
	if err != nil {
		return err
	}
	return e.pipeline.Apply(s.Image, v, rng)
}

// check compares counts and labels. at gives where label i lies in its file.
func (d *Images) check(images, labels string, count, classes int, at func(i int) int64) error {
	if count != len(d.labels) {
		return bad(labels, 0, ErrCount, "it has %d labels, %s has %d images", len(d.labels), images, count)
	}
	for i, l := range d.labels {
		if int(l) >= classes {
			return bad(labels, at(i), ErrLabel, "label %d of image %d, there are %d classes", l, i, classes)
		}
	}
	return nil
}

// Options say where a set is and what becomes of its images.
type Options struct {
	Root      string // the folder that holds data sets; "" is "data"
	Test      bool   // the test images instead of the training ones
	Transform *transforms.Pipeline

	// Synthetic makes images up instead of reading any. Size is how many; 0 is as many as the real set has.
	Synthetic bool
	Size      int

	// Download fetches what is missing: one process a node, the others wait.
	Download bool
	Mirror   string // where the files are, instead of the published place
	Progress func(file string, done, total int64)
	fetch    fetcher // for tests
}

func (o Options) root() string {
	if o.Root == "" {
		return "data"
	}
	return o.Root
}

func (o Options) part() string {
	if o.Test {
		return "test"
	}
	return "train"
}

func label(set string, o Options) string { return fmt.Sprintf("%s (%s)", set, o.part()) }
