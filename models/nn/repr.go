package nn

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
)

// Representer is a module that says more about itself when it prints.
type Representer interface {
	ExtraRepr() string // what stands between the parentheses, as Python's extra_repr
}

// TypeNamer is a module that prints under another name than its Go type's.
type TypeNamer interface{ TypeName() string }

func typeName(m Module) string {
	if n, ok := m.(TypeNamer); ok {
		return n.TypeName()
	}
	t := reflect.TypeOf(m)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	name, _, _ := strings.Cut(t.Name(), "[")
	return name
}

func extra(m Module) string {
	if r, ok := m.(Representer); ok {
		return r.ExtraRepr()
	}
	return ""
}

// head is a module on one line, without its children.
func head(m Module) string { return typeName(m) + "(" + strings.ReplaceAll(extra(m), "\n", ", ") + ")" }

// Repr gives a model as Python prints it.
func Repr(m Module) string {
	var children []string
	for name, c := range m.base().modules() {
		children = append(children, "("+name+"): ")
		children = append(children, indent(Repr(c)))
	}
	if list, ok := m.(*ModuleList); ok {
		return list.repr()
	}
	var lines []string
	for i := 0; i < len(children); i += 2 {
		lines = append(lines, children[i]+children[i+1])
	}
	e := extra(m)
	if len(lines) == 0 && !strings.Contains(e, "\n") {
		return typeName(m) + "(" + e + ")"
	}
	if e != "" {
		lines = append(strings.Split(e, "\n"), lines...)
	}
	return typeName(m) + "(\n  " + strings.Join(lines, "\n  ") + "\n)"
}

func indent(s string) string { return strings.ReplaceAll(s, "\n", "\n  ") }

// The following print values as Python's repr does.

func pyBool(v bool) string {
	if v {
		return "True"
	}
	return "False"
}

func pyFloat(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	case math.IsNaN(f):
		return "nan"
	}
	s := strconv.FormatFloat(f, 'e', -1, 64)
	mantissa, exponent, _ := strings.Cut(s, "e")
	if e, _ := strconv.Atoi(exponent); e < -4 || e >= 16 {
		sign := "-"
		if e >= 0 {
			sign = "+"
		} else {
			e = -e
		}
		return fmt.Sprintf("%se%s%02d", mantissa, sign, e)
	}
	s = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

func pyTuple(v []int64) string {
	parts := make([]string, len(v))
	for i, n := range v {
		parts[i] = strconv.FormatInt(n, 10)
	}
	if len(parts) == 1 {
		return "(" + parts[0] + ",)"
	}
	return "(" + strings.Join(parts, ", ") + ")"
}
