package gotchprep

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
)

// Drift is a wrapper whose C++ call no overload of libtorch's takes with the same names in the same order.
//
// gotch's wrappers were generated from libtorch 2.1's operators. A call that no longer compiles is noticed; one that still
// does, but whose second and third argument changed places, is not. So the names of the arguments each wrapper passes, which
// are 2.1's, are held against the names in the headers that are compiled now.
type Drift struct {
	Wrapper string   // the C function
	Call    string   // what it calls, with the names and kinds it passes
	Now     []string // the overloads that libtorch has
}

var (
	cppCall   = regexp.MustCompile(`(?m)(?:auto outputs__ = |return |^\s*)(torch::|(\w+)->)(\w+)\((.*)\);`)
	headerFn  = regexp.MustCompile(`(?m)^inline ([^\n(]*?)\b(\w+)\(([^\n]*)\) \{$`)
	headerMth = regexp.MustCompile(`(?m)^  ([\w:&<>, ]+?) (\w+)\(([^\n]*)\) const;$`)
	cIdent    = regexp.MustCompile(`[A-Za-z_]\w*`)
)

// An overload is a C++ function that libtorch has: its parameters, how many of them have no default, and whether it is a method.
type overload struct {
	text   string
	names  []string
	kinds  []string
	needed int
	outs   int // tensors returned; a list counts as one
}

