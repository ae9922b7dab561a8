package vision

import (
	"bytes"
	"context"
	"errors"
	"image"
	"image/color"
	"image/gif"
	"image/jpeg"
	"image/png"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/download"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
)

var ctx = context.Background()

func compose(t testing.TB, steps ...transforms.Transform) *transforms.Pipeline {
	p, err := transforms.Compose(steps...)
	require.NoError(t, err)
	return p
}

var (
	mnistNorm = transforms.Normalize{Mean: []float64{0.1307}, Std: []float64{0.3081}}
	cifarNorm = transforms.Normalize{Mean: []float64{0.4914, 0.4822, 0.4465}, Std: []float64{0.2470, 0.2435, 0.2616}}
)

// batches gives all bytes of a loader's inputs and targets, one after the other.
func batches(t testing.TB, src data.Source, workers int) []byte {
	l, err := data.NewDataLoader(src, data.Options{BatchSize: 4, Workers: workers})
	require.NoError(t, err)
	defer l.Close()
	var out []byte
	for b, err := range l.All(ctx) {
		require.NoError(t, err)
		for _, x := range b.Tensors() {
			info, err := tdp.Describe(x)
			require.NoError(t, err)
			bytes := make([]byte, info.Numel*int64(info.ElementSize))
			require.NoError(t, tdp.ToBytes(x, bytes))
			out = append(out, bytes...)
		}
	}
	return out
}

// torchvision reads the same files; its normalised batches must be ours, to the last bit.
const reader = `
import sys
import torch, torchvision
from torchvision import transforms as T
import torchvision.datasets.cifar as cifar
cifar.check_integrity = lambda *a: True # the sets are tiny
root = sys.argv[1]
out = open(sys.argv[2], "wb")
def dump(d):
    for x, y in torch.utils.data.DataLoader(d, batch_size=4):
        out.write(x.contiguous().numpy().tobytes()); out.write(y.numpy().tobytes())
m = T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))])
c = T.Compose([T.ToTensor(), T.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))])
D = torchvision.datasets
for train in (True, False):
    dump(D.MNIST(root, train=train, transform=m))
    dump(D.FashionMNIST(root, train=train, transform=m))
    dump(D.CIFAR10(root, train=train, transform=c))
    dump(D.CIFAR100(root, train=train, transform=c))
dump(D.ImageFolder(root + "/folder", T.Compose([T.Resize((20, 24)), T.ToTensor()])))
`

func TestBatchesAreTorchvisions(t *testing.T) {
	root := t.TempDir()
	writeMNIST(t, root, "MNIST", false)
	writeMNIST(t, root, "FashionMNIST", false) // torchvision unpacks, and wants the unpacked ones
	for _, c := range []cifarSet{cifar10, cifar100} {
		for _, m := range cifarMembers(c, c.places[0]) {
			put(t, m.content, root, m.name)
		}
	}
	put(t, []byte("\x80\x02}q\x01U\x0blabel_names]q\x02(U\x03catU\x03doges."), root, "cifar-10-batches-py", "batches.meta")
	writeFolder(t, filepath.Join(root, "folder"))
	out := filepath.Join(t.TempDir(), "out")
	testenv.RunPython(t, reader, root, out)
	want, err := os.ReadFile(out)
	require.NoError(t, err)

	var got []byte
	m, c := compose(t, transforms.ToTensor{}, mnistNorm), compose(t, transforms.ToTensor{}, cifarNorm)
	for _, test := range []bool{false, true} {
		for _, load := range []func() (*Images, error){
			func() (*Images, error) { return MNIST(ctx, Options{Root: root, Test: test, Transform: m}) },
			func() (*Images, error) { return FashionMNIST(ctx, Options{Root: root, Test: test, Transform: m}) },
			func() (*Images, error) { return CIFAR10(ctx, Options{Root: root, Test: test, Transform: c}) },
			func() (*Images, error) { return CIFAR100(ctx, Options{Root: root, Test: test, Transform: c}) },
		} {
			d, err := load()
			require.NoError(t, err)
			got = append(got, batches(t, d, 0)...)
			require.Equal(t, batches(t, d, 0), batches(t, d, 3))
		}
	}
	f, err := ImageFolder(filepath.Join(root, "folder"), compose(t, transforms.Resize{Height: 20, Width: 24}, transforms.ToTensor{}))
	require.NoError(t, err)
	require.Equal(t, []string{"cat", "dog"}, f.Classes())
	got = append(got, batches(t, f, 2)...)
	require.Equal(t, len(want), len(got))
	require.True(t, bytes.Equal(want, got))
}

