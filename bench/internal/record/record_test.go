package record

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/bench/internal/pair"
)

func sum(v ...float64) pair.Summary { return pair.Summarize(v) }

func section(name string, seconds float64) Section {
	ratio := sum(seconds / 2)
	row := Row{Name: "one", Unit: Seconds, Values: []pair.Summary{sum(seconds), sum(2)}, Ratio: &ratio}
	return Section{Name: name, Title: "The " + name, Text: "How.",
		Taken: Taken{
			Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Commit: "abc", Rounds: 3,
			Machine:  Machine{CPU: "a CPU", Cores: []int{0, 1}, Memory: 1 << 30, System: "Linux", Load: "0 0 0"},
			Versions: []NamedString{{"Go", "1.26"}, {"torch", "2.11"}},
		},
		Tables: []Table{{First: "what", Sides: []string{"Go", "Python"}, Ratio: "ratio", Rows: []Row{row.AtMost(name, 0.5)}}}}
}

func names(r *Record) (out []string) {
	for _, s := range r.Sections {
		out = append(out, s.Name)
	}
	return out
}

func ExampleRecord_Page() {
	var r Record
	ratio := pair.Summarize([]float64{0.4})
	row := Row{Name: "add", Unit: Seconds, Ratio: &ratio,
		Values: []pair.Summary{pair.Summarize([]float64{2e-6}), pair.Summarize([]float64{5e-6})}}
	r.Put(Section{Name: "add", Title: "Adding", Tables: []Table{{
		First: "op", Sides: []string{"Go", "Python"}, Ratio: "ratio", Rows: []Row{row.AtMost("add", 1)},
	}}}, []string{"add"})
	for line := range strings.Lines(r.Page()) {
		if strings.HasPrefix(line, "| add") {
			fmt.Print(line)
		}
	}
	// Output:
	// | add | 2.00 µs | 5.00 µs | 0.4 | at most 1.00: met |
}

func TestPutReplacesOneSection(t *testing.T) {
	var r Record
	order := []string{"startup", "toy-job", "mnist"}
	r.Put(section("mnist", 3), order)
	r.Put(section("someone else's", 9), order)
	r.Put(section("startup", 1), order)
	r.Put(section("toy-job", 2), order)
	require.Equal(t, []string{"startup", "toy-job", "mnist", "someone else's"}, names(&r))
	r.Put(section("toy-job", 20), order)
	require.Equal(t, []string{"startup", "toy-job", "mnist", "someone else's"}, names(&r))
	require.Equal(t, 20.0, r.Sections[1].Tables[0].Rows[0].Values[0].Median)
	require.Equal(t, 3.0, r.Sections[2].Tables[0].Rows[0].Values[0].Median, "the others stay")
}

func TestSaveAndLoad(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "docs")
	r, err := Load(dir)
	require.NoError(t, err)
	require.Empty(t, r.Sections, "no record yet")
	r.Put(section("mnist", 3), nil)
	require.NoError(t, r.Save(dir))
	again, err := Load(dir)
	require.NoError(t, err)
	require.Equal(t, r, again)
	page, err := os.ReadFile(filepath.Join(dir, "benchmarks.md"))
	require.NoError(t, err)
	require.Equal(t, r.Page(), string(page))

	require.NoError(t, os.WriteFile(filepath.Join(dir, "benchmarks.json"), []byte("{"), 0o666))
	_, err = Load(dir)
	require.ErrorContains(t, err, "is no record of benchmarks")
}

func TestPageTellsTargets(t *testing.T) {
	var r Record
	met, missed := section("mnist", 0.4), section("startup", 1.2)
	met.Tables[0].Rows[0] = met.Tables[0].Rows[0].AtMost("mnist", 0.25)
	r.Put(met, nil)
	r.Put(missed, nil)
	page := r.Page()
	for _, line := range []string{
		"| MNIST MLP epoch, 2 ranks, loading included | 0.25 | 0.2 | met |",
		"| start-up to first training step, 2 ranks | 0.15 | 0.6 | **missed** |",
		"| ResNet-50 CIFAR step on CPU | 1.0 | − | not measured |",
		"see [gpu.md](gpu.md)",
		"| one | 1.20 s | 2.00 s | 0.6 | at most 0.5: **missed** |",
		"*`-only mnist`: 2026-01-02 03:04 UTC, 3 turns, commit abc; a CPU, cores 0+1, 1.00 GiB, Linux; Go 1.26, torch 2.11. " +
			"Before it, 0 % of the cores were in use (load 0 0 0).*",
	} {
		require.Contains(t, page, line)
	}
	require.NotContains(t, page, "busy")

	r.Sections[0].Taken.Busy, r.Sections[0].Taken.Quick, r.Sections[0].Taken.Dirty = 0.5, true, true
	page = r.Page()
	require.Contains(t, page, "The machine was busy")
	require.Contains(t, page, "3 turns (`-quick`), commit abc with changes")
}

