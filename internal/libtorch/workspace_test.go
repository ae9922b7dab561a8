package libtorch

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func fakeInstallation(t *testing.T) *Installation {
	dir := t.TempDir()
	in := &Installation{Cache: filepath.Join(dir, "the cache"), Gotch: filepath.Join(dir, "the cache", "gotch"), Link: filepath.Join(dir, "the cache", "link")}
	for path, module := range map[string]string{in.Gotch: gotchModule, in.Link: linkModule} {
		require.NoError(t, os.MkdirAll(path, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(path, "go.mod"), []byte("module "+module+"\n\ngo 1.20\n"), 0o644))
	}
	return in
}

func newModule(t *testing.T) string {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/m\n\ngo 1.24.1\n"), 0o644))
	t.Setenv("GOWORK", "")
	t.Setenv("GOFLAGS", "")
	return dir
}

// moduleDirOf asks the go command where it finds a module.
func moduleDirOf(t *testing.T, dir, module string) string {
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return string(out[:len(out)-1])
}

func TestNewWorkspace(t *testing.T) {
	in, dir := fakeInstallation(t), newModule(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/m\n\ngo 1.24.1\n\nrequire (\n"+gotchModule+" v0.9.1\n"+linkModule+" v0.0.0\n)\n"), 0o644))
	w, err := in.WriteWorkspace(t.Context(), dir)
	require.NoError(t, err)
	require.Equal(t, &Workspace{File: filepath.Join(dir, "go.work"), Changed: true, Ours: true}, w)
	require.Equal(t, in.Gotch, moduleDirOf(t, dir, gotchModule))
	require.Equal(t, in.Link, moduleDirOf(t, dir, linkModule))

	again, err := in.WriteWorkspace(t.Context(), dir)
	require.NoError(t, err)
	require.False(t, again.Changed)

	// A clone runs set-up with GOWORK=off, because its workspace may name what is gone.
	t.Setenv("GOWORK", "off")
	in.Link += "2"
	require.NoError(t, os.CopyFS(in.Link, os.DirFS(in.Link[:len(in.Link)-1])))
	again, err = in.WriteWorkspace(t.Context(), dir)
	require.NoError(t, err)
	require.Equal(t, w.File, again.File)
	require.True(t, again.Changed)
	t.Setenv("GOWORK", "")
	require.Equal(t, in.Link, moduleDirOf(t, dir, linkModule))
}

// A workspace of the user's keeps all that it holds, and may lie above the module.
func TestUsersWorkspace(t *testing.T) {
	in, dir := fakeInstallation(t), newModule(t)
	sub := filepath.Join(dir, "sub")
	require.NoError(t, os.Mkdir(sub, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(sub, "go.mod"), []byte("module example.com/m/sub\n\ngo 1.24.1\n\nrequire "+gotchModule+" v0.9.1\n"), 0o644))
	const theirs = "go 1.24.1\n\n// their remark\nuse (\n\t.\n\t./sub\n)\n\nreplace example.com/x => ./x // theirs\n"
	file := filepath.Join(dir, "go.work")
	require.NoError(t, os.WriteFile(file, []byte(theirs), 0o644))
	w, err := in.WriteWorkspace(t.Context(), sub)
	require.NoError(t, err)
	require.Equal(t, &Workspace{File: file, Changed: true}, w)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(text), "// their remark\nuse (\n\t.\n\t./sub\n)\n")
	require.Contains(t, string(text), "replace example.com/x => ./x // theirs\n")
	require.Equal(t, in.Gotch, moduleDirOf(t, sub, gotchModule))

	require.NoError(t, os.WriteFile(file, []byte("go 1.24.1\n\nuse .\n"), 0o644))
	w, err = in.WriteWorkspace(t.Context(), sub)
	require.NoError(t, err)
	require.Contains(t, w.Warning, "does not use this module: `go work use "+sub+"`")
}

func TestWorkspaceWarnings(t *testing.T) {
	in, dir := fakeInstallation(t), newModule(t)
	t.Setenv("GOFLAGS", "-mod=mod")
	w, err := in.WriteWorkspace(t.Context(), dir)
	require.NoError(t, err)
	require.Contains(t, w.Warning, "GOFLAGS holds -mod=mod")
	t.Setenv("GOFLAGS", "")
	t.Setenv("CGO_ENABLED", "0")
	w, err = in.WriteWorkspace(t.Context(), dir)
	require.NoError(t, err)
	require.Contains(t, w.Warning, "CGO_ENABLED is 0")
}

func TestEnvironment(t *testing.T) {
	in, dir := fakeInstallation(t), newModule(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/m\n\ngo 1.24.1\n\nrequire "+gotchModule+" v0.9.1\n"), 0o644))
	vars, err := in.Environment(t.Context(), dir)
	require.NoError(t, err)
	require.Equal(t, "GOWORK", vars[0].Name)
	require.NoFileExists(t, filepath.Join(dir, "go.work"))
	t.Setenv("GOWORK", vars[0].Value)
	require.Equal(t, in.Gotch, moduleDirOf(t, dir, gotchModule))
	require.Equal(t, `export A='it'\''s'`, EnvVar{"A", "it's"}.Shell())
}

func TestFindModule(t *testing.T) {
	dir := newModule(t)
	deep := filepath.Join(dir, "a", "b")
	require.NoError(t, os.MkdirAll(deep, 0o755))
	got, err := FindModule(deep)
	require.NoError(t, err)
	require.Equal(t, dir, got)
	_, err = FindModule("/")
	require.ErrorIs(t, err, ErrNoModule)
}