// writeFolder makes a folder of images without loss, in an order that only torchvision's rule gives.
func writeFolder(t testing.TB, root string) {
	for i, name := range []string{"dog/b.png", "dog/a.PNG", "dog/sub/z.png", "dog/sub-2/a.png", "cat/10.png", "cat/9.png", "cat/grey.png", "cat/x.gif"} {
		h, w := 15+3*i, 40-2*i
		pix := noise(h*w*4, uint64(i))
		var img image.Image
		if strings.Contains(name, "grey") {
			img = &image.Gray{Pix: pix, Stride: w, Rect: image.Rect(0, 0, w, h)}
		} else {
			n := &image.NRGBA{Pix: pix, Stride: 4 * w, Rect: image.Rect(0, 0, w, h)}
			for k := 3; k < len(pix); k += 4 {
				pix[k] = 255
			}
			img = n
		}
		var b bytes.Buffer
		if strings.HasSuffix(name, ".gif") {
			name = "cat/skipped.txt" // a palette is chosen by the encoder, and torchvision does not list gif
			b.WriteString("not an image")
		} else {
			require.NoError(t, png.Encode(&b, img))
		}
		put(t, b.Bytes(), root, name)
	}
}

// Every form in which a set is published gives the same images.
func TestEveryForm(t *testing.T) {
	for _, set := range []string{"MNIST", "FashionMNIST"} {
		load := MNIST
		if set == "FashionMNIST" {
			load = FashionMNIST
		}
		for _, packed := range []bool{false, true} {
			root := t.TempDir()
			writeMNIST(t, root, set, packed)
			d, err := load(ctx, Options{Root: root, Test: true})
			require.NoError(t, err)
			require.Equal(t, 11, d.Len())
			require.Equal(t, set+" (test)", d.Name())
			require.Len(t, d.Classes(), 10)
			require.Equal(t, noise(11*784, 11), d.pix)
			require.Equal(t, labelsOf(11, 10, 11), d.labels)
		}
	}
	for _, c := range []cifarSet{cifar10, cifar100} {
		load := CIFAR10
		if c.labels == 100 {
			load = CIFAR100
		}
		for _, p := range c.places {
			members := cifarMembers(c, p)
			var pix, labels []byte
			for i := range p.train {
				pix, labels = append(pix, noise((4+i)*cifarPixels, uint64(4+i))...), append(labels, labelsOf(4+i, c.labels, uint64(4+i))...)
			}
			unpacked, archived, direct := t.TempDir(), t.TempDir(), t.TempDir()
			reversed := []member{{p.dir + "/readme.html", []byte("hello")}}
			for i := range members {
				m := members[len(members)-1-i]
				put(t, m.content, unpacked, m.name)
				put(t, m.content, direct, filepath.Base(m.name))
				reversed = append(reversed, m)
			}
			put(t, tarball(reversed...), archived, p.archive.name)
			for _, root := range []string{unpacked, archived, direct} {
				d, err := load(ctx, Options{Root: root})
				require.NoError(t, err)
				require.Equal(t, pix, d.pix)
				require.Equal(t, labels, d.labels)
				if c.labels == 100 {
					require.Equal(t, []string{"apple", "baby"}, d.Classes())
				}
			}
		}
	}
}

