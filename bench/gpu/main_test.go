package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
)

// TestMain lets the test's own binary be the Go side.
func TestMain(m *testing.M) {
	if os.Getenv(sideVar) != "" {
		os.Exit(launch.Main(run))
	}
	os.Exit(m.Run())
}

// TestOnCPU runs all parts shortly on the CPU: the sides start, agree on the first loss, take turns, and are recorded.
func TestOnCPU(t *testing.T) {
	t.Setenv("GODDP_PYTHON", testenv.Python(t))
	dir := t.TempDir()
	require.NoError(t, options{device: "cpu", quick: true, out: dir, commit: "abc"}.measure(t.Context()))
	text, err := os.ReadFile(filepath.Join(dir, "gpu.json"))
	require.NoError(t, err)
	var s record.Section
	require.NoError(t, json.Unmarshal(text, &s))
	require.Equal(t, "abc", s.Taken.Commit)
	require.Len(t, s.Tables, 2)
	require.Len(t, s.Tables[0].Rows, 4*3)
	require.Len(t, s.Tables[1].Rows, 3*2)
	for _, table := range s.Tables {
		require.Equal(t, []string{"Go", "Python"}, table.Sides)
		for _, row := range table.Rows {
			for _, v := range row.Values {
				require.Positive(t, v.Median, row.Name)
				require.Equal(t, 2, v.N, row.Name)
			}
		}
	}
	require.Nil(t, s.Tables[0].Rows[0].Target, "a CPU's figures are held to no target")
	page, err := os.ReadFile(filepath.Join(dir, "gpu.md"))
	require.NoError(t, err)
	require.Contains(t, string(page), "bf16 autocast, channels-last")
}
