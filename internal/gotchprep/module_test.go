package gotchprep

import (
	"encoding/json"
	"errors"
	"go/ast"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/testenv"
)

// gotch is the unmodified module in the module cache.
func gotch(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", "github.com/sugarme/gotch@v0.9.1")
	cmd.Dir = t.TempDir() // not in this module: its replacements have no say here
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	out, err := cmd.Output()
	var info struct{ Dir, Error string }
	if json.Unmarshal(out, &info) != nil || info.Dir == "" {
		t.Skipf("gotch v0.9.1 cannot be had: %v %s", err, info.Error)
	}
	return info.Dir
}

// torchInclude is the include folder of the Python torch that the tests use.
func torchInclude(t *testing.T) string {
	t.Helper()
	py := testenv.Python(t)
	out, err := exec.Command(py, "-c", "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])").Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "include")
}

// The whole module, prepared once for the tests that look at it.
func TestPrepare(t *testing.T) {
	src, dst, cpp := gotch(t), filepath.Join(t.TempDir(), "gotch"), filepath.Join(t.TempDir(), "cpp")
	if err := Prepare(src, dst, Options{LDFLAGS: []string{"-ltch"}, CPPDir: cpp}); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	filepath.Walk(dst, func(p string, i os.FileInfo, err error) error {
		if err != nil {
			t.Fatal(err)
		}
		if !i.IsDir() {
			text, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			rel, _ := filepath.Rel(dst, p)
			files[filepath.ToSlash(rel)] = string(text)
		}
		return nil
	})
	// A second run gives the same: the hash of the rules can be a cache key.
	again, err := load(src, Options{LDFLAGS: []string{"-ltch"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := again.run(rules()); err != nil {
		t.Fatal(err)
	}
	if len(again.files) != len(files) {
		t.Errorf("%d files, and %d the second time", len(files), len(again.files))
	}
	for name, text := range again.files {
		if files[name] != string(text) {
			t.Errorf("%s differs the second time", name)
		}
	}

	keepAlive, checked := 0, 0
	declared := map[string]bool{}
	for _, m := range regexp.MustCompile(`\bgd_\w+\(`).FindAllString(files[apiHeader], -1) {
		declared[strings.TrimSuffix(m, "(")] = true
	}
	for name, text := range files {
		if strings.HasSuffix(name, ".cpp") || strings.HasPrefix(name, "gen/") || strings.HasPrefix(name, "example/") || strings.HasSuffix(name, "_test.go") {
			t.Errorf("%s is in the copy", name)
		}
		if !strings.HasSuffix(name, ".go") {
			continue
		}
		s, err := parseSource(name, []byte(text))
		if err != nil {
			t.Error(err)
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			if _, fn, ok := isCall(n, "log"); ok && strings.HasPrefix(fn, "Fatal") {
				t.Errorf("%s: log.%s", s.line(n), fn)
			}
			if c, fn, ok := isCall(n, "os"); ok && fn == "Exit" {
				t.Errorf("%s: os.Exit", s.line(c))
			}
			if c, fn, ok := isCall(n, "C"); ok {
				if fn == "malloc" && s.str(c.Args[0]) == "0" {
					t.Errorf("%s: C.malloc(0)", s.line(c))
				}
				if strings.HasPrefix(fn, "at") {
					t.Errorf("%s: C.%s brings no error back", s.line(c), fn)
				}
				if strings.HasPrefix(fn, "gd_") && !declared[fn] {
					t.Errorf("%s: %s is not declared", s.line(c), fn)
				}
			}
			if id, ok := n.(*ast.Ident); ok && (id.Name == "TorchErr" || id.Name == "bigStruct" || id.Name == "GetAndResetLastErr") {
				t.Errorf("%s: %s", s.line(n), id.Name)
			}
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "ctensor" {
				t.Errorf("%s: a handle read past the check", s.line(n))
			}
			if _, fn, ok := isCall(n, "runtime"); ok && fn == "KeepAlive" {
				keepAlive++
			}
			if r, ok := n.(*ast.RangeStmt); ok && strings.HasSuffix(s.str(r.X), ".vars") {
				t.Errorf("%s: a loop in no order", s.line(n))
			}
			return true
		})
		// Whatever reads a handle for a C call keeps its owner alive behind it.
		if strings.HasPrefix(name, "ts/") {
			for _, f := range s.funcs() {
				body := s.str(f.Body)
				if !strings.Contains(body, "lib.At") || !strings.Contains(body, ".handle()") || f.Name.Name == "toC" {
					continue
				}
				checked++
				if !strings.Contains(body, "runtime.KeepAlive(") {
					t.Errorf("%s: %s keeps nothing alive", s.line(f), f.Name.Name)
				}
			}
		}
	}
	if keepAlive < 4000 || checked < 2400 {
		t.Errorf("%d KeepAlive in %d functions: where are the others?", keepAlive, checked)
	}
	if !strings.Contains(files["go.mod"], "module github.com/sugarme/gotch\n\ngo 1.26\n") || files["LICENSE"] == "" {
		t.Error("go.mod or LICENSE")
	}
	for _, name := range []string{"torch_api.cpp", "torch_api.h", "torch_api_generated.h", "torch_api_generated.cpp.h", "stb_image.h", "goddp_compat.h", "goddp_shims.h", "goddp_extra.h", "goddp_generated.h"} {
		text, err := os.ReadFile(filepath.Join(cpp, name))
		if err != nil {
			t.Error(err)
		}
		if strings.Contains(string(text), "torch_last_err") || strings.Contains(string(text), "thread_local") {
			t.Errorf("%s has a thread-local", name)
		}
	}
}

// Nothing is written when gotch is not the gotch that the rules know.
func TestAnotherGotchIsRefused(t *testing.T) {
	src := gotch(t)
	for _, c := range []struct{ rule, file, old, new string }{
		{"prune", "libtch/torch_api.h", "", ""},
		{"go-mod", "go.mod", "go 1.20", "go 1.21"},
		{"lib-flags", "libtch/lib.go", "// #cgo CFLAGS: -D", "//"},
		{"cpp-move", "libtch/torch_api_generated.cpp.h", "new torch::Tensor(outputs__);", "new torch::Tensor( outputs__);"},
		{"cpp-optionals", "libtch/torch_api_generated.cpp.h", ": torch::Tensor())", ": at::Tensor())"},
		{"own-text", "ts/tensor.go", "x := new(Tensor)", "x := &Tensor{}"},
		{"own-text", "libtch/tensor.go", "func AtToString(", "func AtText("},
		{"tensor-lists", "ts/patch.go", "currentPtr := ctensorsPtr", "p := ctensorsPtr"},
		{"in-place", "ts/tensor-generated.go", "ts.ctensor = *ptr", "_ = *ptr"},
		{"out-slots", "ts/patch.go", "ctensorPtr3 := (*lib.Ctensor)(unsafe.Pointer(", "ctensorPtr3 := (*lib.Ctensor)(("},
		{"ts-errors", "ts/optimizer.go", "return TorchErr()", "return nil"},
		{"fatal", "vision/dataset.go", "log.Fatal(err)", "log.Fatalln(err)"},
		{"fatal", "dutil/sampler.go", "\nfunc ", "\nfunc quit() { os.Exit(1) }\n\nfunc "},
		{"init", "init.go", "os.MkdirAll(CachedDir, 0755)", "os.Mkdir(CachedDir, 0755)"},
		{"varstore-order", "nn/varstore.go", "range vs.vars", "range all(vs.vars)"},
		{"small-mends", "nn/batch-norm.go", "config:      config", "config: config"},
		{"schema", "libtch/torch_api_generated.h", "atg__flash_attention_backward(", "atg__flash_attention_gone("},
	} {
		m, err := load(src, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if c.old == "" {
			delete(m.files, c.file)
		} else {
			text := string(m.files[c.file])
			if !strings.Contains(text, c.old) {
				t.Fatalf("no %q in %s", c.old, c.file)
			}
			m.files[c.file] = []byte(strings.Replace(text, c.old, c.new, 1))
		}
		// The rule, and those it cannot do without: all of them for all cases would take a minute.
		needs := map[string]bool{c.rule: true, "prune": true}
		if i := slices.Index([]string{"in-place", "out-slots", "ts-errors"}, c.rule); i >= 0 || c.rule == "schema" {
			for _, n := range []string{"cpp-read", "own-text", "tensor-lists", "in-place", "out-slots", "lib-errors"} {
				needs[n] = i >= 0 || n == "cpp-read"
				if n == c.rule {
					break
				}
			}
		}
		var some []rule
		for _, r := range rules() {
			if needs[r.name] {
				some = append(some, r)
			}
		}
		err = m.run(some)
		var re *RuleError
		if !errors.As(err, &re) || re.Rule != c.rule && !(c.rule == "schema" && re.Rule == "cpp-read") {
			t.Errorf("%s in %s: got %v, want rule %s to fail", c.old, c.file, err, c.rule)
		}
	}
}

// The wrappers that drifted, against the headers of libtorch 2.11: each is mended or refused, and nothing else is.
func TestSchemasOfLibtorch(t *testing.T) {
	include := torchInclude(t)
	m, err := load(gotch(t), Options{TorchInclude: include})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cppRead(m); err != nil {
		t.Fatal(err)
	}
	drifts, n, err := m.checkSchemas(include)
	if err != nil {
		t.Fatal(err)
	}
	if n != 2525 {
		t.Errorf("%d wrappers were looked at, not 2525", n)
	}
	known := map[string]bool{}
	for name := range mendedOps {
		known[name] = true
	}
	for name := range refusedOps {
		known[name] = true
	}
	for _, d := range drifts {
		if !known[d.Wrapper] {
			t.Errorf("not known: %v", d)
		}
		delete(known, d.Wrapper)
	}
	var left []string
	for name := range known {
		left = append(left, name)
	}
	sort.Strings(left)
	if len(left) > 0 {
		t.Errorf("listed, but libtorch has an overload for them: %v", left)
	}
	// A wrapper that passes its arguments in another order is found.
	text := string(m.files[genSource])
	const old, swapped = "torch::addcmul(*self, *tensor1, *tensor2)", "torch::addcmul(*self, *tensor2, *tensor1)"
	if !strings.Contains(text, old) {
		t.Fatal("no addcmul to change")
	}
	m.files[genSource] = []byte(strings.Replace(text, old, swapped, 1))
	more, _, err := m.checkSchemas(include)
	if err != nil || len(more) != len(drifts)+1 {
		t.Errorf("two arguments changed places: %d drifts, %v", len(more)-len(drifts), err)
	}
	if n, err := schema(m); err != nil || m.refused["atg_addcmul"] == "" {
		t.Errorf("addcmul is not refused: %d, %v", n, err)
	}
}

func TestVersion(t *testing.T) {
	if v := Version(); len(v) != 16 || v != Version() {
		t.Errorf("got %q", v)
	}
}