// What numpy and Python 3 write today is read as well, in every protocol.
func TestPicklesOfToday(t *testing.T) {
	dir := t.TempDir()
	testenv.RunPython(t, `
import sys, pickle, numpy as np
a = (np.arange(3 * 3072) % 251).astype(np.uint8).reshape(3, 3072)
for p in (2, 3, 4, 5):
    for name, d in (("text", {"data": a, "labels": [3, 1, 9]}), ("bytes", {b"data": a, b"labels": [3, 1, 9], b"filenames": [b"x"]})):
        pickle.dump(d, open(f"{sys.argv[1]}/{name}{p}", "wb"), protocol=p)
pickle.dump({"data": np.asfortranarray(a), "labels": [1, 2, 3]}, open(sys.argv[1] + "/column", "wb"), protocol=2)
pickle.dump({"data": a.astype(np.int64), "labels": [1, 2, 3]}, open(sys.argv[1] + "/wide", "wb"), protocol=4)
class Evil:
    def __reduce__(self): return (exec, ("raise SystemExit",))
pickle.dump({"data": Evil(), "labels": [1]}, open(sys.argv[1] + "/evil", "wb"), protocol=2)
`, dir)
	want := make([]byte, 3*cifarPixels)
	for i := range want {
		want[i] = byte(i % 251)
	}
	for _, p := range []string{"2", "3", "4", "5"} {
		for _, name := range []string{"text", "bytes"} {
			b, err := os.ReadFile(filepath.Join(dir, name+p))
			require.NoError(t, err)
			pix, labels, err := cifar10.readPickle(name+p, b)
			require.NoError(t, err)
			require.Equal(t, []byte{3, 1, 9}, labels)
			require.Equal(t, want, pix)
		}
	}
	for name, say := range map[string]string{"column": "column order", "wide": "dtype", "evil": "exec"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		_, _, err = cifar10.readPickle(name, b)
		require.ErrorIs(t, err, ErrDamaged)
		require.ErrorContains(t, err, say)
	}
}

