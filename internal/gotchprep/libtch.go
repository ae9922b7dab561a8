package gotchprep

import (
	"fmt"
	"go/ast"
	"go/token"
	"strings"
)

// libErrors makes every Go function of libtch return the error of its own C call as its last result.
//
// Before:	func AtgAdd(ptr *Ctensor, self Ctensor, other Ctensor) { C.atg_add(ptr, self, other) }
// After:	func AtgAdd(ptr *Ctensor, self Ctensor, other Ctensor) error { one call of gd_atg_add; its result; its error }
//
// Functions in softLib keep their signature: their callers have nowhere to put an error, and zero is the right answer.
func libErrors(m *module) (int, error) {
	n := 0
	for _, name := range m.goFiles("libtch", true) {
		if strings.HasPrefix(name, "libtch/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			var pinned []string
			for _, f := range s.funcs() {
				done, err := m.libFunc(s, f)
				if err != nil {
					return err
				}
				if done != nil {
					n++
					if done.pins() {
						pinned = append(pinned, done.name)
					}
				}
			}
			return s.pragmas(pinned)
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// pins tells whether C gets the address of Go memory for the time of the call. Only then does it pay to tell cgo that C
// neither keeps the address nor calls back: the memory may then stay on the goroutine's stack. Backward passes and
// TorchScript are left out, as hooks may call Go from there.
func (f *cfunc) pins() bool {
	if !strings.HasPrefix(f.name, "atg_") {
		return false
	}
	for i, p := range f.params {
		if strings.HasSuffix(p.typ, "*") && !(i == 0 && f.outs > 0) && p.typ != "char *" {
			return true
		}
	}
	return false
}

func (s *source) pragmas(names []string) error {
	if len(names) == 0 {
		return nil
	}
	for _, d := range s.file.Decls {
		gen, ok := d.(*ast.GenDecl)
		if !ok || gen.Tok != token.IMPORT || len(gen.Specs) != 1 || gen.Specs[0].(*ast.ImportSpec).Path.Value != `"C"` {
			continue
		}
		var b strings.Builder
		for _, n := range names {
			fmt.Fprintf(&b, "//#cgo noescape gd_%s\n//#cgo nocallback gd_%s\n", n, n)
		}
		s.before(gen, b.String())
		return nil
	}
	return &RuleError{"lib-errors", s.name, `import "C"`, "none"}
}

// softLib are questions about the machine: no CUDA is an answer, not an error.
var softLib = map[string]bool{"AtcCudaDeviceCount": true, "AtcCudaIsAvailable": true, "AtcCudnnIsAvailable": true, "AtcSetBenchmarkCudnn": true}

// libFunc rewrites one function around its C call, if it makes one.
func (m *module) libFunc(s *source, f *ast.FuncDecl) (*cfunc, error) {
	const rule = "lib-errors"
	var call *ast.CallExpr
	var proto *cfunc
	for i, st := range f.Body.List {
		var found *ast.CallExpr
		ast.Inspect(st, func(n ast.Node) bool {
			if c, name, ok := isCall(n, "C"); ok && m.proto[name] != nil {
				found, proto = c, m.proto[name]
			}
			return true
		})
		if found == nil {
			continue
		}
		if call != nil {
			return nil, m.fail(rule, s.line(st), "one C call in "+f.Name.Name, "two")
		}
		call = found
		if err := m.libCall(s, f, st, call, proto, i == len(f.Body.List)-1); err != nil {
			return nil, err
		}
	}
	if call == nil {
		return nil, nil
	}
	if softLib[f.Name.Name] {
		return proto, nil
	}
	switch res := f.Type.Results; {
	case res == nil:
		s.after(f.Type, " error")
	case len(res.List) == 1 && len(res.List[0].Names) == 0:
		s.before(res, "(")
		s.after(res, ", error)")
	default:
		return nil, m.fail(rule, s.line(f), "at most one unnamed result of "+f.Name.Name, "%s", s.str(res))
	}
	return proto, nil
}

// libCall rewrites the statement with the C call, and the returns behind it.
func (m *module) libCall(s *source, f *ast.FuncDecl, st ast.Stmt, call *ast.CallExpr, proto *cfunc, last bool) error {
	const rule = "lib-errors"
	args := call.Args
	var text string
	outs := proto.outs
	if len(call.Args) != len(proto.params) {
		return m.fail(rule, s.line(st), fmt.Sprintf("%d arguments for %s", len(proto.params), proto.name), "%d", len(call.Args))
	}
	if outs > 0 {
		if s.str(args[0]) != "ptr" {
			return m.fail(rule, s.line(st), "ptr as the first argument of "+proto.name, "%s", s.str(args[0]))
		}
		args = args[1:]
	}
	var list []string
	for _, a := range args {
		list = append(list, s.str(a))
	}
	goCall := "C.gd_" + proto.name + "(" + strings.Join(list, ", ") + ")"
	op := fmt.Sprintf("%q", strings.TrimPrefix(proto.name, "atg_"))
	switch st := st.(type) {
	case *ast.ExprStmt:
		if st.X != call || f.Type.Results != nil || !last {
			return m.fail(rule, s.line(st), "the call of "+proto.name+" as the last statement", "something else")
		}
		ret := "return "
		if softLib[f.Name.Name] {
			ret = "_ = "
		}
		switch {
		case proto.ret != "void":
			text = "gdr := " + goCall + "\n" + ret + "cError(" + op + ", gdr.err)"
		case outs > 0 && proto.assigns(m):
			text = ret + "cError(" + op + ", " + goCall + ")"
			s.dropParam(f, "ptr")
		case outs == 1:
			text = "gdr := " + goCall + "\n*ptr = gdr.out[0]\n" + ret + "cError(" + op + ", gdr.err)"
		case outs > 1:
			text = fmt.Sprintf("gdr := %s\n*(*[%d]Ctensor)(unsafe.Pointer(ptr)) = gdr.out\n%scError(%s, gdr.err)", goCall, outs, ret, op)
			s.need("unsafe")
		default:
			text = ret + "cError(" + op + ", " + goCall + ")"
		}
		s.replace(st, text)
	case *ast.ReturnStmt:
		if len(st.Results) != 1 || st.Results[0] != call {
			return m.fail(rule, s.line(st), "return of the call of "+proto.name, "%s", s.str(st))
		}
		s.replace(st, "gdr := "+goCall+"\nreturn gdr.out, cError("+op+", gdr.err)")
	case *ast.AssignStmt:
		if len(st.Rhs) != 1 || st.Rhs[0] != call || len(st.Lhs) != 1 {
			return m.fail(rule, s.line(st), "x := "+proto.name+"(...)", "%s", s.str(st))
		}
		text = "gdr := " + goCall + "\n" + s.str(st.Lhs[0]) + " " + st.Tok.String() + " gdr.out\ngderr := cError(" + op + ", gdr.err)"
		if softLib[f.Name.Name] {
			text = "gdr := " + goCall + "\n" + s.str(st.Lhs[0]) + " " + st.Tok.String() + " gdr.out\n_ = cError(" + op + ", gdr.err)"
			s.replace(st, text)
			return nil
		}
		returns := 0
		ast.Inspect(f.Body, func(n ast.Node) bool {
			if r, ok := n.(*ast.ReturnStmt); ok {
				returns++
				if r.Pos() < st.Pos() || len(r.Results) != 1 {
					returns = -1 << 20
				}
				s.after(r, ", gderr")
			}
			return true
		})
		if returns <= 0 {
			return m.fail(rule, s.line(st), "returns of one value after the call of "+proto.name, "%d", returns)
		}
		s.replace(st, text)
	default:
		return m.fail(rule, s.line(st), "a simple statement around "+proto.name, "%T", st)
	}
	return nil
}

// dropParam removes the first parameter.
func (s *source) dropParam(f *ast.FuncDecl, name string) {
	list := f.Type.Params.List
	to := list[0].End()
	if len(list) > 1 {
		to = list[1].Pos()
	}
	s.span(list[0].Pos(), to, "")
}

// libSlices lets empty slices through: &x[0] panics for one, though an empty shape is a scalar's and an empty list of
// dimensions means all of them.
func libSlices(m *module) (int, error) {
	n := 0
	for _, name := range m.goFiles("libtch", true) {
		if strings.HasPrefix(name, "libtch/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			for _, f := range s.funcs() {
				params := map[string]bool{} // slices only: &array[0] is fine
				for _, p := range f.Type.Params.List {
					if a, ok := p.Type.(*ast.ArrayType); ok && a.Len == nil {
						for _, id := range p.Names {
							params[id.Name] = true
						}
					}
				}
				ast.Inspect(f.Body, func(node ast.Node) bool {
					u, ok := node.(*ast.UnaryExpr)
					if !ok || u.Op != token.AND {
						return true
					}
					idx, ok := u.X.(*ast.IndexExpr)
					if !ok || s.str(idx.Index) != "0" {
						return true
					}
					if id, ok := idx.X.(*ast.Ident); ok && (params[id.Name] || id.Name == "ctensors") {
						s.replace(u, "unsafe.SliceData("+id.Name+")")
						s.need("unsafe")
						n++
					}
					return true
				})
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// libStrings frees the C copies of Go strings, which gotch's generated calls and TorchScript loaders leak.
func libStrings(m *module) (int, error) {
	n := 0
	for _, name := range m.goFiles("libtch", true) {
		if strings.HasPrefix(name, "libtch/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			for _, f := range s.funcs() {
				for i, st := range f.Body.List {
					as, ok := st.(*ast.AssignStmt)
					if !ok || len(as.Rhs) != 1 {
						continue
					}
					if _, fn, ok := isCall(as.Rhs[0], "C"); !ok || fn != "CString" {
						continue
					}
					v := s.str(as.Lhs[0])
					freed := i+1 < len(f.Body.List) && strings.Contains(s.str(f.Body.List[i+1]), "C.free(unsafe.Pointer("+v+"))")
					if freed {
						continue
					}
					s.after(st, "\ndefer C.free(unsafe.Pointer("+v+"))")
					s.need("unsafe")
					n++
				}
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}
