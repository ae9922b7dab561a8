// Package testenv finds what tests need beside Go: a Python with torch to be held against, and fresh loopback ports.
package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Python gives the path of a Python interpreter that has torch 2.11, or skips the test with the reason.
//
// It is $GODDP_PYTHON, or else what `make setup-python` installed.
func Python(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("GODDP_PYTHON"); p != "" {
		return p
	}
	if cache, err := CacheDir(); err == nil {
		p := filepath.Join(cache, "python", "2.11.0", "bin", "python")
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatal("Python with torch is missing in CI: `make test` must have installed it")
	}
	t.Skip("Python torch is not installed: run `make setup-python`")
	return ""
}

// CacheDir is where set-up keeps what it installs.
func CacheDir() (string, error) {
	if d := os.Getenv("GODDP_CACHE"); d != "" {
		return d, nil
	}
	d, err := os.UserCacheDir()
	return filepath.Join(d, "goddp"), err
}

// RunPython runs a script of Python with arguments and gives its standard output. A failing script fails the test
// with what it printed.
func RunPython(t testing.TB, script string, args ...string) string {
	t.Helper()
	cmd := exec.Command(Python(t), append([]string{"-c", script}, args...)...)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "OMP_NUM_THREADS=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("python: %v\n%s\n%s", err, out, stderr.String())
	}
	return string(out)
}