// Whatever is wrong with a file is a FormatError with file and offset.
func TestBadFiles(t *testing.T) {
	pix, labels := noise(3*784, 1), []byte{1, 2, 3}
	images, good := idx([]int{3, 28, 28}, pix), idx([]int{3}, labels)
	for name, c := range map[string]struct {
		images, labels []byte
		kind           error
		file           string
		offset         int64
	}{
		"empty":              {nil, good, ErrTruncated, "images", 0},
		"half a header":      {images[:9], good, ErrTruncated, "images", 9},
		"wrong magic":        {good, good, ErrTruncated, "images", 11},
		"labels for images":  {idx([]int{3, 28}, pix), good, ErrMagic, "images", 0},
		"floats":             {append([]byte{0, 0, 13, 3}, images[4:]...), good, ErrMagic, "images", 0},
		"truncated":          {images[:len(images)-1], good, ErrTruncated, "images", 16 + 3*784 - 1},
		"oversized":          {append(bytes.Clone(images), 0), good, ErrOversized, "images", 16 + 3*784},
		"boasting":           {idx([]int{1 << 31, 28, 28}, pix), good, ErrOversized, "images", 4},
		"overflow":           {idx([]int{1 << 31, 1 << 31, 1 << 31}, pix), good, ErrOversized, "images", 4},
		"other size":         {idx([]int{3, 27, 28}, pix[:3*27*28]), good, ErrMagic, "images", 8},
		"count":              {images, idx([]int{2}, labels[:2]), ErrCount, "labels", 0},
		"label":              {images, idx([]int{3}, []byte{1, 10, 2}), ErrLabel, "labels", 9},
		"truncated labels":   {images, good[:9], ErrTruncated, "labels", 9},
		"truncated gzip":     {zipped(images)[:500], good, ErrTruncated, "images", -1},
		"damaged gzip":       {damage(zipped(images), 700), good, ErrDamaged, "images", -1},
		"damaged checksum":   {damage(zipped(images), len(zipped(images))-6), good, ErrDamaged, "images", -1},
		"not a gzip":         {[]byte{0x1f, 0x8b, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9}, good, ErrDamaged, "images", 0},
		"more behind gzip":   {append(zipped(images), zipped([]byte("more"))...), good, ErrOversized, "images", 16 + 3*784},
		"a bomb of zeros":    {zipped(append(bytes.Clone(images), make([]byte, 20<<20)...)), good, ErrOversized, "images", 16 + 3*784},
		"gzip that boasts":   {zipped(idx([]int{300000, 28, 28}, nil)), good, ErrTruncated, "images", 16},
		"no images at all":   {idx([]int{3, 0, 28}, nil), good, ErrDamaged, "images", 8},
		"labels of 2 dims":   {images, idx([]int{3, 1}, labels), ErrMagic, "labels", 0},
		"oversized labels":   {images, append(bytes.Clone(good), 1), ErrOversized, "labels", 11},
		"labels that boasts": {images, idx([]int{1 << 30}, labels), ErrOversized, "labels", 4},
	} {
		root := t.TempDir()
		put(t, c.images, root, "train-images-idx3-ubyte")
		put(t, c.labels, root, "train-labels-idx1-ubyte")
		_, err := MNIST(ctx, Options{Root: root})
		var f *FormatError
		require.ErrorAs(t, err, &f, name)
		if name != "wrong magic" {
			require.ErrorIs(t, err, c.kind, name)
		}
		require.Contains(t, f.File, c.file, name)
		if c.offset >= 0 && name != "wrong magic" {
			require.Equal(t, c.offset, f.Offset, "%s: %v", name, err)
		}
	}

	record := binaryRecords(false, []byte{1, 2}, noise(2*cifarPixels, 3))
	for name, c := range map[string]struct {
		content []byte
		kind    error
		offset  int64
	}{
		"empty":     {nil, ErrTruncated, 0},
		"truncated": {record[:len(record)-1], ErrTruncated, 3073},
		"oversized": {append(bytes.Clone(record), 0), ErrTruncated, 6146},
		"label":     {damage(record, 3073), ErrLabel, 3073},
	} {
		_, _, err := readBinary(name, bytes.Clone(c.content), 1, 10)
		var f *FormatError
		require.ErrorAs(t, err, &f, name)
		require.ErrorIs(t, err, c.kind, name)
		require.Equal(t, c.offset, f.Offset, name)
	}

	batch := pickled("labels", []byte{1, 2}, noise(2*cifarPixels, 3))
	for name, c := range map[string]struct {
		content []byte
		kind    error
	}{
		"empty":           {nil, ErrMagic},
		"text":            {[]byte("hello"), ErrMagic},
		"protocol 0":      {[]byte{0x80, 0}, ErrMagic},
		"truncated":       {batch[:len(batch)-900], ErrTruncated},
		"count":           {pickled("labels", []byte{1}, noise(2*cifarPixels, 3)), ErrCount},
		"label":           {pickled("labels", []byte{1, 11}, noise(2*cifarPixels, 3)), ErrLabel},
		"other key":       {pickled("other", []byte{1, 2}, noise(2*cifarPixels, 3)), ErrDamaged},
		"no dictionary":   {[]byte("\x80\x02K\x01."), ErrDamaged},
		"nothing":         {[]byte("\x80\x02."), ErrDamaged},
		"runaway length":  {[]byte("\x80\x04}\x8e\xff\xff\xff\xff\xff\xff\xff\xff."), ErrTruncated},
		"unknown opcode":  {[]byte("\x80\x02\x01."), ErrDamaged},
		"unknown global":  {[]byte("\x80\x02cos\nsystem\n."), ErrDamaged},
		"popped mark":     {[]byte("\x80\x02(("), ErrTruncated},
		"tuple no mark":   {[]byte("\x80\x02t"), ErrDamaged},
		"unknown memo":    {[]byte("\x80\x02h\x07"), ErrDamaged},
		"key is a number": {[]byte("\x80\x02}K\x01K\x02s."), ErrDamaged},
	} {
		_, _, err := cifar10.readPickle(name, c.content)
		var f *FormatError
		require.ErrorAs(t, err, &f, name)
		require.ErrorIs(t, err, c.kind, "%s: %v", name, err)
	}

	p := cifar10.places[0]
	members := cifarMembers(cifar10, p)
	for name, c := range map[string]struct {
		content []byte
		kind    error
	}{
		"empty":        {nil, ErrTruncated},
		"no tar":       {zipped(noise(5000, 2)), ErrMagic},
		"truncated":    {tarball(members...)[:9000], ErrTruncated},
		"member lacks": {tarball(members[1:]...), ErrTruncated},
		"empty member": {tarball(append([]member{{p.dir + "/data_batch_1", nil}}, members...)...), ErrMagic},
		"bomb":         {tarball(append([]member{{"zeros", make([]byte, 9<<20)}}, members...)...), ErrOversized},
		"big member":   {tarball(append([]member{{"data_batch_1", make([]byte, 9<<20)}}, members...)...), ErrOversized},
	} {
		func() {
			defer func(n int64) { maxSet = n }(maxSet)
			maxSet = 8 << 20
			root := t.TempDir()
			put(t, c.content, root, p.archive.name)
			_, err := CIFAR10(ctx, Options{Root: root})
			var f *FormatError
			require.ErrorAs(t, err, &f, "%s: %v", name, err)
			require.ErrorIs(t, err, c.kind, "%s: %v", name, err)
			require.Contains(t, f.File, p.archive.name)
		}()
	}
}

func damage(b []byte, at int) []byte {
	b = bytes.Clone(b)
	b[at] ^= 0x5a
	return b
}

