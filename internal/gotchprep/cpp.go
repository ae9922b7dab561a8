package gotchprep

import (
	"fmt"
	"regexp"
	"sort"
	"strings"
)

// The files of gotch's C++.
const (
	apiHeader = "libtch/torch_api.h"
	apiSource = "libtch/torch_api.cpp"
	genHeader = "libtch/torch_api_generated.h"
	genSource = "libtch/torch_api_generated.cpp.h"
)

var (
	cppDefinition = regexp.MustCompile(`(?ms)^[a-z_0-9]+ \*?(at[a-z]*_\w+)\(([^{]*?)\) \{\n?(.*?)\n?\}\n`)
	cppPrototype  = regexp.MustCompile(`(?m)^(?:void|int|int64_t|size_t|bool|double|char|tensor|scalar|optimizer|module|ivalue) \*?at[a-z]*_\w+\(`)
	cppProtect    = regexp.MustCompile(`(?s)#define PROTECT\(x\).*?\n  \}\n`)
	cppLastErr    = regexp.MustCompile(`(?s)char \*get_and_reset_last_err\(\) \{.*?\n\}\n`)
)

// cppRead reads the C ABI: the prototypes, and how many tensors each function writes through its first parameter.
func cppRead(m *module) (int, error) {
	m.proto = map[string]*cfunc{}
	for _, name := range []string{apiHeader, genHeader} {
		list, err := parseHeader(string(m.files[name]))
		if err != nil {
			return 0, m.fail("cpp-read", name, "C prototypes", "%v", err)
		}
		for _, f := range list {
			m.proto[f.name] = f
		}
	}
	bodies := m.cppBodies()
	for _, f := range m.proto {
		generated := strings.HasPrefix(f.name, "atg_")
		if f.ret != "void" || len(f.params) == 0 || f.params[0].typ != "tensor *" || !generated && f.name != "ato_constant_pad_nd" {
			continue
		}
		body, ok := bodies[f.name]
		if !ok {
			return 0, m.fail("cpp-read", genSource, "a definition of "+f.name, "none")
		}
		for _, o := range cppOutput.FindAllStringSubmatch(body, -1) {
			if fmt.Sprint(f.outs) != o[1] {
				return 0, m.fail("cpp-read", genSource, "outputs of "+f.name+" in order", "%s", o[0])
			}
			f.outs++
		}
		if f.outs == 0 {
			return 0, m.fail("cpp-read", genSource, "outputs of "+f.name, "none")
		}
	}
	return len(m.proto), nil
}

// cppBodies are the texts of gotch's C++ functions by name.
func (m *module) cppBodies() map[string]string {
	out := map[string]string{}
	for _, name := range []string{apiSource, genSource} {
		for _, d := range cppDefinition.FindAllStringSubmatch(string(m.files[name]), -1) {
			out[d[1]] = d[3]
		}
	}
	return out
}

// cppProtectRule lets exceptions out of gotch's functions instead of keeping them in a thread-local string: whoever asks
// for that string in a second cgo call may be on another thread (65-87 % of errors were lost or landed on another operator).
// The functions also get internal linkage, so that only our shims, which catch, can be called from C and Go.
func cppProtectRule(m *module) (int, error) {
	const rule = "cpp-protect"
	h := string(m.files[apiHeader])
	n := 0
	for _, c := range []struct{ old, new string }{
		{"thread_local char *torch_last_err = nullptr;\n", ""},
		{"char *get_and_reset_last_err(); // thread-local\n", ""},
	} {
		if strings.Count(h, c.old) != 1 {
			return 0, m.fail(rule, apiHeader, fmt.Sprintf("%q once", c.old), "it %d times", strings.Count(h, c.old))
		}
		h = strings.Replace(h, c.old, c.new, 1)
	}
	if len(cppProtect.FindAllString(h, -1)) != 1 {
		return 0, m.fail(rule, apiHeader, "the macro PROTECT", "none")
	}
	h = cppProtect.ReplaceAllString(h, "#define PROTECT(x) { x }\n")
	m.files[apiHeader] = []byte(h)

	src := string(m.files[apiSource])
	if len(cppLastErr.FindAllString(src, -1)) != 1 {
		return 0, m.fail(rule, apiSource, "get_and_reset_last_err once", "%d", len(cppLastErr.FindAllString(src, -1)))
	}
	m.files[apiSource] = []byte(cppLastErr.ReplaceAllString(src, "") + "\n#include \"goddp_generated.h\"\n")
	delete(m.proto, "get_and_reset_last_err")

	for _, name := range []string{apiHeader, genHeader} {
		text := cppPrototype.ReplaceAllStringFunc(string(m.files[name]), func(s string) string { n++; return "static " + s })
		m.files[name] = []byte(text)
	}
	if n != len(m.proto) {
		return 0, m.fail(rule, apiHeader, fmt.Sprintf("%d prototypes at the start of a line", len(m.proto)), "%d", n)
	}
	return n, nil
}

