package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

func invoke(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(ctx, args, stdio{strings.NewReader(""), &out, &err})
	return code, out.String(), err.String()
}

func TestHelpAndUsage(t *testing.T) {
	for _, c := range []struct {
		args           []string
		code           int
		stdout, stderr string // what they contain
	}{
		{nil, exitUsage, "", "Usage: goddp COMMAND"},
		{[]string{"help"}, exitOK, "Set-up:\n  setup ", ""},
		{[]string{"--help"}, exitOK, "Usage: goddp COMMAND", ""},
		{[]string{"help", "setup"}, exitOK, "--flavor", ""},
		{[]string{"setup", "-h"}, exitOK, "Usage: goddp setup [flags]\n", ""},
		{[]string{"help", "nonsense"}, exitUsage, "", `unknown command "nonsense"`},
		{[]string{"nonsense"}, exitUsage, "", "Usage: goddp COMMAND"},
		{[]string{"setup", "--nonsense"}, exitUsage, "", "goddp setup: unknown flag: --nonsense\n\nUsage: goddp setup"},
		{[]string{"setup", "x"}, exitUsage, "", `unexpected argument "x"`},
		{[]string{"setup", "--flavor", "rocm"}, exitUsage, "", `unknown flavor "rocm"`},
		{[]string{"env", "A", "B"}, exitUsage, "", "more than one NAME"},
		{[]string{"setup", "-C", "/"}, exitError, "", "no go.mod here or above"},
	} {
		code, stdout, stderr := invoke(t.Context(), c.args...)
		require.Equal(t, c.code, code, c.args)
		require.Contains(t, stdout, c.stdout, c.args)
		require.Contains(t, stderr, c.stderr, c.args)
		require.Equal(t, c.stdout == "", stdout == "", c.args)
		require.Equal(t, c.stderr == "", stderr == "", c.args)
	}
	t.Setenv("FLAVOR", "tpu")
	code, _, stderr := invoke(t.Context(), "setup")
	require.Equal(t, exitUsage, code)
	require.Contains(t, stderr, "$FLAVOR: unknown flavor")
}

func TestExitStatus(t *testing.T) {
	var fail error
	old := commands
	t.Cleanup(func() { commands = old })
	commands = []*command{{name: "x", flags: func(*pflag.FlagSet) func(context.Context, []string, stdio) error {
		return func(context.Context, []string, stdio) error { return fail }
	}}}
	ctx, cancel := context.WithCancel(t.Context())
	for err, code := range map[error]int{nil: 0, errors.New("plain"): 1, usagef("usage"): 2, statusError(7): 7} {
		fail = err
		got, _, _ := invoke(ctx, "x")
		require.Equal(t, code, got)
	}
	cancel()
	fail = fmt.Errorf("waiting: %w", context.Canceled)
	code, _, stderr := invoke(ctx, "x")
	require.Equal(t, 130, code)
	require.Equal(t, "goddp x: interrupted\n", stderr)
}

// The help's headings: commands of one group stand together.
func TestGroups(t *testing.T) {
	seen, last := map[string]bool{}, ""
	for _, c := range commands {
		require.NotEmpty(t, c.summary, c.name)
		if c.group != last {
			require.False(t, seen[c.group], "%s stands apart from its group %s", c.name, c.group)
			seen[c.group], last = true, c.group
		}
	}
}
