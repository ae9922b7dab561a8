package pair

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/goddp/goddp/internal/libtorch"
)

// PythonModule is the Python side's end, the module goddpbench.
//
//go:embed goddpbench.py
var PythonModule []byte

// ErrNoPython says that there is no Python with torch to be compared with.
var ErrNoPython = errors.New("no Python with torch: run `make setup-python`, or set GODDP_PYTHON to one")

// Python finds an interpreter that has torch: $GODDP_PYTHON, or what `make setup-python` installed.
func Python() (string, error) {
	if p := os.Getenv("GODDP_PYTHON"); p != "" {
		return p, nil
	}
	cache, err := libtorch.CacheDir()
	if err != nil {
		return "", err
	}
	p := filepath.Join(libtorch.PythonDir(cache), "bin", "python")
	if _, err := os.Stat(p); err != nil {
		return "", fmt.Errorf("%w (%w)", ErrNoPython, err)
	}
	return p, nil
}
