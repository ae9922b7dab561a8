package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/csrc"
	"github.com/goddp/goddp/internal/libtorch"
	"github.com/stretchr/testify/require"
)

const userProgram = `package main

import (
	"fmt"

	"github.com/goddp/goddp/csrc"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

func main() {
	x := ts.MustOfSlice([]float64{3, 4})
	sum := x.MustMul(x, true).MustSum(gotch.Double, true)
	fmt.Println(sum.Float64Values()[0], csrc.Key())
}
`

// shell is where a user works: a folder, with the goddp program on the path.
type shell struct {
	dir, path string
}

func (s shell) run(t *testing.T, command string) (string, error) {
	cmd := exec.CommandContext(t.Context(), "sh", "-c", command)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "PATH="+s.path+":"+os.Getenv("PATH"), "GOWORK=", "GOFLAGS=")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// userModule makes a Go module outside of the repository that uses gotch and this module, and a goddp program.
func userModule(t *testing.T) shell {
	repo, err := filepath.Abs("../..")
	require.NoError(t, err)
	cfg, err := libtorch.FromEnv()
	require.NoError(t, err)
	if _, err := libtorch.Find(t.Context(), cfg); errors.Is(err, libtorch.ErrNotSetUp) {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip("libtorch is not set up, or C++ sources changed since: run `make setup`")
	} else {
		require.NoError(t, err)
	}
	s := shell{dir: t.TempDir(), path: t.TempDir()}
	build := exec.Command("go", "build", "-o", filepath.Join(s.path, "goddp"), ".")
	build.Env = append(os.Environ(), "GOWORK=off")
	out, err := build.CombinedOutput()
	require.NoError(t, err, string(out))

	mod, err := os.ReadFile(filepath.Join(repo, "go.mod"))
	require.NoError(t, err)
	text := strings.Replace(string(mod), "module github.com/goddp/goddp", "module example.com/user", 1)
	require.NotEqual(t, string(mod), text)
	text += "\nrequire github.com/goddp/goddp v0.0.0\n\nreplace github.com/goddp/goddp => " + repo + "\n"
	sums, err := os.ReadFile(filepath.Join(repo, "go.sum"))
	require.NoError(t, err)
	for name, body := range map[string]string{"go.mod": text, "go.sum": string(sums), "main.go": userProgram} {
		require.NoError(t, os.WriteFile(filepath.Join(s.dir, name), []byte(body), 0o644))
	}
	return s
}

func TestUsersModule(t *testing.T) {
	s := userModule(t)
	out, err := s.run(t, "goddp setup")
	require.NoError(t, err, out)
	require.Contains(t, out, "wrote "+filepath.Join(s.dir, "go.work"))
	out, err = s.run(t, "go run . && go vet .")
	require.NoError(t, err, out)
	require.Equal(t, "25 "+csrc.Key()+"\n", out)

	start := time.Now()
	out, err = s.run(t, "goddp setup")
	require.NoError(t, err, out)
	t.Logf("a set-up with nothing to do: %v", time.Since(start))
	require.Less(t, time.Since(start), 5*time.Second)
	require.NotContains(t, out, "wrote")
	require.NotContains(t, out, "edited")
}

func TestUsersModuleWithoutWorkspace(t *testing.T) {
	s := userModule(t)
	out, err := s.run(t, `goddp setup --no-work && eval "$(goddp env)" && go run . && test -f "$GODDP_TORCH/lib/libtorch_cpu.so"`)
	require.NoError(t, err, out)
	require.True(t, strings.HasSuffix(out, "\n25 "+csrc.Key()+"\n"), out)
	require.NoFileExists(t, filepath.Join(s.dir, "go.work"))
	out, err = s.run(t, "goddp env GOWORK")
	require.NoError(t, err, out)
	require.FileExists(t, strings.TrimSpace(out))

	out, err = s.run(t, `GODDP_CACHE=/nonexistent/cache goddp env`)
	require.Error(t, err)
	require.Contains(t, out, "not set up: run `goddp setup`")
}

// A goddp of other C++ sources hands over to the one that the module uses.
func TestOtherVersion(t *testing.T) {
	s := userModule(t)
	other := filepath.Join(t.TempDir(), "goddp-v2")
	require.NoError(t, os.MkdirAll(filepath.Join(other, "csrc", "tdp"), 0o755))
	for name, text := range map[string]string{
		"go.mod":            "module github.com/goddp/goddp\n\ngo 1.24\n",
		"csrc/tdp/x.cpp":    "",
		"cmd/goddp/main.go": "package main\n\nimport (\"fmt\"; \"os\")\n\nfunc main() { fmt.Println(\"the other one\", os.Args[1:], os.Getenv(\"GOWORK\")) }\n",
	} {
		path := filepath.Join(other, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
	}
	mod := "module example.com/user\n\ngo 1.24\n\nrequire github.com/goddp/goddp v0.0.0\n\nreplace github.com/goddp/goddp => " + other + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, "go.mod"), []byte(mod), 0o644))
	out, err := s.run(t, "goddp setup --quiet --flavor cpu")
	require.NoError(t, err, out)
	require.Contains(t, out, "the other one [setup --directory "+s.dir+" --flavor cpu --quiet] off")
}