// checkSchemas finds the wrappers that drifted, in the order of their names.
func (m *module) checkSchemas(include string) ([]Drift, int, error) {
	methods, err := readOverloads(filepath.Join(include, "ATen", "core", "TensorBody.h"), headerMth)
	if err != nil {
		return nil, 0, err
	}
	bodies := m.cppBodies()
	var names []string
	for name := range m.proto {
		if strings.HasPrefix(name, "atg_") {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	var out []Drift
	functions, err := readFunctions(filepath.Join(include, "ATen", "ops"))
	if err != nil {
		return nil, 0, err
	}
	for _, name := range names {
		f := m.proto[name]
		call := cppCall.FindStringSubmatch(bodies[name])
		if call == nil {
			return nil, 0, m.fail("schema", genSource, "a call of libtorch in "+name, "none")
		}
		fn := call[3]
		have := methods[fn]
		if call[1] == "torch::" {
			have = functions[fn]
		}
		pass, kinds := callArgs(f, call[4])
		if len(have) == 0 && len(pass) <= 1 {
			continue // a hand-written function of one argument, such as is_complex: the compiler's check is enough
		}
		if !anyMatch(have, pass, kinds, f.outs) {
			d := Drift{Wrapper: name}
			var args []string
			for i := range pass {
				args = append(args, kinds[i]+" "+pass[i])
			}
			d.Call = call[1] + fn + "(" + strings.Join(args, ", ") + ")"
			for _, o := range have {
				d.Now = append(d.Now, o.text)
			}
			out = append(out, d)
		}
	}
	return out, len(names), nil
}

// schema refuses every wrapper that drifted and is not known to be right: it returns an error that says so, and calls nothing.
func schema(m *module) (int, error) {
	m.refused = map[string]string{}
	for name, why := range refusedOps {
		if m.proto[name] == nil {
			return 0, m.fail("schema", genHeader, "a prototype of "+name, "none")
		}
		m.refused[name] = why
	}
	if m.opts.TorchInclude == "" {
		return len(m.refused), nil
	}
	drifts, _, err := m.checkSchemas(m.opts.TorchInclude)
	if err != nil {
		return 0, err
	}
	for _, d := range drifts {
		if m.refused[d.Wrapper] == "" && mendedOps[d.Wrapper] == "" {
			m.refused[d.Wrapper] = "this libtorch has no such overload: " + d.Call
		}
	}
	return len(m.refused), nil
}

// readFunctions reads the functions of all operators.
func readFunctions(dir string) (map[string][]overload, error) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	out := map[string][]overload{}
	for _, e := range list {
		name := e.Name()
		if !strings.HasSuffix(name, ".h") || strings.HasSuffix(name, "_ops.h") || strings.HasSuffix(name, "_native.h") {
			continue
		}
		some, err := readOverloads(filepath.Join(dir, name), headerFn)
		if err != nil {
			return nil, err
		}
		for k, v := range some {
			out[k] = append(out[k], v...)
		}
	}
	return out, nil
}

// readOverloads reads the declarations of a header by name. Those for symbolic integers have the same names and are left out.
func readOverloads(path string, pattern *regexp.Regexp) (map[string][]overload, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	out := map[string][]overload{}
	for _, d := range pattern.FindAllStringSubmatch(string(text), -1) {
		if strings.Contains(d[3], "SymInt") {
			continue
		}
		o := overload{text: d[2] + "(" + d[3] + ")", outs: strings.Count(d[1], "at::Tensor")}
		for _, p := range splitArgs(d[3]) {
			p, _, def := strings.Cut(p, "=")
			words := cIdent.FindAllString(p, -1)
			if len(words) == 0 {
				continue
			}
			o.names = append(o.names, words[len(words)-1])
			o.kinds = append(o.kinds, cppKind(p))
			if !def {
				o.needed = len(o.names)
			}
		}
		out[d[2]] = append(out[d[2]], o)
	}
	return out, nil
}

// cppKind is the kind of a C++ parameter: what a wrapper's argument must be to be meant for it.
func cppKind(p string) string {
	for _, k := range []struct{ has, kind string }{
		{"List<", "Tensor[]"}, {"TensorList", "Tensor[]"}, {"ITensorListRef", "Tensor[]"}, {"ArrayRef<double>", "float[]"}, {"ArrayRef<at::Tensor>", "Tensor[]"},
		{"TensorOptions", "options"}, {"at::Tensor", "Tensor"}, {"ArrayRef<at::Scalar>", "Scalar[]"}, {"at::Scalar ", "Scalar"}, {"at::Scalar>", "Scalar"},
		{"IntArrayRef", "int[]"}, {"ScalarType", "dtype"}, {"string_view", "str"}, {"int64_t", "int"}, {"bool", "bool"}, {"double", "float"},
		{"Layout", "layout"}, {"MemoryFormat", "format"}, {"Device", "device"}, {"Generator", "generator"}, {"Dimname", "dimname"}, {"Storage", "storage"},
	} {
		if strings.Contains(p, k.has) {
			return k.kind
		}
	}
	return "?"
}

// callArgs gives the names and kinds of the arguments that a wrapper passes.
func callArgs(f *cfunc, args string) (names, kinds []string) {
	types := map[string]string{}
	for _, p := range f.params {
		types[p.name] = p.typ
	}
	for _, a := range splitArgs(args) {
		name, typ := "", ""
		for _, id := range cIdent.FindAllString(a, -1) {
			if t, ok := types[id]; ok {
				name, typ = id, t
				break
			}
		}
		kind := "?"
		switch {
		case strings.Contains(a, "of_carray_tensor"):
			kind = "Tensor[]"
		case strings.Contains(a, "IntArrayRef"), strings.Contains(a, "ArrayRef<int64_t>"):
			kind = "int[]"
		case strings.Contains(a, "ArrayRef<double>"):
			kind = "float[]"
		case strings.Contains(a, ".dtype("):
			kind = "options"
		case strings.Contains(a, "ScalarType("):
			kind = "dtype"
		case strings.Contains(a, "device_of_int"):
			kind = "device"
		case strings.Contains(a, "Layout"):
			kind = "layout"
		case strings.Contains(a, "std::string("), strings.Contains(a, "string_view"):
			kind = "str"
		case strings.Contains(a, "optional<int64_t>"):
			kind = "int"
		case strings.Contains(a, "optional<double>"):
			kind = "float"
		case typ == "tensor":
			kind = "Tensor"
		case typ == "scalar":
			kind = "Scalar"
		case strings.Contains(a, "(bool)"):
			kind = "bool"
		case typ == "int64_t":
			kind = "int"
		case typ == "double":
			kind = "float"
		}
		switch base := strings.TrimSuffix(name, "_null"); {
		case base != name:
			name = base
		case strings.HasSuffix(typ, "*"):
			name = strings.TrimSuffix(strings.TrimSuffix(name, "_data"), "_ptr")
		case strings.HasSuffix(name, "_v") && types[strings.TrimSuffix(name, "_v")+"_null"] != "":
			name = strings.TrimSuffix(name, "_v")
		}
		if kind == "options" {
			name = "options"
		}
		names, kinds = append(names, name), append(kinds, kind)
	}
	return names, kinds
}

// anyMatch tells whether an overload takes the arguments by the same names and kinds, and returns as many tensors.
func anyMatch(have []overload, names, kinds []string, outs int) bool {
next:
	for _, o := range have {
		if outs > 0 && outs != o.outs || len(names) < o.needed || len(names) > len(o.names) {
			continue
		}
		for i := range names {
			if !sameName(names[i], o.names[i]) || kinds[i] != o.kinds[i] {
				continue next
			}
		}
		return true
	}
	return false
}

// sameName allows for what gotch's generator did to names: capitals of one letter became small, a scalar self is self_scalar,
// and a C++ keyword has a line behind it.
func sameName(gotch, now string) bool {
	return gotch == now || gotch+"_" == now || len(now) == 1 && strings.EqualFold(gotch, now) || gotch == now+"_scalar"
}

// splitArgs splits at the commas outside brackets.
func splitArgs(s string) []string {
	var out []string
	depth, from := 0, 0
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '(', '{', '[':
			depth++
		case '<':
			if i+1 < len(s) && s[i+1] != ' ' { // not "smaller than"
				depth++
			}
		case ')', '}', ']':
			depth--
		case '>':
			if i == 0 || s[i-1] != '-' {
				depth--
			}
		case ',':
			if depth == 0 {
				out = append(out, strings.TrimSpace(s[from:i]))
				from = i + 1
			}
		}
	}
	if rest := strings.TrimSpace(s[from:]); rest != "" {
		out = append(out, rest)
	}
	return out
}

func (d Drift) String() string {
	return fmt.Sprintf("%s calls %s\n\tnow: %s", d.Wrapper, d.Call, strings.Join(d.Now, "\n\tnow: "))
}
