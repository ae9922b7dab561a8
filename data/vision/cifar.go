package vision

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goddp/goddp/data/transforms"
)

const cifarPixels = 3 * 32 * 32

// cifarSet is CIFAR-10 or CIFAR-100.
type cifarSet struct {
	name    string
	mirror  string
	labels  int      // classes
	keys    []string // of the labels in the pickles
	names   string   // key of the class names in the pickled meta file
	classes []string
	places  []cifarPlace
}

// cifarPlace is one of the forms in which the set is published.
type cifarPlace struct {
	dir     string // unpacked
	archive resource
	binary  bool
	lead    int // label bytes before an image in the binary form; the last one counts
	train   []string
	test    []string
	meta    string
}

var cifar10 = cifarSet{
	name:    "CIFAR10",
	mirror:  "https://www.cs.toronto.edu/~kriz/",
	labels:  10,
	keys:    []string{"labels", "fine_labels"},
	names:   "label_names",
	classes: []string{"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"},
	places: []cifarPlace{{
		dir:     "cifar-10-batches-py",
		archive: resource{"cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170498071},
		train:   []string{"data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"},
		test:    []string{"test_batch"},
		meta:    "batches.meta",
	}, {
		dir:     "cifar-10-batches-bin",
		archive: resource{"cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170052171},
		binary:  true,
		lead:    1,
		train:   []string{"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"},
		test:    []string{"test_batch.bin"},
	}},
}

var cifar100 = cifarSet{
	name:   "CIFAR100",
	mirror: "https://www.cs.toronto.edu/~kriz/",
	labels: 100,
	keys:   []string{"fine_labels"},
	names:  "fine_label_names",
	places: []cifarPlace{{
		dir:     "cifar-100-python",
		archive: resource{"cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169001437},
		train:   []string{"train"},
		test:    []string{"test"},
		meta:    "meta",
	}, {
		dir:     "cifar-100-binary",
		archive: resource{"cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168513733},
		binary:  true,
		lead:    2,
		train:   []string{"train.bin"},
		test:    []string{"test.bin"},
		meta:    "fine_label_names.txt",
	}},
}

// CIFAR10 is the set of small photographs in ten classes: 50,000 training and 10,000 test images of 32x32 RGB pixels.
//
// It is looked for under Root as cifar-10-batches-py, cifar-10-python.tar.gz, cifar-10-batches-bin and
// cifar-10-binary.tar.gz, in this order.
func CIFAR10(ctx context.Context, o Options) (*Images, error) { return cifar10.load(ctx, o) }

// CIFAR100 is CIFAR10's sister with 100 classes, kept under Root as cifar-100-python, cifar-100-python.tar.gz,
// cifar-100-binary or cifar-100-binary.tar.gz.
func CIFAR100(ctx context.Context, o Options) (*Images, error) { return cifar100.load(ctx, o) }

func (c cifarSet) load(ctx context.Context, o Options) (*Images, error) {
	enc, err := newEncoder(o.Transform)
	if err != nil {
		return nil, err
	}
	d := &Images{name: label(c.name, o), classes: c.classes, encoder: enc,
		shape: transforms.Image{Height: 32, Width: 32, Channels: 3, Planar: true}}
	if o.Synthetic {
		size := 50000
		if o.Test {
			size = 10000
		}
		d.makeUp(o, size, c.labels)
	} else if err := c.read(ctx, d, o); err != nil {
		return nil, err
	}
	if _, err := d.Fields(); err != nil {
		return nil, err
	}
	return d, nil
}

func (c cifarSet) read(ctx context.Context, d *Images, o Options) error {
	for _, p := range c.places {
		dir, archive := filepath.Join(o.root(), p.dir), filepath.Join(o.root(), p.archive.name)
		for _, dir := range []string{dir, o.root()} { // also right where --data points
			if complete(dir, p.files(o)) {
				return c.fill(d, p, o, func(want []string, take func(string, *source, int64) error) error {
					return fromDir(dir, want, p.files(o), take)
				})
			}
		}
		if info, err := os.Stat(archive); err == nil && info.Mode().IsRegular() {
			return c.fill(d, p, o, func(want []string, take func(string, *source, int64) error) error {
				return fromTar(archive, want, p.files(o), take)
			})
		}
	}
	if o.Download {
		p := c.places[0]
		if err := o.get(ctx, c.mirror, p.archive, filepath.Join(o.root(), p.archive.name)); err != nil {
			return err
		}
		o.Download = false
		return c.read(ctx, d, o)
	}
	e := &MissingError{Set: d.name, Root: o.root()}
	for _, p := range c.places {
		e.Files = append(e.Files, filepath.Join(o.root(), p.archive.name),
			filepath.Join(o.root(), p.dir)+" with "+strings.Join(p.files(o), ", "))
	}
	return e
}

func (p cifarPlace) files(o Options) []string {
	if o.Test {
		return p.test
	}
	return p.train
}

func complete(dir string, files []string) bool {
	for _, f := range files {
		if info, err := os.Stat(filepath.Join(dir, f)); err != nil || !info.Mode().IsRegular() {
			return false
		}
	}
	return true
}

// fromDir gives the wanted files of a folder to take. Only the needed ones must be there.
func fromDir(dir string, want, need []string, take func(name string, s *source, size int64) error) error {
	for _, name := range want {
		file := filepath.Join(dir, name)
		info, err := os.Stat(file)
		if err != nil {
			if slices.Contains(need, name) {
				return err
			}
			continue
		}
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		err = take(name, &source{name: file, r: f}, info.Size())
		f.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// fromTar gives the wanted members of a tar.gz to take, in one reading, and stops behind the last one.
func fromTar(archive string, want, need []string, take func(name string, s *source, size int64) error) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	return readTar(archive, f, want, need, take)
}

func readTar(archive string, r io.Reader, want, need []string, take func(name string, s *source, size int64) error) error {
	s, err := unpack(archive, r)
	if err != nil {
		return err
	}
	limited := &io.LimitedReader{R: s.r, N: maxSet}
	s.r = limited
	t := tar.NewReader(s)
	seen := map[string]bool{}
	for len(seen) < len(want) {
		h, err := t.Next()
		if err != nil {
			switch {
			case limited.N <= 0:
				return bad(archive, s.at, ErrOversized, "its content exceeds %d bytes", maxSet)
			case err == io.EOF && s.at > 0:
				for _, n := range need {
					if !seen[n] {
						return bad(archive, s.at, ErrTruncated, "it does not hold %s", n)
					}
				}
				return nil
			case errors.Is(err, tar.ErrHeader):
				return &FormatError{File: archive, Offset: s.at, Kind: ErrMagic, Detail: "tar header", Err: err}
			}
			return s.bad(err, "tar header")
		}
		name := path.Base(h.Name)
		if h.Typeflag != tar.TypeReg || !slices.Contains(want, name) || seen[name] {
			continue
		}
		seen[name] = true
		if h.Size > maxSet {
			return bad(archive, s.at, ErrOversized, "%s claims %d bytes", name, h.Size)
		}
		if err := take(name, &source{name: archive + ":" + name, r: t}, h.Size); err != nil {
			if limited.N <= 0 {
				return bad(archive, s.at, ErrOversized, "its content exceeds %d bytes", maxSet)
			}
			return err
		}
	}
	return nil
}

// fill reads the set's files through walk.
func (c cifarSet) fill(d *Images, p cifarPlace, o Options, walk func(want []string, take func(string, *source, int64) error) error) error {
	files := p.files(o)
	want := slices.Clone(files)
	if p.meta != "" && c.classes == nil {
		want = append(want, p.meta)
	}
	type batch struct{ pix, labels []byte }
	batches := make(map[string]batch, len(files))
	total := 0
	err := walk(want, func(name string, s *source, size int64) error {
		if size > maxSet {
			return bad(s.name, 0, ErrOversized, "it has %d bytes", size)
		}
		content, err := s.exactly(size, name)
		if err != nil {
			return err
		}
		if name == p.meta {
			d.classes, err = c.meta(s.name, content, p.binary)
			return err
		}
		var b batch
		if p.binary {
			b.pix, b.labels, err = readBinary(s.name, content, p.lead, c.labels)
		} else {
			b.pix, b.labels, err = c.readPickle(s.name, content)
		}
		batches[name] = b
		total += len(b.labels)
		return err
	})
	if err != nil {
		return err
	}
	d.pix, d.labels = make([]byte, 0, total*cifarPixels), make([]byte, 0, total)
	if len(files) == 1 {
		d.pix, d.labels = batches[files[0]].pix, batches[files[0]].labels
		return nil
	}
	for _, f := range files {
		d.pix = append(d.pix, batches[f].pix...)
		d.labels = append(d.labels, batches[f].labels...)
		delete(batches, f)
	}
	return nil
}

// readBinary reads records of label bytes and an image.
func readBinary(file string, b []byte, lead, classes int) (pix, labels []byte, err error) {
	const planes = cifarPixels
	record := lead + planes
	if len(b) == 0 || len(b)%record != 0 {
		return nil, nil, bad(file, int64(len(b)/record*record), ErrTruncated, "%d bytes are not a number of records of %d", len(b), record)
	}
	n := len(b) / record
	labels = make([]byte, n)
	for i := range n {
		at := i*record + lead - 1
		if labels[i] = b[at]; int(labels[i]) >= classes {
			return nil, nil, bad(file, int64(at), ErrLabel, "label %d of image %d, there are %d classes", labels[i], i, classes)
		}
		copy(b[i*planes:], b[i*record+lead:(i+1)*record]) // in place: the images only move forward
	}
	return b[: n*planes : n*planes], labels, nil
}

func (c cifarSet) readPickle(file string, b []byte) (pix, labels []byte, err error) {
	dict, err := unpickle(file, b)
	if err != nil {
		return nil, nil, err
	}
	pix, n, err := dict.array(file, "data", cifarPixels)
	if err != nil {
		return nil, nil, err
	}
	for _, key := range c.keys {
		if _, ok := dict.items[pyText(key)]; !ok && key != c.keys[len(c.keys)-1] {
			continue
		}
		if labels, err = dict.bytes(file, key); err != nil {
			return nil, nil, err
		}
		break
	}
	if len(labels) != n {
		return nil, nil, bad(file, 0, ErrCount, "it has %d labels and %d images", len(labels), n)
	}
	for i, l := range labels {
		if int(l) >= c.labels {
			return nil, nil, bad(file, 0, ErrLabel, "label %d of image %d, there are %d classes", l, i, c.labels)
		}
	}
	return pix, labels, nil
}

// meta reads the names of the classes.
func (c cifarSet) meta(file string, b []byte, binary bool) ([]string, error) {
	if binary {
		var names []string
		for line := range bytes.Lines(b) {
			if s := strings.TrimSpace(string(line)); s != "" {
				names = append(names, s)
			}
		}
		return names, nil
	}
	dict, err := unpickle(file, b)
	if err != nil {
		return nil, err
	}
	return dict.names(c.names), nil
}
