package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func put(text string) func(io.Writer) error {
	return func(w io.Writer) error { _, err := io.WriteString(w, text); return err }
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	read := func() string {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		return string(b)
	}
	require.NoError(t, Write(path, Options{}, put("one")))
	require.Equal(t, "one", read())
	require.NoError(t, os.Chmod(path, 0o640))
	require.NoError(t, Write(path, Options{NoSync: true}, put("two")))
	require.Equal(t, "two", read())
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o640), info.Mode().Perm(), "the file's permissions stay")

	boom := errors.New("boom")
	require.ErrorIs(t, Write(path, Options{}, func(w io.Writer) error {
		require.NoError(t, put("half")(w))
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, 2)
		require.True(t, IsTemp(entries[0].Name()))
		return boom
	}), boom)
	require.Equal(t, "two", read())

	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("x", link))
	require.NoError(t, Write(link, Options{}, put("three")))
	require.Equal(t, "three", read(), "a link is followed")
	require.NoError(t, Check(link))

	require.Error(t, Write(dir, Options{}, put("")))
	require.ErrorIs(t, Write(filepath.Join(dir, "no", "x"), Options{}, put("")), os.ErrNotExist)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2, "nothing is left behind")

	// Two writers at once do not disturb each other.
	require.NoError(t, Write(path, Options{}, func(w io.Writer) error {
		require.NoError(t, Write(path, Options{}, put("inner")))
		return put("outer")(w)
	}))
	require.Equal(t, "outer", read())
}
