package vision

import (
	"context"
	"os"
	"path/filepath"

	"github.com/goddp/goddp/data/transforms"
)

// resource is a published file.
type resource struct {
	name string
	md5  string
	size int64
}

// mnistLike is a set in MNIST's format.
type mnistLike struct {
	name    string
	mirror  string
	classes []string
	files   [4]resource // train images and labels, test images and labels
}

var mnistFiles = mnistLike{
	name:   "MNIST",
	mirror: "https://ossci-datasets.s3.amazonaws.com/mnist/",
	classes: []string{"0 - zero", "1 - one", "2 - two", "3 - three", "4 - four", "5 - five", "6 - six", "7 - seven",
		"8 - eight", "9 - nine"},
	files: [4]resource{
		{"train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9912422},
		{"train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28881},
		{"t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1648877},
		{"t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4542},
	},
}

var fashionFiles = mnistLike{
	name:   "FashionMNIST",
	mirror: "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
	classes: []string{"T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
		"Ankle boot"},
	files: [4]resource{
		{"train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26421880},
		{"train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29515},
		{"t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4422102},
		{"t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5148},
	},
}

// MNIST is the set of handwritten digits: 60,000 training and 10,000 test images of 28x28 grey pixels.
//
// It is looked for in Root/MNIST/raw, Root/MNIST and Root, packed or not.
func MNIST(ctx context.Context, o Options) (*Images, error) { return mnistFiles.load(ctx, o) }

// FashionMNIST is the set of clothes in MNIST's format, in Root/FashionMNIST/raw, Root/FashionMNIST or Root/fashion.
func FashionMNIST(ctx context.Context, o Options) (*Images, error) { return fashionFiles.load(ctx, o) }

func (m mnistLike) load(ctx context.Context, o Options) (*Images, error) {
	enc, err := newEncoder(o.Transform)
	if err != nil {
		return nil, err
	}
	d := &Images{name: label(m.name, o), classes: m.classes, shape: transforms.Image{Height: 28, Width: 28, Channels: 1}, encoder: enc}
	if o.Synthetic {
		size := 60000
		if o.Test {
			size = 10000
		}
		d.makeUp(o, size, len(m.classes))
	} else if err := m.read(ctx, d, o); err != nil {
		return nil, err
	}
	if _, err := d.Fields(); err != nil {
		return nil, err
	}
	return d, nil
}

func (m mnistLike) read(ctx context.Context, d *Images, o Options) error {
	files := m.files[:2]
	if o.Test {
		files = m.files[2:]
	}
	raw := filepath.Join(o.root(), m.name, "raw")
	dirs := []string{raw, filepath.Join(o.root(), m.name)}
	if m.name == "MNIST" {
		dirs = append(dirs, o.root())
	} else {
		dirs = append(dirs, filepath.Join(o.root(), "fashion"))
	}
	paths, ok := findBoth(dirs, files)
	if !ok && o.Download {
		for _, f := range files {
			if err := o.get(ctx, m.mirror, f, filepath.Join(raw, f.name)); err != nil {
				return err
			}
		}
		paths, ok = findBoth(dirs, files)
	}
	if !ok {
		e := &MissingError{Set: d.name, Root: o.root()}
		for _, dir := range dirs {
			e.Files = append(e.Files, filepath.Join(dir, files[0].name)+" and "+files[1].name+" (with or without .gz)")
		}
		return e
	}
	return readMNIST(d, paths[0], paths[1], len(m.classes))
}

// findBoth looks for an images file and its labels file in one folder, unpacked ones first.
func findBoth(dirs []string, files []resource) (paths [2]string, ok bool) {
	for _, dir := range dirs {
		found := 0
		for i, f := range files {
			for _, name := range []string{f.name[:len(f.name)-len(".gz")], f.name} {
				if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode().IsRegular() {
					paths[i] = filepath.Join(dir, name)
					found++
					break
				}
			}
		}
		if found == 2 {
			return paths, true
		}
	}
	return paths, false
}

func readMNIST(d *Images, images, labels string, classes int) error {
	s, done, err := open(images)
	if err != nil {
		return err
	}
	defer done()
	shape, pix, err := readIDX(s, 3)
	if err != nil {
		return err
	}
	if shape[1] != d.shape.Height || shape[2] != d.shape.Width {
		return bad(images, 8, ErrMagic, "images of %dx%d, expected %dx%d", shape[1], shape[2], d.shape.Height, d.shape.Width)
	}
	l, ldone, err := open(labels)
	if err != nil {
		return err
	}
	defer ldone()
	_, d.labels, err = readIDX(l, 1)
	if err != nil {
		return err
	}
	d.pix = pix
	return d.check(images, labels, shape[0], classes, func(i int) int64 { return int64(8 + i) })
}
