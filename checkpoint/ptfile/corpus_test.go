package ptfile

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint/internal/cptest"
)

func TestMain(m *testing.M) { cptest.Main(m) }

// Files that Python writes, read and written again, are the same bytes: value, identity of every object in it,
// records, padding, directory.
func TestRewriteIsByteIdentical(t *testing.T) {
	rewrite := func(t *testing.T, files []string) {
		for _, path := range files {
			name := filepath.Base(path)
			f, err := Open(path, ReadOptions{})
			require.NoError(t, err, name)
			require.NoError(t, f.Verify(), name)
			var out bytes.Buffer
			require.NoError(t, Write(&out, Stem(path), f.Value, WriteOptions{}), name)
			if f.Legacy || f.BigEndian || f.NoCRC || strings.HasPrefix(name, "cuda.") {
				// Not what torch.save writes today; the result must still read back as the same value.
				back, err := ReadBytes(out.Bytes(), ReadOptions{})
				require.NoError(t, err, name)
				require.NoError(t, back.Verify(), name)
			} else {
				want, err := os.ReadFile(path)
				require.NoError(t, err)
				cptest.SameButID(t, name, want, out.Bytes())
			}
			require.NoError(t, f.Close())
		}
	}
	t.Run("committed", func(t *testing.T) { rewrite(t, cptest.Committed(t)) })
	t.Run("live", func(t *testing.T) { rewrite(t, cptest.Corpus(t)) })
}

func TestStem(t *testing.T) {
	for path, want := range map[string]string{
		"/x/model.pt": "model", "a.b.pt": "a.b", "noext": "noext", ".hidden": "archive", "dir.d/x.pt": "x", "/x/é.pt": "archive",
	} {
		require.Equal(t, want, Stem(path), path)
	}
}
