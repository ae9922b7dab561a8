package gotchprep

import (
	"errors"
	"go/format"
	"strings"
	"testing"
)

// header is a small C ABI with one function of each kind.
const header = `#ifndef X
#define X
#ifdef __cplusplus
thread_local char *torch_last_err = nullptr;
extern "C" {
#define PROTECT(x) \
  try { x } catch (const exception &e) { \
    torch_last_err = strdup(e.what()); \
  }
#else
typedef void *tensor;
#endif
char *get_and_reset_last_err(); // thread-local
int at_dim(tensor);
void at_free(tensor);
void at_each(void *data,
             void (*f)(void *, char *, tensor));
#include "torch_api_generated.h"
#ifdef __cplusplus
}
#endif
#endif
`

const generated = `void atg_add(tensor *, tensor self, tensor other);
void atg_add_(tensor *, tensor self, tensor other);
void atg_qr(tensor *, tensor self, int some);
void atg_view(tensor *, tensor self, int64_t *size_data, int size_len);
void atg_norm(tensor *, tensor input, tensor weight);
tensor *atg_split(tensor self, int64_t split_size);
`

const definitions = `void atg_add(tensor *out__, tensor self, tensor other) {
  PROTECT(
    auto outputs__ = torch::add(*self, *other);
    out__[0] = new torch::Tensor(outputs__);
  )
}

void atg_add_(tensor *out__, tensor self, tensor other) {
  PROTECT(
    auto outputs__ = self->add_(*other);
    out__[0] = new torch::Tensor(outputs__);
  )
}

void atg_qr(tensor *out__, tensor self, int some) {
  PROTECT(
    auto outputs__ = torch::qr(*self, (bool)some);
    out__[0] = new torch::Tensor(std::get<0>(outputs__));
    out__[1] = new torch::Tensor(std::get<1>(outputs__));
  )
}

void atg_view(tensor *out__, tensor self, int64_t *size_data, int size_len) {
  PROTECT(
    auto outputs__ = self->view(torch::IntArrayRef(size_data, size_len));
    out__[0] = new torch::Tensor(outputs__);
  )
}

void atg_norm(tensor *out__, tensor input, tensor weight) {
  PROTECT(
    auto outputs__ = torch::norm(*input, (weight ? *weight : torch::Tensor()));
    out__[0] = new torch::Tensor(outputs__);
  )
}

tensor *atg_split(tensor self, int64_t split_size) {
  PROTECT(
    auto outputs__ = torch::split(*self, split_size);
    return out__;
  )
  return nullptr;
}
`

const hand = `char *get_and_reset_last_err() {
  return nullptr;
}

int at_dim(tensor t) {
  PROTECT(return t->dim();)
  return -1;
}
`

const libGo = `package libtch

//#include "torch_api.h"
import "C"

import "unsafe"

func AtDim(t Ctensor) int {
	result := C.at_dim(t)
	return int(result)
}
func AtFree(t Ctensor) {
	C.at_free(t)
}
func AtgAdd(ptr *Ctensor, self Ctensor, other Ctensor){
	C.atg_add(ptr, self, other)
}
func AtgAdd_(ptr *Ctensor, self Ctensor, other Ctensor){
	C.atg_add_(ptr, self, other)
}
func AtgQr(ptr *Ctensor, self Ctensor, some int32){
csome := *(*C.int)(unsafe.Pointer(&some))
	C.atg_qr(ptr, self, csome)
}
func AtgView(ptr *Ctensor, self Ctensor, sizeData []int64, sizeLen int){
csizeDataPtr := (*C.int64_t)(unsafe.Pointer(&sizeData[0]))
csizeLen := *(*C.int)(unsafe.Pointer(&sizeLen))
	C.atg_view(ptr, self, csizeDataPtr, csizeLen)
}
func AtgNamed(name string) {
	cname := C.CString(name)
	_ = cname
}
func AtgSplit(self Ctensor, splitSize int64) *Ctensor {
	return C.atg_split(self, C.int64_t(splitSize))
}
`