// TestTargetOfSeveralRows: a target that is a bound for each of several rows gets a line for each.
func TestTargetOfSeveralRows(t *testing.T) {
	r := Record{Sections: []Section{{Tables: []Table{{First: "", Rows: []Row{
		{Name: "1 parameter", Unit: Seconds, Target: &Target{Key: "layer", AtMost: 20.1e-6, Seen: 9e-6, Unit: Seconds}},
		{Name: "100 parameters", Unit: Seconds, Target: &Target{Key: "layer", AtMost: 30e-6, Seen: 31e-6, Unit: Seconds}},
	}}}}}}
	require.Contains(t, r.Page(), "1 parameter | 20.1 µs | 9.00 µs | met |")
	require.Contains(t, r.Page(), "100 parameters | 30.0 µs | 31.0 µs | **missed** |")
}

func TestTargets(t *testing.T) {
	require.True(t, Target{AtMost: 1, Seen: 1}.Met())
	require.False(t, Target{AtMost: 1, Seen: 1.01}.Met())
	require.True(t, Target{AtLeast: 10, Seen: 11}.Met())
	require.False(t, Target{AtLeast: 10, Seen: 9}.Met())
	require.False(t, Target{AtMost: 0.1, Seen: 0.2}.Met())
}

func TestCompare(t *testing.T) {
	turns := []pair.Turns{
		{Name: "Go", Answers: []pair.Answer{{"s": {1, 3}}}}, {Name: "Python", Answers: []pair.Answer{{"s": {4}}}},
	}
	row := Compare("x", Seconds, "s", turns)
	require.Equal(t, []string{"Go", "Python"}, Names(turns))
	require.Equal(t, []pair.Summary{sum(1, 3), sum(4)}, row.Values)
	require.Equal(t, 0.5, row.Ratio.Median)
	require.Nil(t, Compare("x", Seconds, "s", turns[:1]).Ratio)
}

func TestUnits(t *testing.T) {
	for _, c := range []struct {
		u    Unit
		v    float64
		want string
	}{
		{Seconds, 1.5, "1.50 s"}, {Seconds, 0.0123, "12.3 ms"}, {Seconds, 4.4e-6, "4.40 µs"},
		{Seconds, 2e-10, "0.2 ns"}, {Seconds, -3e-6, "-3.00 µs"},
		{Seconds, 0, "0 ns"}, {Bytes, 512, "512 B"}, {Bytes, 3 << 20, "3.00 MiB"}, {BytesPerS, 2 << 30, "2.00 GiB/s"},
		{PerSecond, 12345.6, "12,346/s"}, {Count, 1234567, "1,234,567"}, {Count, -12345, "-12,345"},
		{Count, 0.31, "0.31"}, {Count, 250, "250"},
	} {
		require.Equal(t, c.want, c.u.Format(c.v))
	}
}

func TestSpreadHasOneUnit(t *testing.T) {
	require.Equal(t, "2.00 ms (1.50–2.50 ms)", spread(Seconds.Format, sum(1e-3, 2e-3, 3e-3)))
	wide := pair.Summary{Median: 2e-3, Q1: 6e-4, Q3: 11e-3, N: 3}
	require.Equal(t, "2.00 ms (600 µs–11.0 ms)", spread(Seconds.Format, wide))
	require.Equal(t, "2.00 ms", spread(Seconds.Format, sum(2e-3)))
}

func TestMachine(t *testing.T) {
	m, err := ThisMachine([]int{0})
	require.NoError(t, err)
	require.NotEmpty(t, m.CPU)
	require.Positive(t, m.Memory)
	require.Regexp(t, `^Linux \d`, m.System)
	require.Len(t, strings.Fields(m.Load), 3)
	part, err := Busy(20 * time.Millisecond)
	require.NoError(t, err)
	require.GreaterOrEqual(t, part, 0.0)
	require.LessOrEqual(t, part, 1.0)
}

func TestCommitOfNoRepository(t *testing.T) {
	commit, dirty := Commit(t.TempDir())
	require.Equal(t, "unknown", commit)
	require.False(t, dirty)
}
