package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// phases are the parts of a step by name, in the order in which they happen.
var phases = []struct {
	name string
	of   func(Times) time.Duration
}{
	{"data", func(t Times) time.Duration { return t.Data }},
	{"forward", func(t Times) time.Duration { return t.Forward }},
	{"backward", func(t Times) time.Duration { return t.Backward }},
	{"communication", func(t Times) time.Duration { return t.Communication }},
	{"optimizer", func(t Times) time.Duration { return t.Optimizer }},
}

// busy is the time in which a rank worked rather than waited: all ranks' steps take as long as the slowest one's, and
// what the others wait for it is their communication.
func (t Times) busy() time.Duration { return t.Data + t.Forward + t.Backward + t.Optimizer }

// figures gives what a step says under the names that files share: TensorBoard's tags are the CSV file's columns.
func (s Step) figures() []Value {
	var list []Value
	for _, v := range s.Values {
		list = append(list, Value{"step/" + printable(v.Name), v.Value})
	}
	list = append(list, Value{"learning_rate", s.LR}, Value{"samples_per_second", s.Throughput})
	for _, p := range phases {
		list = append(list, Value{"seconds/" + p.name, p.of(s.Times).Seconds()})
	}
	list = append(list, Value{"seconds/step", s.Times.Total.Seconds()}, Value{"bytes_reduced", float64(s.Bytes)})
	if len(s.Buckets) > 0 {
		var sum time.Duration
		for _, b := range s.Buckets {
			sum += b.Time
		}
		list = append(list, Value{"buckets/count", float64(len(s.Buckets))})
		if sum > 0 { // not every build of the reducer measures them
			list = append(list, Value{"buckets/seconds", sum.Seconds()})
		}
	}
	if len(s.Ranks) > 0 {
		rank, ratio := straggler(s.Ranks)
		list = append(list, Value{"ranks/slowest", float64(rank)}, Value{"ranks/slowest_over_median", ratio})
	}
	return list
}

func (e Epoch) figures() []Value {
	var list []Value
	for _, v := range e.Train {
		list = append(list, Value{"train/" + printable(v.Name), v.Value})
	}
	for _, v := range e.Eval {
		list = append(list, Value{"eval/" + printable(v.Name), v.Value})
	}
	return append(list, Value{"epoch/seconds", e.Duration.Seconds()},
		Value{"epoch/samples_per_second", e.Throughput}, Value{"epoch/learning_rate", e.LR})
}

// straggler gives the rank that works longest in a step, and how many times the median that is.
func straggler(ranks []RankFigures) (rank int, ratio float64) {
	if len(ranks) == 0 {
		return 0, 1
	}
	slowest := slices.MaxFunc(ranks, func(a, b RankFigures) int { return int(a.Times.busy() - b.Times.busy()) })
	median := medianBusy(ranks)
	if median <= 0 {
		return slowest.Rank, 1
	}
	return slowest.Rank, float64(slowest.Times.busy()) / float64(median)
}

func medianBusy(ranks []RankFigures) time.Duration {
	if len(ranks) == 0 {
		return 0
	}
	busy := make([]time.Duration, len(ranks))
	for i, r := range ranks {
		busy[i] = r.Times.busy()
	}
	slices.Sort(busy)
	return (busy[(len(busy)-1)/2] + busy[len(busy)/2]) / 2
}

// steps is how many steps a record stands for, at least one.
func (s Step) steps() int { return max(s.Steps, 1) }

// stamp is t, or now where the caller left it out.
func stamp(t time.Time) time.Time {
	if t.IsZero() {
		return time.Now()
	}
	return t
}

// printable makes a name fit for a line, a column and a terminal: valid UTF-8 without control characters.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r != ' ' && !unicode.IsGraphic(r) || r == '\u2028' || r == '\u2029' {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(name, string(unicode.ReplacementChar)))
}

// number writes a figure for people.
func number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "NaN"
	case math.IsInf(v, 0):
		return strconv.FormatFloat(v, 'g', -1, 64)
	case a != 0 && a < 1e-3 || a >= 1e9:
		// The exponent without padding: 1e-5, as a person types it.
		s := strconv.FormatFloat(v, 'e', 3, 64)
		mantissa, exponent, _ := strings.Cut(s, "e")
		n, _ := strconv.Atoi(exponent)
		return fmt.Sprintf("%se%d", strings.TrimRight(strings.TrimRight(mantissa, "0"), "."), n)
	case a >= 1000:
		return grouped(int64(math.Round(v)))
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// grouped writes 25557032 as 25,557,032.
func grouped(n int64) string {
	s, sign := strconv.FormatInt(n, 10), ""
	if s[0] == '-' {
		s, sign = s[1:], "-"
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// short writes a duration with three or four digits.
func short(d time.Duration) string {
	switch a := d.Abs(); {
	case a >= time.Minute:
		d = d.Round(time.Second)
	case a >= time.Second:
		d = d.Round(10 * time.Millisecond)
	case a >= 100*time.Millisecond:
		d = d.Round(time.Millisecond)
	case a >= time.Millisecond:
		d = d.Round(10 * time.Microsecond)
	default:
		d = d.Round(time.Microsecond / 100)
	}
	return d.String()
}

// amount writes a count of bytes.
func amount(bytes int64) string {
	units := []string{"B", "kB", "MB", "GB", "TB"}
	v, u := float64(bytes), 0
	for v >= 999.5 && u < len(units)-1 {
		v, u = v/1000, u+1
	}
	return strconv.FormatFloat(v, 'g', 3, 64) + " " + units[u]
}

// share writes a ratio as what it is more or less than one.
func share(ratio float64) string {
	percent := math.Round((ratio - 1) * 100)
	if percent == 0 {
		return "0 %"
	}
	return fmt.Sprintf("%+.0f %%", percent)
}