const tsGo = `package ts

// #include "stdlib.h"
import "C"

import (
	"fmt"
	"unsafe"

	lib "github.com/sugarme/gotch/libtch"
)

func (ts *Tensor) Add(other *Tensor, del bool) (retVal *Tensor, err error) {
	if del { defer ts.MustDrop() }
	ptr := (*lib.Ctensor)(unsafe.Pointer(C.malloc(0)))

	lib.AtgAdd(ptr, ts.ctensor, other.ctensor)
	if err = TorchErr(); err != nil {
		err = fmt.Errorf("Add() failed: %w", err)
		return retVal, err
	}
	retVal = newTensor(*ptr, "Add")

	return retVal, err
}

func (ts *Tensor) Add_(other *Tensor) (err error) {
	ptr := (*lib.Ctensor)(unsafe.Pointer(C.malloc(0)))

	lib.AtgAdd_(ptr, ts.ctensor, other.ctensor)
	if err = TorchErr(); err != nil {
		return err
	}
	ts.ctensor = *ptr

	return err
}

func (ts *Tensor) Qr(some bool) (retVal0 *Tensor, retVal1 *Tensor, err error) {
	ctensorPtr0 := (*lib.Ctensor)(unsafe.Pointer(C.malloc(0)))
	ctensorPtr1 := (*lib.Ctensor)(unsafe.Pointer(uintptr(unsafe.Pointer(ctensorPtr0)) + unsafe.Sizeof(ctensorPtr0)))
	csome := int32(0)
	lib.AtgQr(ctensorPtr0, ts.ctensor, csome)
	if err = TorchErr(); err != nil {
		return retVal0, retVal1, err
	}
	return newTensor(*ctensorPtr0), newTensor(*ctensorPtr1), nil
}
`

const tsList = `package ts

import lib "github.com/sugarme/gotch/libtch"

func (ts *Tensor) Split(size int64) (retVal []*Tensor, err error) {
	ctensorsPtr := lib.AtgSplit(ts.ctensor, size)
	if err = TorchErr(); err != nil {
		return retVal, err
	}
	currentPtr := ctensorsPtr
	retVal = append(retVal, newTensor(*currentPtr))
	for {
		nextPtr := next(currentPtr)
		if *nextPtr == nil {
			break
		}
		retVal = append(retVal, newTensor(*nextPtr))
		currentPtr = nextPtr
	}
	return retVal, nil
}

func Sum(tensors []*Tensor) (err error) {
	var ctensors []lib.Ctensor
	for _, t := range tensors {
		ctensors = append(ctensors, t.ctensor)
	}
	var ptr *lib.Ctensor
	lib.AtgAdd(ptr, ctensors[0], ctensors[1])
	return TorchErr()
}
`

func small() *module {
	return &module{counts: map[string]int{}, cpp: map[string][]byte{}, files: map[string][]byte{
		apiHeader: []byte(header), genHeader: []byte(generated), genSource: []byte(definitions), apiSource: []byte(hand),
		"libtch/stb_image.h": nil, "libtch/stb_image_resize.h": nil, "libtch/stb_image_write.h": nil,
		"libtch/c-generated.go": []byte(libGo), "ts/tensor-generated.go": []byte(tsGo), "ts/patch.go": []byte(tsList),
	}}
}

// pipeline is what the small module goes through, in the order of rules.
var pipeline = []struct {
	name string
	fn   func(*module) (int, error)
	want int
}{
	{"cpp-read", cppRead, 10}, {"schema", func(m *module) (int, error) { m.refused = map[string]string{"atg_norm": "it moved"}; return 0, nil }, 0},
	{"cpp-move", cppMove, 4}, {"cpp-optionals", cppOptionals, 1}, {"tensor-lists", tensorLists, 1}, {"in-place", inPlace, 1}, {"out-slots", outSlots, 2},
	{"lib-errors", libErrors, 7}, {"lib-slices", libSlices, 1}, {"lib-strings", libStrings, 1}, {"ts-errors", tsErrors, 5}, {"keep-alive", keepAlive, 7},
	{"handles", handles, 7}, {"cpp-protect", cppProtectRule, 9}, {"cpp-shims", cppShims, 9},
}

