package gotchprep

import (
	"fmt"
	"go/ast"
	"path"
	"strings"
)

// rules are the rules in their order. Where gotch v0.9.1 has a known number of places, another number is an error.
func rules() []rule {
	return []rule{
		{"prune", prune, -1},
		{"go-mod", goMod, 1},
		{"lib-flags", libFlags, 1},
		{"cpp-read", cppRead, -1},
		{"schema", schema, -1},
		{"cpp-move", cppMove, 2225},
		{"cpp-optionals", cppOptionals, 274},
		{"own-text", ownText, -1},
		{"tensor-lists", tensorLists, 9},
		{"in-place", inPlace, 260},
		{"out-slots", outSlots, -1},
		{"lib-errors", libErrors, -1},
		{"lib-slices", libSlices, -1},
		{"lib-strings", libStrings, -1},
		{"ts-errors", tsErrors, -1},
		{"keep-alive", keepAlive, -1},
		{"handles", handles, -1},
		{"fatal", fatal, -1},
		{"dead-ends", deadEnds, 4},
		{"init", lazyInit, 1},
		{"varstore-order", varStoreOrder, -1},
		{"small-mends", smallMends, -1},
		{"cpp-protect", cppProtectRule, -1},
		{"cpp-shims", cppShims, -1},
	}
}

// prune leaves out what is no part of the library: scripts, tests (they are written for the old behaviour) and dune files.
func prune(m *module) (int, error) {
	n := 0
	for name := range m.files {
		keep := strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") || name == "LICENSE" || name == "go.mod" || name == "go.sum" ||
			path.Dir(name) == "libtch" && (strings.HasSuffix(name, ".h") || strings.HasSuffix(name, ".cpp"))
		if !keep {
			delete(m.files, name)
			n++
		}
	}
	for _, name := range []string{"LICENSE", "go.mod", apiHeader, apiSource, genHeader, genSource} {
		if m.files[name] == nil {
			return 0, m.fail("prune", name, "the file", "nothing")
		}
	}
	return n, nil
}

// goMod raises the language version: cgo's noescape needs 1.24, ranging over functions 1.23.
func goMod(m *module) (int, error) {
	old := "\ngo 1.20\n"
	text := string(m.files["go.mod"])
	m.files["go.mod"] = []byte(strings.Replace(text, old, "\ngo 1.26\n", 1))
	return strings.Count(text, old), nil
}

// libFlags writes our own cgo flags, so that plain go run, go test, go vet and gopls work with no environment variable, and
// nothing links CUDA that does not need it.
func libFlags(m *module) (int, error) {
	const name = "libtch/lib.go"
	if c := strings.Count(string(m.files[name]), "// #cgo "); c != 7 {
		return 0, m.fail("lib-flags", name, "7 cgo lines", "%d", c)
	}
	var quoted []string
	for _, f := range m.opts.LDFLAGS {
		if strings.ContainsAny(f, " \t\"'\\") {
			f = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(f) + `"`
		}
		quoted = append(quoted, f)
	}
	m.files[name] = []byte("package libtch\n\n// #cgo CFLAGS: -O2 -Wno-unused\n// #cgo LDFLAGS: " + strings.Join(quoted, " ") + "\nimport \"C\"\n")
	return 1, nil
}

// lazyInit makes gotch's cache folder when something is written there, not when the package is imported.
func lazyInit(m *module) (int, error) {
	const rule = "init"
	n := 0
	err := m.edit("init.go", func(s *source) error {
		for _, f := range s.funcs() {
			if f.Name.Name != "initEnv" {
				continue
			}
			for _, st := range f.Body.List {
				if i, ok := st.(*ast.IfStmt); ok && strings.Contains(s.str(i), "os.MkdirAll(CachedDir, 0755)") {
					s.replace(i, "")
					n++
				}
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	// Whoever writes below CachedDir makes it: file-util.go creates the folders of the files it downloads.
	text := string(m.files["file-util.go"])
	if !strings.Contains(text, "os.MkdirAll(") {
		return 0, m.fail(rule, "file-util.go", "os.MkdirAll before a download", "none")
	}
	return n, nil
}

// varStoreOrder makes every loop over a VarStore's map run in the order of the names: a Go map's order differs from rank to
// rank, and parameters that are reduced in another order on each rank are reduced wrongly.
func varStoreOrder(m *module) (int, error) {
	n := 0
	for _, name := range m.goFiles("nn", true) {
		err := m.edit(name, func(s *source) error {
			ast.Inspect(s.file, func(node ast.Node) bool {
				r, ok := node.(*ast.RangeStmt)
				if !ok {
					return true
				}
				x := s.str(r.X)
				if strings.HasSuffix(x, ".vars") || name == "nn/optimizer.go" && x == "trainables" || name == "nn/varstore.go" && x == "vars" {
					s.before(r.X, "inOrder(")
					s.after(r.X, ")")
					n++
				}
				return true
			})
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	if n != 21 {
		return 0, m.fail("varstore-order", "nn", "21 loops over variables", "%d", n)
	}
	return n, nil
}

// A mend replaces one text by another in one file.
type mend struct {
	file, old, new string
	times          int
	why            string
}

// smallMends are single mistakes, each with what it did.
func smallMends(m *module) (int, error) {
	n := 0
	for _, e := range mends {
		text := string(m.files[e.file])
		if c := strings.Count(text, e.old); c != e.times {
			return 0, m.fail("small-mends", e.file, fmt.Sprintf("%q %d times (%s)", e.old, e.times, e.why), "%d times", c)
		}
		out, err := fixImports(e.file, []byte(strings.ReplaceAll(text, e.old, e.new)), []string{"errors", "fmt"})
		if err != nil {
			return 0, err
		}
		m.files[e.file] = out
		n += e.times
	}
	for _, file := range []string{"nn/varstore.go", "pickle/serialization.go"} {
		// A collection and a second's sleep after each load: nobody asked for either.
		err := m.edit(file, func(s *source) error {
			ast.Inspect(s.file, func(node ast.Node) bool {
				if st, ok := node.(*ast.ExprStmt); ok && s.str(st) == "ts.CleanUp()" {
					s.replace(st, "")
					n++
				}
				return true
			})
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}
