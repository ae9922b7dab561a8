package gotchprep

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"sort"
	"strconv"
	"strings"
)

// An edit replaces the bytes [start, end) of a file.
type edit struct {
	start, end int
	text       string
}

// A source is one parsed Go file with the edits a rule wants to make to it. The tree is only read: what changes is text at
// the places the tree points to, so that everything a rule does not touch stays as it was.
type source struct {
	name    string
	text    []byte
	fset    *token.FileSet
	file    *ast.File
	edits   []edit
	imports []string // paths the edits need
}

func parseSource(name string, text []byte) (*source, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, text, parser.ParseComments)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", name, err)
	}
	return &source{name: name, text: text, fset: fset, file: file}, nil
}

func (s *source) offset(pos token.Pos) int { return s.fset.Position(pos).Offset }
func (s *source) line(n ast.Node) string {
	return fmt.Sprintf("%s:%d", s.name, s.fset.Position(n.Pos()).Line)
}

// str is the text of a node.
func (s *source) str(n ast.Node) string { return string(s.text[s.offset(n.Pos()):s.offset(n.End())]) }

func (s *source) replace(n ast.Node, text string) { s.span(n.Pos(), n.End(), text) }
func (s *source) before(n ast.Node, text string)  { s.span(n.Pos(), n.Pos(), text) }
func (s *source) after(n ast.Node, text string)   { s.span(n.End(), n.End(), text) }
func (s *source) span(from, to token.Pos, text string) {
	s.edits = append(s.edits, edit{s.offset(from), s.offset(to), text})
}

// drop removes a declaration with its doc comment.
func (s *source) drop(d ast.Decl) {
	from := d.Pos()
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Doc != nil {
			from = d.Doc.Pos()
		}
	case *ast.GenDecl:
		if d.Doc != nil {
			from = d.Doc.Pos()
		}
	}
	s.span(from, d.End(), "")
}

func (s *source) need(imports ...string) { s.imports = append(s.imports, imports...) }

// apply gives the edited text, with the imports it needs and without those it no longer uses.
func (s *source) apply() ([]byte, error) {
	if len(s.edits) == 0 {
		return s.text, nil
	}
	text, err := applyEdits(s.name, s.text, s.edits)
	if err != nil {
		return nil, err
	}
	return fixImports(s.name, text, s.imports)
}

func applyEdits(name string, text []byte, edits []edit) ([]byte, error) {
	sort.SliceStable(edits, func(i, j int) bool {
		if edits[i].start != edits[j].start {
			return edits[i].start < edits[j].start
		}
		return edits[i].end < edits[j].end // insertions before what they stand in front of
	})
	var b bytes.Buffer
	b.Grow(len(text) + len(text)/4)
	at := 0
	for _, e := range edits {
		if e.start < at {
			return nil, fmt.Errorf("%s: two edits overlap at byte %d (%q)", name, e.start, e.text)
		}
		b.Write(text[at:e.start])
		b.WriteString(e.text)
		at = e.end
	}
	b.Write(text[at:])
	return b.Bytes(), nil
}

// fixImports adds the wanted imports that are missing and removes those without a use.
func fixImports(name string, text []byte, want []string) ([]byte, error) {
	s, err := parseSource(name, text)
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	ast.Inspect(s.file, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok {
			if id, ok := sel.X.(*ast.Ident); ok && id.Obj == nil {
				used[id.Name] = true
			}
		}
		return true
	})
	have := map[string]bool{}
	for _, decl := range s.file.Decls {
		gen, ok := decl.(*ast.GenDecl)
		if !ok || gen.Tok != token.IMPORT {
			continue
		}
		left := 0
		var gone []ast.Spec
		for _, spec := range gen.Specs {
			imp := spec.(*ast.ImportSpec)
			p, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				return nil, err
			}
			local := path.Base(p)
			if imp.Name != nil {
				local = imp.Name.Name
			}
			if p != "C" && local != "_" && local != "." && !used[local] {
				gone = append(gone, spec)
				continue
			}
			left++
			have[p] = true
		}
		if left == 0 {
			s.drop(gen)
			continue
		}
		for _, spec := range gone {
			s.replace(spec, "")
		}
	}
	var add strings.Builder
	sort.Strings(want)
	for i, p := range want {
		if !have[p] && (i == 0 || want[i-1] != p) && used[path.Base(p)] {
			fmt.Fprintf(&add, "\nimport %q\n", p)
		}
	}
	if add.Len() > 0 {
		s.after(s.file.Name, "\n"+add.String()) // before import "C": its comment must stay next to it
	}
	return applyEdits(name, s.text, s.edits)
}

// funcName is Name or Type.Name for a method.
func funcName(d *ast.FuncDecl) string {
	if d.Recv == nil || len(d.Recv.List) == 0 {
		return d.Name.Name
	}
	t := d.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if id, ok := t.(*ast.Ident); ok {
		return id.Name + "." + d.Name.Name
	}
	return d.Name.Name
}

func (s *source) funcs() []*ast.FuncDecl {
	var out []*ast.FuncDecl
	for _, d := range s.file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Body != nil {
			out = append(out, f)
		}
	}
	return out
}

// isCall tells whether e is a call pkg.F(...), and of which F.
func isCall(e ast.Node, pkg string) (*ast.CallExpr, string, bool) {
	call, ok := e.(*ast.CallExpr)
	if !ok {
		return nil, "", false
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil, "", false
	}
	id, ok := sel.X.(*ast.Ident)
	if !ok || id.Name != pkg || id.Obj != nil {
		return nil, "", false
	}
	return call, sel.Sel.Name, true
}