// through takes the small module through the rules up to and with the named one.
func through(t *testing.T, last string) *module {
	t.Helper()
	m := small()
	for _, r := range pipeline {
		n, err := r.fn(m)
		if err != nil {
			t.Fatalf("%s: %v", r.name, err)
		}
		if n != r.want {
			t.Errorf("%s changed %d places, want %d", r.name, n, r.want)
		}
		if r.name == last {
			return m
		}
	}
	t.Fatalf("no rule %s", last)
	return nil
}

func has(t *testing.T, text []byte, want ...string) {
	t.Helper()
	if out, err := format.Source(text); err == nil {
		text = out
	}
	for _, w := range want {
		if !strings.Contains(string(text), w) {
			t.Errorf("no %q in\n%s", w, text)
		}
	}
}

func hasNot(t *testing.T, text []byte, bad ...string) {
	t.Helper()
	for _, b := range bad {
		if strings.Contains(string(text), b) {
			t.Errorf("%q in\n%s", b, text)
		}
	}
}

func TestHeaderIsRead(t *testing.T) {
	m := through(t, "cpp-read")
	for name, outs := range map[string]int{"atg_add": 1, "atg_qr": 2, "atg_split": 0, "at_dim": 0} {
		if f := m.proto[name]; f == nil || f.outs != outs {
			t.Errorf("%s: got %+v, want %d outputs", name, f, outs)
		}
	}
	if f := m.proto["at_each"]; len(f.params) != 2 || f.params[1] != (cparam{"callback", "f"}) {
		t.Errorf("at_each: %+v", f)
	}
	if f := m.proto["atg_split"]; f.ret != "tensor *" {
		t.Errorf("atg_split returns %q", f.ret)
	}
}

func TestInPlace(t *testing.T) {
	m := through(t, "cpp-shims")
	has(t, m.files["ts/tensor-generated.go"], "gdErr := lib.AtgAdd_(ts.handle(), other.handle())")
	hasNot(t, m.files["ts/tensor-generated.go"], "ts.ctensor = ", "ts.handle() =")
	has(t, m.files["libtch/c-generated.go"], "func AtgAdd_(self Ctensor, other Ctensor) error {\n\treturn cError(\"add_\", C.gd_atg_add_(self, other))")
	has(t, m.cpp["goddp_generated.h"], "atg_add_(gdout, self, other);\n    goddp::adopt(self, gdout[0]);")
}

func TestOutSlots(t *testing.T) {
	m := through(t, "out-slots")
	has(t, m.files["ts/tensor-generated.go"], "var slots [1]lib.Ctensor\n\tptr := &slots[0]", "var slots [2]lib.Ctensor\n\tctensorPtr0 := &slots[0]\n\tctensorPtr1 := &slots[1]")
	hasNot(t, m.files["ts/tensor-generated.go"], "malloc")
}

func TestLibErrors(t *testing.T) {
	m := through(t, "lib-strings")
	has(t, m.files["libtch/c-generated.go"],
		"func AtDim(t Ctensor) (int, error) {\n\tgdr := C.gd_at_dim(t)\n\tresult := gdr.out\n\tgderr := cError(\"at_dim\", gdr.err)\n\treturn int(result), gderr",
		"func AtFree(t Ctensor) error {\n\treturn cError(\"at_free\", C.gd_at_free(t))",
		"func AtgAdd(ptr *Ctensor, self Ctensor, other Ctensor) error {\n\tgdr := C.gd_atg_add(self, other)\n\t*ptr = gdr.out[0]\n\treturn cError(\"add\", gdr.err)",
		"*(*[2]Ctensor)(unsafe.Pointer(ptr)) = gdr.out",
		"func AtgSplit(self Ctensor, splitSize int64) (*Ctensor, error) {\n\tgdr := C.gd_atg_split(self, C.int64_t(splitSize))\n\treturn gdr.out, cError(\"split\", gdr.err)",
		"#cgo noescape gd_atg_view", "#cgo nocallback gd_atg_view",
		"unsafe.Pointer(unsafe.SliceData(sizeData))",
		"cname := C.CString(name)\n\tdefer C.free(unsafe.Pointer(cname))")
	hasNot(t, m.files["libtch/c-generated.go"], "&sizeData[0]", "noescape gd_atg_add", "C.atg_")
}

