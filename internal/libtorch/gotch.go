package libtorch

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/goddp/goddp/internal/gotchprep"
)

// The gotch that is prepared, with the hash that go.sum has for it.
const (
	gotchModule  = "github.com/sugarme/gotch"
	gotchVersion = "v0.9.1"
	gotchSum     = "h1:J6JCE1C2AfPmM1xk0p46LdzWtfNvbvZZnWdkj9v54jo="
)

// gotchSource gives the prepared gotch.
type gotchSource interface {
	// prepare writes the Go module into dst, and the C++ to compile for it into cpp. It quotes the flags.
	prepare(ctx context.Context, t Tree, dst, cpp string, ldflags []string) error
	// version changes with whatever prepare writes.
	version() string
	// flags are the compiler flags that its C++ needs.
	flags() []string
}

// moduleGotch is gotch as the module proxy serves it, prepared by gotchprep.
type moduleGotch struct{}

func (moduleGotch) version() string { return gotchprep.Version() }
func (moduleGotch) flags() []string { return gotchprep.CompileFlags() }

func (moduleGotch) prepare(ctx context.Context, t Tree, dst, cpp string, ldflags []string) error {
	src, err := moduleDir(ctx)
	if err != nil {
		return err
	}
	return gotchprep.Prepare(src, dst, gotchprep.Options{LDFLAGS: ldflags, CPPDir: cpp, TorchInclude: t.Include()[0]})
}

// moduleDir finds the unmodified gotch in the module cache; the go command fetches and verifies it if need be.
func moduleDir(ctx context.Context) (string, error) {
	// Not in the user's module: its go.sum and its replacements have no say here.
	tmp, err := os.MkdirTemp("", "goddp-gotch-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	out, err := program{dir: tmp, env: []string{"GOWORK=off", "GOFLAGS="}}.output(ctx, "go", "mod", "download", "-json", gotchModule+"@"+gotchVersion)
	var info struct{ Dir, Sum, Error string }
	if err == nil {
		err = json.Unmarshal([]byte(out), &info)
	}
	switch {
	case err != nil:
		return "", fmt.Errorf("find gotch: %w", err)
	case info.Error != "":
		return "", fmt.Errorf("find gotch: %s", info.Error)
	case info.Sum != gotchSum:
		return "", fmt.Errorf("find gotch: the module proxy gives %s %s with the hash %s, not %s", gotchModule, gotchVersion, info.Sum, gotchSum)
	}
	return info.Dir, nil
}
