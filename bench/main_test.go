package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
)

// TestMain lets the test's own binary be a Go side.
func TestMain(m *testing.M) {
	if os.Getenv(sideVar) != "" {
		os.Exit(launch.Main(run))
	}
	os.Exit(m.Run())
}

// TestPairs measures two parts, shortly: one of single processes, one of ranks.
func TestPairs(t *testing.T) {
	t.Setenv("GODDP_PYTHON", testenv.Python(t))
	dir := t.TempDir()
	old := &record.Record{Sections: []record.Section{{Name: "add", Title: "old"}, {Name: "someone else's", Title: "stays"}}}
	require.NoError(t, old.Save(dir))
	o := options{out: dir, only: "add, allreduce", quick: true, rounds: 2}
	chosen, err := o.choose()
	require.NoError(t, err)
	require.NoError(t, o.measure(t.Context(), chosen))
	r, err := record.Load(dir)
	require.NoError(t, err)
	require.Len(t, r.Sections, 3)
	add := r.Sections[0]
	require.Equal(t, "One small operation", add.Title, "replaced")
	require.Equal(t, "allreduce", r.Sections[1].Name)
	require.Equal(t, "stays", r.Sections[2].Title)
	require.Equal(t, []string{"Go", "Python"}, add.Tables[0].Sides)
	require.Equal(t, 2, add.Taken.Rounds)
	require.True(t, add.Taken.Quick)
	row := add.Tables[0].Rows[0]
	require.Equal(t, "add", row.Target.Key)
	for _, v := range row.Values {
		require.Equal(t, 2, v.N)
		require.Positive(t, v.Median)
	}
	require.Positive(t, row.Ratio.Median)
}

// TestParts: every part is complete, and has a name of its own.
func TestParts(t *testing.T) {
	names := map[string]bool{}
	for _, b := range benchmarks {
		require.False(t, names[b.name], b.name)
		names[b.name] = true
		require.NotEmpty(t, b.title)
		text, err := about.ReadFile("about/" + b.name + ".md")
		require.NoError(t, err)
		require.NotEmpty(t, text)
		require.NotNil(t, b.run)
	}
}

func TestChoose(t *testing.T) {
	all, err := options{}.choose()
	require.NoError(t, err)
	require.Len(t, all, len(benchmarks))
	_, err = options{only: "add,juggle"}.choose()
	require.ErrorContains(t, err, `no part "juggle"`)
	_, err = options{cores: "0,1000000"}.cpus()
	require.ErrorContains(t, err, `"1000000" is not one of`)
}

func TestResNet50Shapes(t *testing.T) {
	shapes := resnet50Shapes()
	require.Len(t, shapes, 161)
	total := int64(0)
	for _, s := range shapes {
		n := int64(1)
		for _, d := range s {
			n *= d
		}
		total += n
	}
	require.Equal(t, int64(25_557_032), total, "torchvision's")
}
