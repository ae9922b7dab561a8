package pair

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSummarize(t *testing.T) {
	// What numpy.quantile(sample, [0.25, 0.5, 0.75]) gives.
	for _, c := range []struct {
		sample         []float64
		q1, median, q3 float64
	}{
		{[]float64{7}, 7, 7, 7},
		{[]float64{2, 1}, 1.25, 1.5, 1.75},
		{[]float64{3, 1, 2}, 1.5, 2, 2.5},
		{[]float64{4, 1, 3, 2}, 1.75, 2.5, 3.25},
		{[]float64{5, 1, 100, 3, 2}, 2, 3, 5},
	} {
		require.Equal(t, Summary{Median: c.median, Q1: c.q1, Q3: c.q3, N: len(c.sample)}, Summarize(c.sample))
	}
	require.Zero(t, Summarize(nil))
}

func TestSummarizeLeavesTheSample(t *testing.T) {
	sample := []float64{3, 1, 2}
	Summarize(sample)
	require.Equal(t, []float64{3, 1, 2}, sample)
}

func turnsOf(name string, values ...[]float64) Turns {
	t := Turns{Name: name}
	for _, v := range values {
		t.Answers = append(t.Answers, Answer{"seconds": v})
	}
	return t
}

func TestRatioIsFormedTurnByTurn(t *testing.T) {
	// The machine was ten times slower in the second turn: the ratio of all medians would be 1, that of turns is 0.5.
	a := turnsOf("Go", []float64{1, 1, 9}, []float64{10}, []float64{2})
	b := turnsOf("Python", []float64{2}, []float64{20}, []float64{4})
	require.Equal(t, Summary{Median: 0.5, Q1: 0.5, Q3: 0.5, N: 3}, Ratio(a, b, "seconds"))
	require.Equal(t, Summary{Median: -2, Q1: -6, Q3: -1.5, N: 3}, Difference(a, b, "seconds"))
	require.Equal(t, []float64{1, 1, 9, 10, 2}, a.All("seconds"))
	require.Zero(t, Ratio(a, b, "metres"))
}

func TestMeanOfRanks(t *testing.T) {
	a, err := mean([]Answer{{"s": {1, 2}}, {"s": {3, 6}}})
	require.NoError(t, err)
	require.Equal(t, Answer{"s": {2, 4}}, a)
	_, err = mean([]Answer{{"s": {1, 2}}, {"s": {3}}})
	require.ErrorContains(t, err, `rank 1 gave 1 numbers of "s" and rank 0 gave 2`)
}