func TestMissing(t *testing.T) {
	root := t.TempDir()
	for _, load := range []func(context.Context, Options) (*Images, error){MNIST, FashionMNIST, CIFAR10, CIFAR100} {
		_, err := load(ctx, Options{Root: root})
		var m *MissingError
		require.ErrorAs(t, err, &m)
		require.ErrorContains(t, err, root)
		require.ErrorContains(t, err, "--synthetic")
		require.NotEmpty(t, m.Files)
	}
	_, err := CIFAR10(ctx, Options{Root: root, Test: true})
	require.ErrorContains(t, err, filepath.Join(root, "cifar-10-python.tar.gz"))
	require.ErrorContains(t, err, "test_batch.bin")
}

// A mirror on this machine serves the files under their published names.
func TestDownload(t *testing.T) {
	origin := t.TempDir()
	writeMNIST(t, origin, "MNIST", true)
	var members []member
	members = append(members, cifarMembers(cifar10, cifar10.places[0])...)
	put(t, tarball(members...), origin, "MNIST", "raw", "cifar-10-python.tar.gz")
	server := httptest.NewServer(http.FileServer(http.Dir(filepath.Join(origin, "MNIST", "raw"))))
	defer server.Close()
	root := t.TempDir()
	var asked []download.Request
	o := Options{Root: root, Download: true, Mirror: server.URL + "/", fetch: func(ctx context.Context, r download.Request) error {
		asked = append(asked, r)
		r.MD5, r.Size = "", 0 // the files are tiny, not the published ones
		return download.File(ctx, r)
	}}
	var told []string
	o.Progress = func(file string, done, _ int64) { told = append(told, file) }
	d, err := MNIST(ctx, o)
	require.NoError(t, err)
	require.Equal(t, 23, d.Len())
	require.Len(t, asked, 2)
	require.Equal(t, server.URL+"/train-images-idx3-ubyte.gz", asked[0].URL)
	require.Equal(t, "f68b3c2dcbeaaa9fbdd348bbdeb94873", asked[0].MD5)
	require.Equal(t, filepath.Join(root, "MNIST", "raw", "train-images-idx3-ubyte.gz"), asked[0].Path)
	require.Contains(t, told, "train-labels-idx1-ubyte.gz")
	c, err := CIFAR10(ctx, o)
	require.NoError(t, err)
	require.Equal(t, 4+5+6+7+8, c.Len())
	o.fetch = nil // with the published checksum these files are refused
	o.Root = t.TempDir()
	_, err = MNIST(ctx, o)
	require.ErrorIs(t, err, download.ErrSize)
}

// Made-up images: the shapes of the real set, the same everywhere, and classes that can be learnt.
func TestSynthetic(t *testing.T) {
	for _, load := range []func(context.Context, Options) (*Images, error){MNIST, FashionMNIST, CIFAR10} {
		train, err := load(ctx, Options{Synthetic: true, Size: 600})
		require.NoError(t, err)
		test, err := load(ctx, Options{Synthetic: true, Test: true, Size: 300})
		require.NoError(t, err)
		full, err := load(ctx, Options{Synthetic: true, Test: true})
		require.NoError(t, err)
		require.Equal(t, 10000, full.Len())
		size := train.shape.Height * train.shape.Width * train.shape.Channels
		means, counts := make([][]float64, 10), make([]float64, 10)
		for i := range train.Len() {
			s, err := train.Item(ctx, i)
			require.NoError(t, err)
			again, err := train.Item(ctx, i)
			require.NoError(t, err)
			require.Equal(t, s, again)
			if means[s.Label] == nil {
				means[s.Label] = make([]float64, size)
			}
			counts[s.Label]++
			for k, v := range s.Image.Pix {
				means[s.Label][k] += float64(v)
			}
		}
		right := 0
		for i := range test.Len() {
			s, err := test.Item(ctx, i)
			require.NoError(t, err)
			best, at := math.Inf(1), -1
			for c := range means {
				require.NotZero(t, counts[c])
				dist := 0.0
				for k, v := range s.Image.Pix {
					d := float64(v) - means[c][k]/counts[c]
					dist += d * d
				}
				if dist < best {
					best, at = dist, c
				}
			}
			if at == s.Label {
				right++
			}
		}
		require.Greater(t, right, test.Len()*9/10, "%s: %d of %d", train.Name(), right, test.Len())
		a, err := train.Item(ctx, 0)
		require.NoError(t, err)
		b, err := test.Item(ctx, 0)
		require.NoError(t, err)
		require.NotEqual(t, a.Image.Pix, b.Image.Pix)
		_, err = train.Item(ctx, 600)
		require.Error(t, err)
	}
}

