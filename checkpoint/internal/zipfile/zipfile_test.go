package zipfile

import (
	"archive/zip"
	"bytes"
	"encoding/hex"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// sparse writes zeros as holes, so that a file of several gigabytes costs nothing.
type sparse struct {
	f   *os.File
	off int64
}

var zeros = make([]byte, 1<<20)

func (s *sparse) Write(b []byte) (int, error) {
	if len(b) < 4096 || !bytes.Equal(b, zeros[:min(len(b), len(zeros))]) {
		if _, err := s.f.WriteAt(b, s.off); err != nil {
			return 0, err
		}
	}
	s.off += int64(len(b))
	return len(b), nil
}

func fill(n int64) func(io.Writer) error {
	return func(w io.Writer) error {
		for n > 0 {
			k := min(n, int64(len(zeros)))
			if _, err := w.Write(zeros[:k]); err != nil {
				return err
			}
			n -= k
		}
		return nil
	}
}

// Records of 4 GiB and more, and records that begin beyond 4 GiB. The layout of such a file was compared with
// torch.save's, byte for byte, when this was written.
func TestZip64(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: a sparse file of 4 GiB is summed up")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "big.pt"))
	require.NoError(t, err)
	defer f.Close()
	const big = 1<<32 + 12345
	s := &sparse{f: f}
	w := NewWriter(s, "big")
	require.NoError(t, w.Bytes("first", []byte("first")))
	require.NoError(t, w.Record("big", big, fill(big)))
	require.NoError(t, w.Bytes("after", []byte("after")))
	require.NoError(t, w.Record("empty", 0, nil))
	require.NoError(t, w.Close())
	require.NoError(t, f.Truncate(s.off))

	r, err := NewReader(f, s.off)
	require.NoError(t, err)
	for name, size := range map[string]int64{"first": 5, "big": big, "after": 5, "empty": 0} {
		rec := r.Find(name)
		require.NotNil(t, rec, name)
		require.Equal(t, size, rec.Size, name)
		require.Zero(t, rec.Offset%Alignment, name)
	}
	for _, name := range []string{"first", "after"} {
		data, err := r.Find(name).ReadAll(10)
		require.NoError(t, err)
		require.Equal(t, name, string(data))
	}

	// The standard library agrees.
	z, err := zip.NewReader(f, s.off)
	require.NoError(t, err)
	require.Len(t, z.File, 4)
	require.EqualValues(t, big, z.File[1].UncompressedSize64)

	// The local header of the large record: sizes 0xffffffff are not there, the field has the size and, as PyTorch
	// leaves it, 0 for the packed size.
	head := make([]byte, 30+7+20)
	_, err = f.ReadAt(head, r.Find("first").Offset+5+16)
	require.NoError(t, err)
	require.Equal(t, "504b0304"+"0000"+"0808"+"0000"+"00000000"+"00000000"+"00000000"+"00000000", hex.EncodeToString(head[:26]))
	require.Equal(t, "0100"+"1000"+"3930000001000000"+"0000000000000000", hex.EncodeToString(head[37:57]))
}

func TestWriterErrors(t *testing.T) {
	w := NewWriter(io.Discard, "x")
	require.NoError(t, w.Bytes("a", []byte("a")))
	require.ErrorContains(t, w.Bytes("a", []byte("a")), "twice")
	require.ErrorContains(t, w.Record("b", 2, fill(1)), "1 bytes are missing")
	require.Error(t, w.Bytes("c", nil), "the archive is broken from then on")
	require.Error(t, w.Close())
	w = NewWriter(io.Discard, "x")
	require.ErrorContains(t, w.Record("b", 1, fill(2)), "more data than announced")
	w = NewWriter(io.Discard, "x")
	require.NoError(t, w.Close())
	require.Error(t, w.Bytes("a", nil))

	var whole bytes.Buffer
	w = NewWriter(&whole, "x")
	require.NoError(t, w.Bytes("a", make([]byte, 100)))
	require.NoError(t, w.Close())
	for limit := range whole.Len() {
		w := NewWriter(&limited{limit}, "x")
		err := w.Bytes("a", make([]byte, 100))
		if cerr := w.Close(); err == nil {
			err = cerr
		}
		require.ErrorIs(t, err, io.ErrClosedPipe, "a write that fails after %d bytes", limit)
	}
}

type limited struct{ left int }

func (l *limited) Write(b []byte) (int, error) {
	if len(b) > l.left {
		return l.left, io.ErrClosedPipe
	}
	l.left -= len(b)
	return len(b), nil
}

func TestLayout(t *testing.T) {
	var out bytes.Buffer
	w := NewWriter(&out, "archive")
	payload := []byte("payload")
	require.NoError(t, w.Bytes("data.pkl", payload))
	require.NoError(t, w.Bytes("empty", nil))
	id := w.SerializationID()
	require.Len(t, id, 40)
	require.NoError(t, w.Close())
	r, err := NewReader(bytes.NewReader(out.Bytes()), int64(out.Len()))
	require.NoError(t, err)
	require.Equal(t, "archive", r.Prefix)
	rec := r.Find("data.pkl")
	require.EqualValues(t, 64, rec.Offset)
	require.Equal(t, crc32.ChecksumIEEE(payload), rec.CRC)
	require.False(t, r.NoCRC)
	require.Nil(t, r.Find("nothing"))
	_, err = rec.ReadAll(3)
	require.ErrorIs(t, err, ErrFormat)
}