// cppMove moves an operator's result into its handle instead of copying it (two atomic operations less).
func cppMove(m *module) (int, error) {
	const old, new = "new torch::Tensor(outputs__);", "new torch::Tensor(std::move(outputs__));"
	text := string(m.files[genSource])
	m.files[genSource] = []byte(strings.ReplaceAll(text, old, new))
	return strings.Count(text, old), nil
}

var cppOptional = regexp.MustCompile(`\((\w+) \? \*(\w+) : torch::Tensor\(\)\)`)

// cppOptionals passes nothing, not an undefined tensor, for an optional tensor that is left out: libtorch 2.11 refuses the
// latter in places (the mask of scaled_dot_product_attention is one).
func cppOptionals(m *module) (int, error) {
	text := string(m.files[genSource])
	n := 0
	m.files[genSource] = []byte(cppOptional.ReplaceAllStringFunc(text, func(s string) string {
		n++
		return "goddp::Opt{" + cppOptional.FindStringSubmatch(s)[1] + "}"
	}))
	return n, nil
}

// cppShims writes the functions that Go calls. Each checks that no handle is nil or dropped, calls gotch's function,
// catches whatever it throws, and returns the result and the error together. What an operator returns comes back by value,
// so no Go memory crosses the border for it. An in-place operator's second handle is freed here (see inPlace).
func cppShims(m *module) (int, error) {
	names := make([]string, 0, len(m.proto))
	for name := range m.proto {
		names = append(names, name)
	}
	sort.Strings(names)
	bodies := m.cppBodies()
	results := map[string]string{}
	var types, decls, defs strings.Builder
	result := func(f *cfunc) string {
		field, typ := f.ret, map[string]string{"tensor": "gd_tensor", "tensor *": "gd_list", "int": "gd_int", "int64_t": "gd_int64",
			"size_t": "gd_size", "double": "gd_double", "bool": "gd_bool", "char *": "gd_str", "void *": "gd_ptr", "scalar": "gd_scalar",
			"optimizer": "gd_optimizer", "module": "gd_module", "ivalue": "gd_ivalue"}[f.ret]
		if f.outs > 0 && !f.assigns(m) {
			field, typ = "tensor", fmt.Sprintf("gd_out%d", f.outs)
		}
		if typ == "" {
			return ""
		}
		if results[typ] == "" {
			results[typ] = field
		}
		return typ
	}
	for _, name := range names {
		f := m.proto[name]
		res := result(f)
		if res == "" && f.ret != "void" {
			return 0, m.fail("cpp-shims", apiHeader, "a known return type of "+name, "%s", f.ret)
		}
		params := f.params
		if f.outs > 0 {
			params = params[1:]
		}
		var sig, args, checks []string
		for i, p := range params {
			switch {
			case p.typ == "callback":
				sig = append(sig, "void (*"+p.name+")(void *, char *, tensor)")
			default:
				sig = append(sig, p.typ+" "+p.name)
			}
			args = append(args, p.name)
			if c := check(f, p, params[i+1:], bodies[name]); c != "" {
				checks = append(checks, c)
			}
		}
		ret := res
		if ret == "" {
			ret = "char *"
		} else {
			ret += " "
		}
		fmt.Fprintf(&decls, "%sgd_%s(%s);\n", ret, name, strings.Join(sig, ", "))
		fmt.Fprintf(&defs, "extern \"C\" %sgd_%s(%s) {\n", ret, name, strings.Join(sig, ", "))
		err := "gderr"
		if res == "" {
			defs.WriteString("  char *gderr = nullptr;\n")
		} else {
			fmt.Fprintf(&defs, "  %s gdr = {};\n", res)
			err = "gdr.err"
		}
		defs.WriteString("  try {\n")
		for _, c := range checks {
			fmt.Fprintf(&defs, "    %s;\n", c)
		}
		call := func(first ...string) string { return name + "(" + strings.Join(append(first, args...), ", ") + ");" }
		switch {
		case m.refused[name] != "":
			fmt.Fprintf(&defs, "    throw goddp::Misuse('R', %q);\n", m.refused[name])
		case f.outs > 0 && f.assigns(m):
			fmt.Fprintf(&defs, "    tensor gdout[%d];\n    %s\n", f.outs, call("gdout"))
			fmt.Fprintf(&defs, "    goddp::adopt(%s, gdout[0]);\n", m.inplace[name])
		case f.outs > 0:
			fmt.Fprintf(&defs, "    %s\n", call("gdr.out"))
		case res == "":
			fmt.Fprintf(&defs, "    %s\n", call())
		default:
			fmt.Fprintf(&defs, "    gdr.out = %s\n", call())
		}
		fmt.Fprintf(&defs, "  } catch (...) { %s = goddp::caught(); }\n  return %s;\n}\n", err, map[bool]string{true: "gderr", false: "gdr"}[res == ""])
	}
	// What our own functions return.
	results["gd_ptr"], results["gd_int"] = "void *", "int"
	kinds := make([]string, 0, len(results))
	for k := range results {
		kinds = append(kinds, k)
	}
	sort.Strings(kinds)
	for _, k := range kinds {
		dim := strings.TrimPrefix(k, "gd_out")
		if dim == k {
			fmt.Fprintf(&types, "typedef struct { %s out; char *err; } %s;\n", results[k], k)
		} else {
			fmt.Fprintf(&types, "typedef struct { %s out[%s]; char *err; } %s;\n", results[k], dim, k)
		}
	}
	const mine = "gd_ptr gd_dropped_mark();\ngd_int gd_at_sizes(tensor t, int64_t *dims, int cap, int strides);\n" +
		"char *gd_ato_get_learning_rates_n(optimizer o, double *lrs, int64_t n);\n"
	m.cpp["goddp_generated.h"] = []byte("#include \"goddp_shims.h\"\nextern \"C\" {\n" + types.String() + mine + decls.String() + "}\n" +
		"#include \"goddp_extra.h\"\n" + defs.String())
	for _, name := range []string{apiHeader, apiSource, genHeader, genSource, "libtch/stb_image.h", "libtch/stb_image_resize.h", "libtch/stb_image_write.h"} {
		text, ok := m.files[name]
		if !ok {
			return 0, m.fail("cpp-shims", name, "the file", "nothing")
		}
		m.cpp[strings.TrimPrefix(name, "libtch/")] = text
		delete(m.files, name)
	}
	for _, name := range []string{"goddp_compat.h", "goddp_shims.h", "goddp_extra.h"} {
		m.cpp[name] = own(name)
	}
	m.files[apiHeader] = []byte("#pragma once\n#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <stdlib.h>\n" +
		"typedef void *tensor;\ntypedef void *scalar;\ntypedef void *optimizer;\ntypedef void *module;\ntypedef void *ivalue;\n" +
		types.String() + mine + decls.String())
	return len(names), nil
}

