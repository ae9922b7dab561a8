package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// This program makes libtorch available, so it must build where there is none.
func TestBuildsBeforeSetup(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", ".")
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	require.NoError(t, err)
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		require.False(t, strings.HasPrefix(dep, "github.com/sugarme/gotch"), "goddp imports %s", dep)
		require.NotEqual(t, "github.com/goddp/goddp/internal/tdp", dep)
	}
	require.Contains(t, string(out), "github.com/goddp/goddp/internal/libtorch\n")
}
