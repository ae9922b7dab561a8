package vision

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Files in the published formats, small.

func noise(n int, seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 7))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func labelsOf(n, classes int, seed uint64) []byte {
	b := noise(n, seed+1000)
	for i := range b {
		b[i] %= byte(classes)
	}
	return b
}

func idx(dims []int, content []byte) []byte {
	b := []byte{0, 0, 8, byte(len(dims))}
	for _, d := range dims {
		b = binary.BigEndian.AppendUint32(b, uint32(d))
	}
	return append(b, content...)
}

func zipped(b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	z.Write(b)
	z.Close()
	return out.Bytes()
}

type member struct {
	name    string
	content []byte
}

func tarball(members ...member) []byte {
	var out bytes.Buffer
	t := tar.NewWriter(&out)
	for _, m := range members {
		if err := t.WriteHeader(&tar.Header{Name: m.name, Mode: 0o644, Size: int64(len(m.content))}); err != nil {
			panic(err)
		}
		t.Write(m.content)
	}
	t.Close()
	return zipped(out.Bytes())
}

// pickled is a CIFAR batch as Python 2 wrote the published ones: protocol 2, texts and bytes alike.
func pickled(key string, labels, pix []byte) []byte {
	b := []byte{0x80, 2, '}', 'q', 1, '('}
	text := func(s string) {
		b = append(append(b, 'U', byte(len(s))), s...)
	}
	text("batch_label")
	b = append(b, 'q', 2)
	text("testing batch 1 of 1")
	b = append(b, 'q', 3)
	text(key)
	b = append(b, ']', 'q', 5, '(')
	for _, l := range labels {
		b = append(b, 'K', l)
	}
	b = append(b, 'e')
	text("data")
	b = append(b, "cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x0a(K\x01"...)
	rows := len(pix) / cifarPixels
	b = append(b, 'J')
	b = binary.LittleEndian.AppendUint32(b, uint32(rows))
	b = append(b, 'M', byte(cifarPixels&255), byte(cifarPixels>>8))
	b = append(b, 0x86)
	b = append(b, "cnumpy\ndtype\nq\x0bU\x02u1K\x00K\x01\x87Rq\x0d(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(pix)))
	b = append(b, pix...)
	return append(b, "tbu."...)
}

func binaryRecords(coarse bool, labels, pix []byte) []byte {
	var b []byte
	for i, l := range labels {
		if coarse {
			b = append(b, l/5)
		}
		b = append(append(b, l), pix[i*cifarPixels:(i+1)*cifarPixels]...)
	}
	return b
}

func put(t testing.TB, content []byte, parts ...string) string {
	p := filepath.Join(parts...)
	require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
	require.NoError(t, os.WriteFile(p, content, 0o644))
	return p
}

// writeMNIST puts a tiny set into root and gives nothing back: what is in it follows from the seeds.
func writeMNIST(t testing.TB, root, set string, packed bool) {
	for part, n := range map[string]int{"train": 23, "t10k": 11} {
		images := idx([]int{n, 28, 28}, noise(n*784, uint64(n)))
		labels := idx([]int{n}, labelsOf(n, 10, uint64(n)))
		ext := ""
		if packed {
			images, labels, ext = zipped(images), zipped(labels), ".gz"
		}
		put(t, images, root, set, "raw", part+"-images-idx3-ubyte"+ext)
		put(t, labels, root, set, "raw", part+"-labels-idx1-ubyte"+ext)
	}
}

// cifarMembers gives the files of a tiny set in one of its places.
func cifarMembers(c cifarSet, p cifarPlace) []member {
	var out []member
	for i, f := range append(append([]string(nil), p.train...), p.test...) {
		n := 4 + i
		pix, labels := noise(n*cifarPixels, uint64(n)), labelsOf(n, c.labels, uint64(n))
		content := pickled(c.keys[0], labels, pix)
		if p.binary {
			content = binaryRecords(c.labels == 100, labels, pix)
		}
		out = append(out, member{p.dir + "/" + f, content})
	}
	if p.meta != "" && c.classes == nil {
		meta := []byte("apple\nbaby\n")
		if !p.binary {
			meta = []byte("\x80\x02}q\x01U\x10fine_label_names]q\x02(U\x05appleU\x04babyes.")
		}
		out = append(out, member{p.dir + "/" + p.meta, meta})
	}
	return out
}