// assigns tells whether Go uses the function as an in-place operator.
func (f *cfunc) assigns(m *module) bool { return m.inplace[f.name] != "" }

// lists are the functions, beside the generated ones, that take a list of tensors to read.
var lists = map[string]bool{"at_save_multi": true, "at_run_backward": true, "ato_add_parameters_old": true, "ato_add_param_group": true,
	"atm_forward": true, "atm_method": true, "ati_tensor_list": true, "at_load_multi_": true}

// check is the C++ statement that refuses a bad handle in p, if p is one.
func check(f *cfunc, p cparam, rest []cparam, body string) string {
	if strings.HasSuffix(f.name, "_free") {
		return "" // freeing nothing is fine
	}
	label := fmt.Sprintf("%q", strings.TrimSuffix(p.name, "_data"))
	switch p.typ {
	case "tensor", "scalar", "optimizer", "module", "ivalue":
		if strings.Contains(body, "goddp::Opt{"+p.name+"}") {
			return fmt.Sprintf("goddp::optional(%s, %s)", p.name, label)
		}
		return fmt.Sprintf("goddp::need(%s, %s)", p.name, label)
	case "tensor *":
		if len(rest) == 0 || rest[0].typ != "int" || p.name == "outputs" || !strings.HasPrefix(f.name, "atg_") && !lists[f.name] {
			return ""
		}
		if strings.Contains(body, "of_carray_tensor_opt("+p.name+",") {
			return fmt.Sprintf("goddp::optional_all(%s, %s, %s)", p.name, rest[0].name, label)
		}
		return fmt.Sprintf("goddp::need_all(%s, %s, %s)", p.name, rest[0].name, label)
	}
	return ""
}
