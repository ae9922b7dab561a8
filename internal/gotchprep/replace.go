package gotchprep

import (
	"crypto/sha256"
	"encoding/hex"
	"go/ast"
	"go/token"
	"strings"
)

// replaced are the declarations of gotch that files of ours take the place of, with a hash of the text that they were
// written for: what overruns or leaks in a way no rule can mend, or costs too much.
type replaced struct {
	file string
	what map[string]string // name -> hash
}

// textHash is what the hash in replaced is made of.
func textHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])[:8]
}

// declName is the name of a declaration: a function's, Type.Method, or the first name of a var, const or type.
func declName(d ast.Decl) string {
	switch d := d.(type) {
	case *ast.FuncDecl:
		return funcName(d)
	case *ast.GenDecl:
		if d.Tok == token.IMPORT || len(d.Specs) == 0 {
			return ""
		}
		switch s := d.Specs[0].(type) {
		case *ast.TypeSpec:
			return s.Name.Name
		case *ast.ValueSpec:
			return s.Names[0].Name
		}
	}
	return ""
}

// ownText puts our files in the place of what they replace.
func ownText(m *module) (int, error) {
	const rule = "own-text"
	n := 0
	for _, r := range replacements {
		left := map[string]bool{}
		for name := range r.what {
			left[name] = true
		}
		err := m.edit(r.file, func(s *source) error {
			for _, d := range s.file.Decls {
				name := declName(d)
				want, ok := r.what[name]
				if !ok || !left[name] {
					continue
				}
				delete(left, name)
				if have := textHash(s.str(d)); have != want {
					return m.fail(rule, s.line(d), name+" with the text hash "+want, "%s", have)
				}
				s.drop(d)
				n++
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
		for name := range left {
			return 0, m.fail(rule, r.file, "the declaration of "+name, "none")
		}
		if onlyComments(m.files[r.file]) {
			delete(m.files, r.file)
		}
	}
	for as, with := range ownFiles {
		m.files[as] = own(with)
	}
	return n, nil
}

// onlyComments tells whether nothing but a package clause and imports is left.
func onlyComments(text []byte) bool {
	s, err := parseSource("", text)
	if err != nil {
		return false
	}
	for _, d := range s.file.Decls {
		if declName(d) != "" {
			return false
		}
	}
	return true
}

// tensorLists reads the NULL-terminated lists that some operators return with one function, which frees the array and knows
// that a list can be empty.
func tensorLists(m *module) (int, error) {
	const rule, name = "tensor-lists", "ts/patch.go"
	n := 0
	err := m.edit(name, func(s *source) error {
		for _, f := range s.funcs() {
			for i, st := range f.Body.List {
				if s.str(st) != "currentPtr := ctensorsPtr" {
					continue
				}
				if i+2 >= len(f.Body.List) || s.str(f.Body.List[i+1]) != "retVal = append(retVal, newTensor(*currentPtr))" {
					return m.fail(rule, s.line(st), "the first tensor taken", "something else")
				}
				loop, ok := f.Body.List[i+2].(*ast.ForStmt)
				if !ok || !strings.Contains(s.str(loop), "if *nextPtr == nil {") {
					return m.fail(rule, s.line(st), "a loop to the end of the list", "something else")
				}
				s.span(st.Pos(), loop.End(), "retVal = tensorList(ctensorsPtr)")
				n++
			}
		}
		return nil
	})
	return n, err
}