func TestTsErrors(t *testing.T) {
	m := through(t, "handles")
	has(t, m.files["ts/tensor-generated.go"],
		"gdErr := lib.AtgAdd(ptr, ts.handle(), other.handle())\n\truntime.KeepAlive(ts)\n\truntime.KeepAlive(other)\n\tif err = gdErr; err != nil {",
		"import \"runtime\"\n\n// #include \"stdlib.h\"\nimport \"C\"")
	hasNot(t, m.files["ts/tensor-generated.go"], "TorchErr", ".ctensor")
	has(t, m.files["ts/patch.go"],
		"ctensorsPtr, gdErr := lib.AtgSplit(ts.handle(), size)\n\truntime.KeepAlive(ts)\n\tif err = gdErr; err != nil {",
		"retVal = tensorList(ctensorsPtr)\n\treturn retVal, nil",
		"runtime.KeepAlive(tensors)\n\treturn gdErr")
	hasNot(t, m.files["ts/patch.go"], "nextPtr")
}

func TestShims(t *testing.T) {
	m := through(t, "cpp-shims")
	has(t, m.cpp["goddp_generated.h"],
		"typedef struct { tensor out[2]; char *err; } gd_out2;",
		"extern \"C\" gd_out1 gd_atg_add(tensor self, tensor other) {\n  gd_out1 gdr = {};\n  try {\n    goddp::need(self, \"self\");\n    goddp::need(other, \"other\");\n    atg_add(gdr.out, self, other);\n  } catch (...) { gdr.err = goddp::caught(); }\n  return gdr;",
		"extern \"C\" char *gd_at_free(tensor a0) {\n  char *gderr = nullptr;\n  try {\n    at_free(a0);",
		"goddp::optional(weight, \"weight\");\n    throw goddp::Misuse('R', \"it moved\");",
		"gd_at_each(void * data, void (*f)(void *, char *, tensor))")
	hasNot(t, m.cpp["torch_api.h"], "torch_last_err", "get_and_reset_last_err")
	has(t, m.cpp["torch_api.h"], "#define PROTECT(x) { x }", "static int at_dim(tensor);")
	has(t, m.cpp["torch_api_generated.cpp.h"], "new torch::Tensor(std::move(outputs__))", "goddp::Opt{weight}")
	has(t, m.files[apiHeader], "gd_out2 gd_atg_qr(tensor self, int some);", "typedef void *tensor;")
	hasNot(t, m.files[apiHeader], "at_last", "static")
	if m.files[apiSource] != nil || m.files[genSource] != nil || m.cpp["torch_api.cpp"] == nil {
		t.Error("the C++ is not where it belongs")
	}
}

func TestFatal(t *testing.T) {
	m := &module{files: map[string][]byte{"a.go": []byte(`package a

import (
	"fmt"
	"log"
)

func f(err error) int {
	switch {
	case err != nil:
		log.Fatal(err)
	case f(nil) == 1:
		log.Fatalf("no %v\n", err)
	case f(nil) == 2:
		log.Fatal("text")
	default:
		log.Fatal("text ", err)
		return 0
	}
	return 0
}
`)}}
	if n, err := fatal(m); n != 4 || err != nil {
		t.Fatal(n, err)
	}
	if n, err := deadEnds(m); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	has(t, m.files["a.go"], "panic(err)", `panic(fmt.Errorf("no %v", err))`, `panic(errors.New("text"))`, `panic(errors.New(fmt.Sprint("text ", err)))`)
	hasNot(t, m.files["a.go"], "log", "return 0\n")
}