func TestImageFolder(t *testing.T) {
	root := t.TempDir()
	_, err := ImageFolder(root, compose(t, transforms.CenterCrop{Height: 4}, transforms.ToTensor{}))
	require.ErrorContains(t, err, "couldn't find any class folder")
	_, err = ImageFolder(filepath.Join(root, "none"), compose(t, transforms.CenterCrop{Height: 4}))
	require.ErrorIs(t, err, os.ErrNotExist)
	img := image.NewRGBA(image.Rect(0, 0, 9, 7))
	for i := range img.Pix {
		img.Pix[i] = 200
		if i%4 == 3 {
			img.Pix[i] = 255
		}
	}
	for name, enc := range map[string]func(io.Writer) error{
		"a/x.png":  func(w io.Writer) error { return png.Encode(w, img) },
		"a/y.jpg":  func(w io.Writer) error { return jpeg.Encode(w, img, &jpeg.Options{Quality: 100}) },
		"b/z.gif":  func(w io.Writer) error { return gif.Encode(w, img, nil) },
		"b/no.txt": func(w io.Writer) error { return nil },
	} {
		var b bytes.Buffer
		require.NoError(t, enc(&b))
		put(t, b.Bytes(), root, name)
	}
	_, err = ImageFolder(root, compose(t, transforms.Resize{Size: 4}, transforms.ToTensor{}))
	require.ErrorContains(t, err, "CenterCrop")
	f, err := ImageFolder(root, compose(t, transforms.CenterCrop{Height: 4}))
	require.NoError(t, err)
	require.Equal(t, 3, f.Len())
	for i := range f.Len() {
		s, err := f.Item(ctx, i)
		require.NoError(t, err)
		require.Equal(t, []int{7, 9, 3}, []int{s.Image.Height, s.Image.Width, s.Image.Channels})
		require.InDelta(t, 200, float64(s.Image.At(3, 4, 1)), 6, f.File(i))
	}
	put(t, []byte("\x89PNG\r\n\x1a\nbroken"), root, "b/zz.png")
	huge := image.NewGray(image.Rect(0, 0, 1, 1))
	var b bytes.Buffer
	require.NoError(t, png.Encode(&b, huge))
	claim := b.Bytes()
	claim[18], claim[22] = 0x7f, 0x7f // a thousand million pixels
	put(t, fixCRC(claim), root, "b/zzz.png")
	f, err = ImageFolder(root, compose(t, transforms.CenterCrop{Height: 4}))
	require.NoError(t, err)
	_, err = f.Item(ctx, 3)
	require.ErrorIs(t, err, ErrDamaged)
	_, err = f.Item(ctx, 4)
	require.ErrorIs(t, err, ErrOversized)
	l, err := data.NewDataLoader(f, data.Options{BatchSize: 2, Workers: 2})
	require.NoError(t, err)
	for _, err := range l.All(ctx) {
		if err != nil {
			var item *data.ItemError
			require.ErrorAs(t, err, &item)
			require.Equal(t, 3, item.Index)
			require.ErrorContains(t, err, "zz.png")
		}
	}
	put(t, nil, root, "c/nothing.txt")
	_, err = ImageFolder(root, compose(t, transforms.CenterCrop{Height: 4}))
	require.ErrorContains(t, err, "class c")
	_ = color.White
	require.False(t, errors.Is(err, ErrDamaged))
}

func TestTransformMustFit(t *testing.T) {
	_, err := MNIST(ctx, Options{Synthetic: true, Transform: compose(t, transforms.ToTensor{}, cifarNorm)})
	require.ErrorContains(t, err, "3 means")
	d, err := MNIST(ctx, Options{Synthetic: true, Size: 5})
	require.NoError(t, err)
	raw, err := d.With(compose(t, transforms.CenterCrop{Height: 20}))
	require.NoError(t, err)
	require.Len(t, batches(t, raw, 0), 5*(400+8))
	_, err = d.With(compose(t, transforms.ToTensor{}, cifarNorm))
	require.Error(t, err)
}
