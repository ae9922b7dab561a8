package vision

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"image"
	"image/gif"
	"image/jpeg"
	"image/png"
	"io"
	"testing"

	"golang.org/x/image/bmp"
	"golang.org/x/image/tiff"
)

// fixCRC mends the checksum of a png's first chunk.
func fixCRC(b []byte) []byte {
	binary.BigEndian.PutUint32(b[29:], crc32.ChecksumIEEE(b[12:29]))
	return b
}

// typed fails for errors that are no FormatError.
func typed(t *testing.T, err error) {
	var f *FormatError
	if err != nil && !errors.As(err, &f) {
		t.Fatalf("an error without a type: %v", err)
	}
}

func FuzzIDX(f *testing.F) {
	images, labels := idx([]int{2, 28, 28}, noise(2*784, 1)), idx([]int{2}, []byte{3, 9})
	f.Add(images, labels)
	f.Add(zipped(images), zipped(labels))
	f.Add(images[:100], labels[:5])
	f.Add(idx([]int{1 << 30, 1 << 30, 1 << 30}, nil), idx([]int{1 << 31}, nil))
	f.Fuzz(func(t *testing.T, images, labels []byte) {
		for dims, b := range map[int][]byte{3: images, 1: labels} {
			s, err := unpack("x", bytes.NewReader(b))
			if err != nil {
				typed(t, err)
				continue
			}
			shape, pix, err := readIDX(s, dims)
			typed(t, err)
			if err == nil {
				n := 1
				for _, d := range shape {
					n *= d
				}
				if n != len(pix) {
					t.Fatalf("%v with %d bytes", shape, len(pix))
				}
			}
		}
	})
}

func FuzzCIFARBinary(f *testing.F) {
	f.Add(binaryRecords(false, []byte{1, 2}, noise(2*cifarPixels, 3)), false)
	f.Add(binaryRecords(true, []byte{1, 99}, noise(2*cifarPixels, 3)), true)
	f.Add([]byte{1, 2, 3}, false)
	f.Fuzz(func(t *testing.T, b []byte, fine bool) {
		lead, classes := 1, 10
		if fine {
			lead, classes = 2, 100
		}
		pix, labels, err := readBinary("x", bytes.Clone(b), lead, classes)
		typed(t, err)
		if err == nil && len(pix) != len(labels)*cifarPixels {
			t.Fatal("counts")
		}
	})
}

func FuzzCIFARPickle(f *testing.F) {
	f.Add(pickled("labels", []byte{1, 2}, noise(2*cifarPixels, 3)))
	f.Add(pickled("fine_labels", []byte{1}, noise(cifarPixels, 3)))
	f.Add([]byte("\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x04data\x94N\x8c\x06labels\x94]\x94(K\x01K\x02eu."))
	f.Add([]byte("\x80\x02}q\x01U\x10fine_label_names]q\x02(U\x05appleU\x04babyes."))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, c := range []cifarSet{cifar10, cifar100} {
			pix, labels, err := c.readPickle("x", b)
			typed(t, err)
			if err == nil && len(pix) != len(labels)*cifarPixels {
				t.Fatal("counts")
			}
			_, err = c.meta("x", b, false)
			typed(t, err)
		}
	})
}

func FuzzTarGz(f *testing.F) {
	p := cifar10.places[1]
	members := cifarMembers(cifar10, p)
	f.Add(tarball(members...))
	f.Add(tarball(members...)[:5000])
	f.Add(zipped(noise(600, 1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		defer func(n int64) { maxSet = n }(maxSet)
		maxSet = 1 << 20
		d := &Images{}
		err := cifar10.fill(d, p, Options{}, func(want []string, take func(string, *source, int64) error) error {
			return readTar("x", bytes.NewReader(b), want, p.train, take)
		})
		typed(t, err)
		if err == nil && len(d.pix) != len(d.labels)*cifarPixels {
			t.Fatal("counts")
		}
	})
}

func FuzzImageFile(f *testing.F) {
	img := image.NewNRGBA(image.Rect(0, 0, 9, 7))
	copy(img.Pix, noise(len(img.Pix), 4))
	for _, enc := range []func(io.Writer) error{
		func(w io.Writer) error { return png.Encode(w, img) },
		func(w io.Writer) error { return jpeg.Encode(w, img, nil) },
		func(w io.Writer) error { return gif.Encode(w, img, nil) },
		func(w io.Writer) error { return bmp.Encode(w, img) },
		func(w io.Writer) error { return tiff.Encode(w, img, nil) },
	} {
		var b bytes.Buffer
		if err := enc(&b); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		defer func(n int64) { maxPixels = n }(maxPixels)
		maxPixels = 1 << 16
		m, err := decode("x", bytes.NewReader(b))
		typed(t, err)
		if err == nil && (m.Check() != nil || m.Channels != 3) {
			t.Fatalf("%v", m.Check())
		}
	})
}
