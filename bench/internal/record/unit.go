package record

import (
	"fmt"
	"math"
	"strconv"
)

// Unit is what a number counts.
type Unit string

// The units. Numbers are kept in the base unit and shown in the one that fits.
const (
	Seconds   Unit = "s"
	Bytes     Unit = "B"
	PerSecond Unit = "/s"
	BytesPerS Unit = "B/s"
	Count     Unit = ""
)

// scales are a unit's steps, the largest first.
var scales = map[Unit][]struct {
	factor float64
	name   string
}{
	Seconds:   {{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}, {1e-9, "ns"}},
	Bytes:     {{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}, {1, "B"}},
	BytesPerS: {{1 << 30, "GiB/s"}, {1 << 20, "MiB/s"}, {1 << 10, "KiB/s"}, {1, "B/s"}},
}

// Format writes a number with its unit, in three digits.
func (u Unit) Format(v float64) string {
	for i, s := range scales[u] {
		if math.Abs(v) >= s.factor || i == len(scales[u])-1 {
			return digits(v/s.factor) + " " + s.name
		}
	}
	return digits(v) + string(u)
}

// digits writes a number in three digits, and large ones in whole.
func digits(v float64) string {
	switch a := math.Abs(v); {
	case v == 0:
		return "0"
	case a >= 10000:
		return thousands(strconv.FormatFloat(v, 'f', 0, 64))
	case a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	default:
		return strconv.FormatFloat(v, 'g', 2, 64)
	}
}

func thousands(s string) string {
	sign := ""
	if s[0] == '-' {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}