func TestImports(t *testing.T) {
	out, err := fixImports("x.go", []byte("package x\n\n// #include <a.h>\nimport \"C\"\n\nimport (\n\t\"log\"\n\tu \"unsafe\"\n\t_ \"embed\"\n)\n\nvar a, b = runtime.GC, u.Pointer(nil)\n"), []string{"runtime", "runtime", "fmt"})
	if err != nil {
		t.Fatal(err)
	}
	has(t, out, "import \"runtime\"\n\n// #include <a.h>\nimport \"C\"", "u \"unsafe\"", "_ \"embed\"")
	hasNot(t, out, "\"log\"", "\"fmt\"")
}

func TestEditsMustNotOverlap(t *testing.T) {
	if _, err := applyEdits("x", []byte("0123456789"), []edit{{2, 6, "a"}, {4, 8, "b"}}); err == nil {
		t.Error("two edits of one place")
	}
	out, err := applyEdits("x", []byte("0123456789"), []edit{{6, 6, "c"}, {2, 4, "a"}, {4, 4, "b"}})
	if err != nil || string(out) != "01ab45c6789" {
		t.Errorf("got %s, %v", out, err)
	}
}

func TestFlags(t *testing.T) {
	m := &module{opts: Options{LDFLAGS: []string{"-L/a b", "-ltch"}}, files: map[string][]byte{"libtch/lib.go": []byte(strings.Repeat("// #cgo x\n", 7))}}
	if _, err := libFlags(m); err != nil {
		t.Fatal(err)
	}
	has(t, m.files["libtch/lib.go"], `// #cgo LDFLAGS: "-L/a b" -ltch`+"\nimport \"C\"")
}

// Each rule refuses a text that it does not know, and says what it looked for.
func TestRulesFailLoudly(t *testing.T) {
	for _, c := range []struct{ rule, file, old, new string }{
		{"cpp-read", genSource, "out__[1]", "out__[7]"},
		{"cpp-read", genSource, "void atg_add(tensor *out__", "void atg_sub(tensor *out__"},
		{"cpp-read", genHeader, "tensor other);", "tensor other;"},
		{"tensor-lists", "ts/patch.go", "*nextPtr == nil", "nextPtr == nil"},
		{"tensor-lists", "ts/patch.go", "newTensor(*currentPtr)", "other(*currentPtr)"},
		{"in-place", "ts/tensor-generated.go", "ts.ctensor = *ptr", "ts.ctensor = *other"},
		{"in-place", "ts/tensor-generated.go", "lib.AtgAdd_(ptr, ts.ctensor,", "lib.AtgAdd_(ptr, x.ctensor,"},
		{"out-slots", "ts/tensor-generated.go", "ptr := (*lib.Ctensor)(unsafe.Pointer(C.malloc(0)))\n\n\tlib.AtgAdd(", "ptr := (*other)(unsafe.Pointer(C.malloc(0)))\n\n\tlib.AtgAdd("},
		{"out-slots", "ts/tensor-generated.go", "ctensorPtr1 := (*lib.Ctensor)(unsafe.Pointer(uintptr(unsafe.Pointer(ctensorPtr0)) + unsafe.Sizeof(ctensorPtr0)))", "ctensorPtr1 := ctensorPtr0"},
		{"lib-errors", "libtch/c-generated.go", "C.atg_add(ptr, self, other)", "C.atg_add(ptr, self)"},
		{"lib-errors", "libtch/c-generated.go", "C.atg_add(ptr, self, other)", "C.atg_add(ptr, self, other)\n\tprintln()"},
		{"lib-errors", "libtch/c-generated.go", "C.atg_add(ptr, self, other)", "C.atg_add(pointer, self, other)"},
		{"lib-errors", "libtch/c-generated.go", "C.at_free(t)", "C.at_free(t)\n\tC.at_free(t)"},
		{"ts-errors", "ts/tensor-generated.go", "if err = TorchErr(); err != nil {\n\t\treturn err", "if err != nil {\n\t\treturn err"},
		{"ts-errors", "ts/patch.go", "ctensorsPtr := lib.AtgSplit(ts.ctensor, size)", "ctensorsPtr := f(lib.AtgSplit(ts.ctensor, size))"},
		{"keep-alive", "ts/patch.go", "lib.AtgSplit(ts.ctensor, size)", "lib.AtgSplit(global.ctensor, size)"},
		{"cpp-protect", apiHeader, "thread_local char", "thread_local const char"},
		{"cpp-protect", apiHeader, "#define PROTECT(x)", "#define GUARD(x)"},
		{"cpp-protect", apiSource, "get_and_reset_last_err() {", "get_last_err() {"},
		{"cpp-protect", genHeader, "void atg_add(", " void atg_add("},
		{"cpp-shims", apiHeader, "int at_dim(", "uint16_t at_dim("},
	} {
		m := small()
		text := string(m.files[c.file])
		if !strings.Contains(text, c.old) {
			t.Fatalf("%s: no %q to change in %s", c.rule, c.old, c.file)
		}
		m.files[c.file] = []byte(strings.Replace(text, c.old, c.new, 1))
		failed := ""
		for _, r := range pipeline {
			if _, err := r.fn(m); err != nil {
				var re *RuleError
				if !errors.As(err, &re) || re.Rule == "" || re.File == "" || re.Expected == "" || re.Found == "" {
					t.Errorf("%s: an error without its place: %v", c.rule, err)
				}
				failed = re.Rule
				break
			}
		}
		if failed != c.rule && !(c.rule == "cpp-shims" && failed == "cpp-protect") {
			t.Errorf("%s -> %s: rule %q failed, want %s", c.old, c.new, failed, c.rule)
		}
	}
}

