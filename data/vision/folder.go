package vision

import (
	"bufio"
	"context"
	"fmt"
	"image"
	_ "image/gif" // decoders
	_ "image/jpeg"
	_ "image/png"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	_ "golang.org/x/image/bmp" // more decoders
	_ "golang.org/x/image/tiff"
	_ "golang.org/x/image/webp"
)

// Folder is a set of image files, one folder a class. It is a data.Dataset[Sample] and a data.Source; images are
// decoded when they are asked for, so load it with workers.
type Folder struct {
	classes []string
	files   []string
	labels  []int
	encoder
}

// extensions are those of torchvision that can be decoded here.
var extensions = []string{".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".gif"}

// maxPixels bounds what one image may unpack to: where PIL refuses too. Tests lower it.
var maxPixels int64 = 178956970

// ImageFolder finds images as root/class/.../name.png. Classes are the folders by name, in alphabetical order; images
// come in torchvision's order. The transform must bring all images to one size.
func ImageFolder(root string, t *transforms.Pipeline) (*Folder, error) {
	enc, err := newEncoder(t)
	if err != nil {
		return nil, err
	}
	if _, err := enc.fields(transforms.Size{Height: -1, Width: -1, Channels: 3}); err != nil {
		return nil, err
	}
	d := &Folder{encoder: enc}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("vision: %w", err)
	}
	for _, e := range entries {
		if info, err := os.Stat(filepath.Join(root, e.Name())); err == nil && info.IsDir() {
			d.classes = append(d.classes, e.Name())
		}
	}
	if len(d.classes) == 0 {
		return nil, fmt.Errorf("vision: couldn't find any class folder in %s", root)
	}
	slices.Sort(d.classes)
	for label, class := range d.classes {
		before := len(d.files)
		if err := d.walk(filepath.Join(root, class), label); err != nil {
			return nil, fmt.Errorf("vision: %w", err)
		}
		if len(d.files) == before {
			return nil, fmt.Errorf("vision: found no valid file for the class %s in %s; supported are %s", class, root, strings.Join(extensions, " "))
		}
	}
	return d, nil
}

// walk adds the images below a folder, folder by folder in the order of their paths.
func (d *Folder) walk(dir string, label int) error {
	byDir := map[string][]string{}
	err := filepath.WalkDir(dir+string(filepath.Separator), func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if slices.Contains(extensions, strings.ToLower(filepath.Ext(p))) {
			byDir[filepath.Dir(p)] = append(byDir[filepath.Dir(p)], filepath.Base(p))
		}
		return nil
	})
	if err != nil {
		return err
	}
	dirs := make([]string, 0, len(byDir))
	for k := range byDir {
		dirs = append(dirs, k)
	}
	slices.Sort(dirs)
	for _, k := range dirs {
		slices.Sort(byDir[k])
		for _, f := range byDir[k] {
			d.files = append(d.files, filepath.Join(k, f))
			d.labels = append(d.labels, label)
		}
	}
	return nil
}

// Classes names the labels.
func (d *Folder) Classes() []string { return d.classes }

// File is the path of image i.
func (d *Folder) File(i int) string { return d.files[i] }

// Len implements data.Dataset.
func (d *Folder) Len() int { return len(d.files) }

// Item implements data.Dataset: it decodes image i to RGB.
func (d *Folder) Item(_ context.Context, i int) (Sample, error) {
	if uint(i) >= uint(len(d.files)) {
		return Sample{}, &data.IndexError{Index: i, Len: len(d.files)}
	}
	f, err := os.Open(d.files[i])
	if err != nil {
		return Sample{}, fmt.Errorf("vision: %w", err)
	}
	defer f.Close()
	img, err := decode(d.files[i], f)
	return Sample{img, d.labels[i]}, err
}

// decode reads an image file, after a look at the size it claims.
func decode(file string, f io.ReadSeeker) (out transforms.Image, err error) {
	defer func() { // decoders have bugs: a broken file must not end a training job
		if v := recover(); v != nil {
			err = bad(file, 0, ErrDamaged, "its decoder panics: %v", v)
		}
	}()
	cfg, _, err := image.DecodeConfig(bufio.NewReader(f))
	if err != nil {
		return transforms.Image{}, &FormatError{File: file, Kind: ErrDamaged, Detail: "not an image that can be decoded", Err: err}
	}
	if cfg.Width <= 0 || cfg.Height <= 0 || int64(cfg.Width)*int64(cfg.Height) > maxPixels {
		return transforms.Image{}, bad(file, 0, ErrOversized, "an image of %dx%d pixels", cfg.Width, cfg.Height)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return transforms.Image{}, err
	}
	img, _, err := image.Decode(bufio.NewReader(f))
	if err != nil {
		at, _ := f.Seek(0, io.SeekCurrent)
		return transforms.Image{}, &FormatError{File: file, Offset: at, Kind: ErrDamaged, Detail: "image data", Err: err}
	}
	return transforms.FromImage(img).RGB(), nil
}

// Fields implements data.Source.
func (d *Folder) Fields() ([]data.Field, error) {
	return d.fields(transforms.Size{Height: -1, Width: -1, Channels: 3})
}

// Write implements data.Source.
func (d *Folder) Write(ctx context.Context, i int, dst data.Row, rng *rand.Rand) error {
	s, err := d.Item(ctx, i)
	if err != nil {
		return err
	}
	return d.Encode(s, dst, rng)
}
