// Package docker holds the images' files. Its tests keep them in step with the sources; check.sh builds an image.
package docker

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/libtorch"
	"github.com/stretchr/testify/require"
)

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// TestImagesGetEverySource: the folders that the programs are built from are those that the images copy.
func TestImagesGetEverySource(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-f",
		`{{if .Module}}{{if .Module.Main}}{{.ImportPath}}{{range .EmbedFiles}} {{.}}{{end}}{{end}}{{end}}`, "./cmd/...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	require.NoError(t, err)
	folders := []string{"go.mod", "go.sum"}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		rel, ok := strings.CutPrefix(fields[0], "github.com/goddp/goddp/")
		require.True(t, ok, line)
		folders = append(folders, strings.Split(rel, "/")[0])
		for _, file := range fields[1:] {
			require.NotContains(t, "/"+file, "/testdata/", "%s embeds what .dockerignore leaves out", rel)
		}
	}
	slices.Sort(folders)
	folders = slices.Compact(folders)
	require.Contains(t, folders, "csrc")

	var context, definition []string
	for line := range strings.Lines(text(t, "../.dockerignore")) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "!"); ok && name != "docker/bundle.sh" {
			context = append(context, name)
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^\t(\S+) /src/(\S+)$`).FindAllStringSubmatch(text(t, "goddp.def"), -1) {
		require.Equal(t, m[1], m[2])
		if m[1] != "docker" {
			definition = append(definition, m[1])
		}
	}
	slices.Sort(context)
	slices.Sort(definition)
	require.Subset(t, context, folders, ".dockerignore leaves out sources")
	require.Equal(t, context, definition, ".dockerignore and goddp.def differ")
	for _, name := range context {
		_, err := os.Stat(filepath.Join("..", name))
		require.NoError(t, err)
	}
}

func TestVersionsAgree(t *testing.T) {
	language := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(text(t, "../go.mod"))[1]
	image := regexp.MustCompile(`golang:(\S+-bookworm)`)
	first := image.FindStringSubmatch(text(t, "Dockerfile"))[1]
	require.Equal(t, first, image.FindStringSubmatch(text(t, "goddp.def"))[1])
	require.True(t, strings.HasPrefix(first, language+"."), "go.mod wants Go %s, the image has %s", language, first)
	require.Contains(t, text(t, "check.sh"), "torch=="+libtorch.Version+" ")
}

// TestPin runs pin.sh against a registry of its own.
func TestPin(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("curl is not installed")
	}
	generation := 1
	digest := func(name string) string { return fmt.Sprintf("sha256:%063x%x", len(name), generation) }
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/token" {
			fmt.Fprintf(w, `{"token":"T-%s","expires_in":300}`, r.URL.Query().Get("scope"))
			return
		}
		name, tag, ok := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v2/"), "/manifests/")
		if !ok || r.Header.Get("Authorization") != "Bearer T-repository:"+name+":pull" || !strings.Contains(r.Header.Get("Accept"), "image.index") {
			http.Error(w, "no", http.StatusUnauthorized)
			return
		}
		if tag == "1.26.8-bookworm" || tag == "bookworm-slim" {
			w.Header().Set("Docker-Content-Digest", digest(name))
			return
		}
		http.NotFound(w, r)
	}))
	defer registry.Close()

	dir := t.TempDir()
	before := make(map[string]string)
	for _, name := range []string{"Dockerfile", "goddp.def", "pin.sh"} {
		before[name] = text(t, name)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(before[name]), 0o755))
	}
	pin := func(args ...string) (string, error) {
		cmd := exec.Command(filepath.Join(dir, "pin.sh"), args...)
		cmd.Env = append(os.Environ(), "REGISTRY="+registry.URL, "AUTH="+registry.URL+"/token?service=test", "no_proxy=127.0.0.1")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for generation = range 2 { // new, and pinned before
		out, err := pin()
		require.NoError(t, err, out)
		golang, debian := digest("library/golang"), digest("library/debian")
		require.Contains(t, out, "golang:1.26.8-bookworm@"+golang)
		for _, name := range []string{"Dockerfile", "goddp.def"} {
			got := text(t, filepath.Join(dir, name))
			require.Contains(t, got, "golang:1.26.8-bookworm@"+golang+"\n", name)
			require.Contains(t, got, "debian:bookworm-slim@"+debian+"\n", name)
			require.Equal(t, 2, strings.Count(got, "@sha256:"), name)
		}
	}
	out, err := pin("--unpin")
	require.NoError(t, err, out)
	for _, name := range []string{"Dockerfile", "goddp.def"} {
		require.Equal(t, unpinned(before[name]), text(t, filepath.Join(dir, name)))
	}
	registry.Close()
	out, err = pin()
	require.Error(t, err, "a registry that is not there")
	require.Contains(t, out, "curl")
}

func unpinned(s string) string {
	return regexp.MustCompile(`@sha256:[0-9a-f]{64}`).ReplaceAllString(s, "")
}

func TestScriptsRefuseNonsense(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"./bundle.sh"}, "usage: docker/bundle.sh"},
		{[]string{"./bundle.sh", "--flavor"}, "usage: docker/bundle.sh"},
		{[]string{"./bundle.sh", "--flavor", "rocm", t.TempDir()}, `--flavor must be cpu or cuda, got "rocm"`},
		{[]string{"./check.sh", "--pyton"}, "usage: docker/check.sh"},
	} {
		out, err := exec.Command(c.args[0], c.args[1:]...).CombinedOutput()
		var exit *exec.ExitError
		require.True(t, errors.As(err, &exit), "%v: %v", c.args, err)
		require.Equal(t, 2, exit.ExitCode(), "%v", c.args)
		require.Contains(t, string(out), c.want)
	}
}
