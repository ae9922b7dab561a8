package program

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/spf13/pflag"
)

// Images says where a program's images come from.
type Images struct {
	Load func(context.Context, vision.Options) (*vision.Images, error) // such as vision.MNIST

	Dir                 string
	Download, Synthetic bool
	Size                int
}

// Bind makes flags.
func (m *Images) Bind(flags *pflag.FlagSet) {
	flags.StringVar(&m.Dir, "data", "data", "folder that has the images, where torchvision keeps them too")
	flags.BoolVar(&m.Download, "download", false, "fetch what is missing there")
	flags.BoolVar(&m.Synthetic, "synthetic", false, "train on made-up images of the same shape, without any files")
	flags.IntVar(&m.Size, "size", 0, "number of made-up training images, and a fifth of it of test images; 0 is as many as the real ones")
}

// Check tells what makes no sense.
func (m *Images) Check() error {
	switch {
	case m.Size < 0:
		return fmt.Errorf("--size must not be negative, got %d", m.Size)
	case m.Size > 0 && !m.Synthetic:
		return errors.New("--size is for made-up images: add --synthetic")
	case m.Download && m.Synthetic:
		return errors.New("--download and --synthetic exclude each other")
	}
	return nil
}

// Set reads the training or the test images.
func (m *Images) Set(ctx context.Context, test bool, t *transforms.Pipeline) (*vision.Images, error) {
	o := vision.Options{
		Root: m.Dir, Test: test, Transform: t, Download: m.Download, Synthetic: m.Synthetic, Size: m.Size,
	}
	if test && m.Size > 0 {
		o.Size = max(1, m.Size/5)
	}
	o.Progress = func(file string, done, total int64) {
		if done == total {
			fmt.Fprintf(os.Stderr, "Fetched %s, %d bytes\n", file, total)
		}
	}
	set, err := m.Load(ctx, o)
	var missing *vision.MissingError
	if errors.As(err, &missing) {
		return nil, &launch.ExitError{Code: 2, Err: err} // it is the command line that is wrong
	}
	return set, err
}

// Prepare finds out whether the images are there, before any rank is started: it reads the test images, the smaller
// part.
func (m *Images) Prepare(ctx context.Context) error {
	if m.Synthetic {
		return nil
	}
	_, err := m.Set(ctx, true, nil)
	return err
}

// TestLoader gives this rank's share of the test images, so that each of them is seen once.
func (m *Images) TestLoader(set data.Source, pg *torchddp.ProcessGroup, o data.Options) (*data.DataLoader[*data.Batch], error) {
	sampler, err := data.NewEvalSampler(set.Len(), data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()})
	if err != nil {
		return nil, err
	}
	o.Sampler = sampler
	return data.NewDataLoader(set, o)
}