// A count that is not gotch v0.9.1's is an error by itself.
func TestCountsAreChecked(t *testing.T) {
	m := &module{files: map[string][]byte{}, counts: map[string]int{}}
	err := m.run([]rule{{"x", func(*module) (int, error) { return 3, nil }, 4}})
	var re *RuleError
	if !errors.As(err, &re) || re.Rule != "x" || re.Found != "3" {
		t.Errorf("got %v", err)
	}
}

func TestSchemaMatch(t *testing.T) {
	f, err := parsePrototype("void atg_x(tensor *, tensor self, int64_t *size_data, int size_len, int64_t dim_v, uint8_t dim_null, char* mode, int mode_len, int flag)")
	if err != nil {
		t.Fatal(err)
	}
	names, kinds := callArgs(f, "*self, torch::IntArrayRef(size_data, size_len), dim_null ? c10::nullopt : c10::optional<int64_t>(dim_v), std::string(mode), (bool)flag")
	if got := strings.Join(names, " ") + "|" + strings.Join(kinds, " "); got != "self size dim mode flag|Tensor int[] int str bool" {
		t.Errorf("got %s", got)
	}
	now := overload{names: []string{"self", "size", "dim", "mode", "flag", "more"}, kinds: []string{"Tensor", "int[]", "int", "str", "bool", "float"}, needed: 5, outs: 1}
	swapped := now
	swapped.names = []string{"self", "size", "other", "mode", "flag"}
	more := now
	more.needed = 6
	two := now
	two.outs = 2
	for name, c := range map[string]struct {
		o    overload
		want bool
	}{"same": {now, true}, "another name": {swapped, false}, "one more is needed": {more, false}, "two outputs": {two, false}} {
		if got := anyMatch([]overload{c.o}, names, kinds, 1); got != c.want {
			t.Errorf("%s: got %v", name, got)
		}
	}
	if got := splitArgs("a < 0 ? x : y, f(b, c), std::optional<T<int>>(d), {1, 2}, p->q"); len(got) != 5 {
		t.Errorf("split into %q", got)
	}
}
