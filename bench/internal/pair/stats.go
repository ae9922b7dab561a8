package pair

import (
	"math"
	"slices"
)

// Summary is what is told of a sample: the median, and the quartiles for its spread.
type Summary struct {
	Median float64 `json:"median"`
	Q1     float64 `json:"q1"`
	Q3     float64 `json:"q3"`
	N      int     `json:"n"`
}

// Summarize sums a sample up. An empty one gives the zero Summary.
func Summarize(sample []float64) Summary {
	s := slices.Sorted(slices.Values(sample))
	return Summary{Median: quantile(s, 0.5), Q1: quantile(s, 0.25), Q3: quantile(s, 0.75), N: len(s)}
}

// quantile interpolates between the neighbours, as numpy.quantile does.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	at := q * float64(len(sorted)-1)
	low := int(math.Floor(at))
	high := min(low+1, len(sorted)-1)
	part := at - float64(low)
	return sorted[low]*(1-part) + sorted[high]*part
}

// Turns are one side's answers, turn by turn.
type Turns struct {
	Name    string
	Answers []Answer
}

// All are the numbers of all turns under one name.
func (t Turns) All(metric string) []float64 {
	var out []float64
	for _, a := range t.Answers {
		out = append(out, a[metric]...)
	}
	return out
}

// Summary sums up the numbers of all turns under one name.
func (t Turns) Summary(metric string) Summary { return Summarize(t.All(metric)) }

// Ratio sums up, turn by turn, how many times b's median a's is. Turns lie close together in time, so a machine that
// slows down for a while slows both sides of a ratio.
func Ratio(a, b Turns, metric string) Summary {
	return combine(a, b, metric, func(x, y float64) float64 { return x / y })
}

// Difference sums up, turn by turn, a's median less b's.
func Difference(a, b Turns, metric string) Summary {
	return combine(a, b, metric, func(x, y float64) float64 { return x - y })
}

func combine(a, b Turns, metric string, f func(x, y float64) float64) Summary {
	var out []float64
	for i := range min(len(a.Answers), len(b.Answers)) {
		x, y := a.Answers[i][metric], b.Answers[i][metric]
		if len(x) > 0 && len(y) > 0 {
			out = append(out, f(Summarize(x).Median, Summarize(y).Median))
		}
	}
	return Summarize(out)
}
