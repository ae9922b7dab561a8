package gotchprep

import (
	"fmt"
	"go/ast"
	"go/token"
	"strings"
)

// inPlace finds the operators that overwrite their receiver's handle with the one the operator returned, without freeing the
// old one (260 of them: Zero_, Detach_, Add_, ... each leaked a tensor, and ZeroGrad so pinned every gradient). The C side
// frees the second handle instead; here the assignment goes, and with it the out slot.
func inPlace(m *module) (int, error) {
	const rule = "in-place"
	const name = "ts/tensor-generated.go"
	m.inplace = map[string]string{}
	goName := map[string]string{}                                 // libtch function -> C function
	names, params := map[string][]string{}, map[string][]string{} // Go parameters and C arguments of a libtch function
	for _, file := range m.goFiles("libtch", true) {
		s, err := parseSource(file, m.files[file])
		if err != nil {
			return 0, err
		}
		for _, f := range s.funcs() {
			for _, p := range f.Type.Params.List {
				for _, id := range p.Names {
					names[f.Name.Name] = append(names[f.Name.Name], id.Name)
				}
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				if c, fn, ok := isCall(n, "C"); ok && m.proto[fn] != nil {
					goName[f.Name.Name] = fn
					params[f.Name.Name] = nil
					for _, a := range c.Args {
						params[f.Name.Name] = append(params[f.Name.Name], s.str(a))
					}
				}
				return true
			})
		}
	}
	n, plain := 0, map[string]bool{}
	err := m.edit(name, func(s *source) error {
		for _, f := range s.funcs() {
			var assign, slot ast.Stmt
			var call *ast.CallExpr
			var lib string
			for _, st := range f.Body.List {
				switch st := st.(type) {
				case *ast.AssignStmt:
					if s.str(st.Lhs[0]) == "ts.ctensor" {
						assign = st
					}
					if s.str(st.Lhs[0]) == "ptr" {
						slot = st
					}
				case *ast.ExprStmt:
					if c, fn, ok := isCall(st.X, "lib"); ok {
						call, lib = c, fn
					}
				}
			}
			if assign == nil {
				plain[goName[lib]] = true
				continue
			}
			if slot == nil || call == nil || s.str(call.Args[0]) != "ptr" || s.str(assign) != "ts.ctensor = *ptr" {
				return m.fail(rule, s.line(assign), "a slot, a call and ts.ctensor = *ptr", "%s", s.str(assign))
			}
			c := goName[lib]
			proto := m.proto[c]
			if proto == nil || proto.outs != 1 {
				return m.fail(rule, s.line(assign), "a C function with one output behind "+lib, "%q", c)
			}
			// The receiver's place among the C arguments, by its name in libtch.
			for i, a := range call.Args {
				if s.str(a) != "ts.ctensor" || i >= len(names[lib]) {
					continue
				}
				for j, p := range params[lib] {
					if p == names[lib][i] && j < len(proto.params) {
						m.inplace[c] = proto.params[j].name
					}
				}
			}
			if m.inplace[c] == "" {
				return m.fail(rule, s.line(assign), "the receiver among the arguments of "+lib, "%s", s.str(call))
			}
			if p := m.inplace[c]; !isTensorParam(proto, p) {
				return m.fail(rule, s.line(assign), "a tensor parameter of "+c, "%s", p)
			}
			s.replace(assign, "")
			s.replace(slot, "")
			s.span(call.Args[0].Pos(), argEnd(call, 0), "")
			n++
		}
		return nil
	})
	for c := range m.inplace {
		if plain[c] {
			return 0, m.fail(rule, name, c+" used in place or not", "both")
		}
	}
	return n, err
}

func isTensorParam(f *cfunc, name string) bool {
	for _, p := range f.params {
		if p.name == name {
			return p.typ == "tensor"
		}
	}
	return false
}

// argEnd is where argument i and the comma behind it end.
func argEnd(call *ast.CallExpr, i int) token.Pos {
	if i+1 < len(call.Args) {
		return call.Args[i+1].Pos()
	}
	return call.Args[i].End()
}

const mallocSlot = "(*lib.Ctensor)(unsafe.Pointer(C.malloc(0)))"

// outSlots replaces the out slots that were allocated with C.malloc(0) and never freed, and that operators with several
// outputs wrote past, by an array on the Go stack with one place for each output.
func outSlots(m *module) (int, error) {
	const rule = "out-slots"
	n := 0
	for _, name := range m.goFiles("ts", true) {
		if strings.HasPrefix(name, "ts/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			for _, f := range s.funcs() {
				var first *ast.AssignStmt
				var rest []*ast.AssignStmt
				for _, st := range f.Body.List {
					as, ok := st.(*ast.AssignStmt)
					if !ok || as.Tok != token.DEFINE || len(as.Rhs) != 1 {
						continue
					}
					switch text := s.str(as.Rhs[0]); {
					case text == mallocSlot:
						if first != nil {
							return m.fail(rule, s.line(as), "one C.malloc(0) in "+f.Name.Name, "two")
						}
						first = as
					case strings.HasPrefix(text, "(*lib.Ctensor)(unsafe.Pointer(uintptr(unsafe.Pointer("):
						rest = append(rest, as)
					}
				}
				if first == nil {
					if strings.Contains(s.str(f.Body), "malloc(0)") {
						return m.fail(rule, s.line(f), "C.malloc(0) as an out slot in "+f.Name.Name, "another use")
					}
					continue
				}
				s.replace(first, fmt.Sprintf("var slots [%d]lib.Ctensor\n%s := &slots[0]", 1+len(rest), s.str(first.Lhs[0])))
				prev := s.str(first.Lhs[0])
				for i, r := range rest {
					if !strings.Contains(s.str(r.Rhs[0]), "uintptr(unsafe.Pointer("+prev+"))") {
						return m.fail(rule, s.line(r), "the slot behind "+prev, "%s", s.str(r))
					}
					prev = s.str(r.Lhs[0])
					s.replace(r, fmt.Sprintf("%s := &slots[%d]", prev, i+1))
				}
				if err := m.slotCount(s, f, 1+len(rest)); err != nil {
					return err
				}
				n++
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// slotCount holds the number of slots against the number of outputs of the C function behind the call.
func (m *module) slotCount(s *source, f *ast.FuncDecl, slots int) error {
	var err error
	ast.Inspect(f.Body, func(n ast.Node) bool {
		_, fn, ok := isCall(n, "lib")
		if !ok {
			return true
		}
		want, known := m.libOuts()[fn]
		if known && want != slots {
			err = m.fail("out-slots", s.line(f), fmt.Sprintf("%d slots for %s", want, fn), "%d", slots)
		}
		return true
	})
	return err
}

// libOuts gives the number of outputs of libtch's functions.
func (m *module) libOuts() map[string]int {
	if m.outs != nil {
		return m.outs
	}
	m.outs = map[string]int{}
	for _, file := range m.goFiles("libtch", true) {
		s, err := parseSource(file, m.files[file])
		if err != nil {
			continue
		}
		for _, f := range s.funcs() {
			ast.Inspect(f.Body, func(n ast.Node) bool {
				if _, fn, ok := isCall(n, "C"); ok {
					if p := m.proto[strings.TrimPrefix(fn, "gd_")]; p != nil && p.outs > 0 {
						m.outs[f.Name.Name] = p.outs
					}
				}
				return true
			})
		}
	}
	return m.outs
}

// tsErrors takes the error from the call that failed. gotch asked TorchErr() for it in a second cgo call, which may run on
// another thread: with other goroutines busy, most errors were lost or landed on another operator.
func tsErrors(m *module) (int, error) {
	const rule = "ts-errors"
	failing, err := m.libFailing()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, name := range m.goFiles("ts", true) {
		if strings.HasPrefix(name, "ts/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			for _, f := range s.funcs() {
				calls, err := s.libCalls(f.Body, failing)
				if err != nil {
					return err
				}
				var asks []*ast.CallExpr
				ast.Inspect(f.Body, func(node ast.Node) bool {
					if c, ok := node.(*ast.CallExpr); ok {
						if id, ok := c.Fun.(*ast.Ident); ok && id.Name == "TorchErr" {
							asks = append(asks, c)
						}
					}
					return true
				})
				if len(asks) != len(calls) {
					return m.fail(rule, s.line(f), fmt.Sprintf("a TorchErr() for each of %d calls in %s", len(calls), f.Name.Name), "%d", len(asks))
				}
				for i, c := range calls {
					if asks[i].Pos() < c.stmt.End() || i+1 < len(calls) && asks[i].Pos() > calls[i+1].stmt.Pos() {
						return m.fail(rule, s.line(c.stmt), "a TorchErr() behind each call", "another order in %s", f.Name.Name)
					}
					v := "gdErr"
					if i > 0 {
						v += fmt.Sprint(i)
					}
					switch st := c.stmt.(type) {
					case *ast.ExprStmt:
						s.before(st, v+" := ")
					case *ast.AssignStmt:
						switch {
						case st.Tok == token.DEFINE:
							s.span(st.Lhs[0].End(), st.Lhs[0].End(), ", "+v)
						default:
							s.before(st, "var "+v+" error\n")
							s.span(st.Lhs[0].End(), st.Lhs[0].End(), ", "+v)
						}
					}
					s.replace(asks[i], v)
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

type libCall struct {
	stmt ast.Stmt
	call *ast.CallExpr
}

// libCalls lists the statements of a block that call a failing function of libtch, in order.
func (s *source) libCalls(body *ast.BlockStmt, failing map[string]bool) ([]libCall, error) {
	var out []libCall
	var err error
	seen := map[*ast.CallExpr]bool{}
	ast.Inspect(body, func(n ast.Node) bool {
		var c *ast.CallExpr
		var fn string
		var ok bool
		switch st := n.(type) {
		case *ast.ExprStmt:
			if c, fn, ok = isCall(st.X, "lib"); ok && failing[fn] {
				out = append(out, libCall{st, c})
				seen[c] = true
			}
		case *ast.AssignStmt:
			if len(st.Rhs) == 1 && len(st.Lhs) == 1 {
				if c, fn, ok = isCall(st.Rhs[0], "lib"); ok && failing[fn] {
					out = append(out, libCall{st, c})
					seen[c] = true
				}
			}
		case *ast.CallExpr:
			if c, fn, ok = isCall(st, "lib"); ok && failing[fn] && !seen[c] && err == nil {
				err = &RuleError{"ts-errors", s.line(st), "the call of " + fn + " as a statement or the right side of one", "it inside an expression"}
			}
		}
		return true
	})
	return out, err
}

// libFailing are the functions of libtch whose last result is an error.
func (m *module) libFailing() (map[string]bool, error) {
	out := map[string]bool{}
	for _, file := range m.goFiles("libtch", true) {
		s, err := parseSource(file, m.files[file])
		if err != nil {
			return nil, err
		}
		for _, f := range s.funcs() {
			if r := f.Type.Results; r != nil && len(r.List) > 0 {
				if id, ok := r.List[len(r.List)-1].Type.(*ast.Ident); ok && id.Name == "error" {
					out[f.Name.Name] = true
				}
			}
		}
	}
	return out, nil
}

// handleFields are the fields that hold a pointer to a C++ object.
var handleFields = map[string]bool{"ctensor": true, "cscalar": true, "coptimizer": true, "Cmodule": true, "civalue": true}

// keepAlive keeps every receiver and argument, and every tensor of a list, reachable until the C call is over. Without it
// the collector may run a finalizer, which frees the C++ tensor, while C++ still uses it (seen in 195 of 200 tries).
func keepAlive(m *module) (int, error) {
	failing, err := m.libFailing()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, name := range m.goFiles("ts", true) {
		if strings.HasPrefix(name, "ts/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			for _, f := range s.funcs() {
				// gdErr, ... := lib.F(...) by now.
				ast.Inspect(f.Body, func(node ast.Node) bool {
					if st, ok := node.(*ast.AssignStmt); ok && len(st.Rhs) == 1 {
						if _, fn, ok := isCall(st.Rhs[0], "lib"); ok && failing[fn] {
							owners, err2 := s.owners(f, st.End())
							if err2 != nil {
								err = err2
							}
							var b strings.Builder
							for _, o := range owners {
								fmt.Fprintf(&b, "\nruntime.KeepAlive(%s)", o)
								s.need("runtime")
								n++
							}
							s.after(st, b.String())
						}
					}
					return true
				})
			}
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// owners are the variables whose handles the function has read up to a place: what must stay reachable.
func (s *source) owners(f *ast.FuncDecl, upto token.Pos) ([]string, error) {
	ranges := map[string]string{} // range variable -> what it ranges over
	var out []string
	have := map[string]bool{}
	var err error
	local := map[string]bool{}
	for _, list := range []*ast.FieldList{f.Recv, f.Type.Params} {
		if list == nil {
			continue
		}
		for _, p := range list.List {
			for _, id := range p.Names {
				local[id.Name] = true
			}
		}
	}
	for _, st := range f.Body.List {
		if as, ok := st.(*ast.AssignStmt); ok && as.Tok == token.DEFINE && as.End() < upto {
			for _, l := range as.Lhs {
				local[s.str(l)] = true
			}
		}
	}
	ast.Inspect(f.Body, func(n ast.Node) bool {
		if n == nil || n.Pos() >= upto {
			return false
		}
		if r, ok := n.(*ast.RangeStmt); ok && r.Value != nil {
			ranges[s.str(r.Value)] = s.str(r.X)
		}
		sel, ok := n.(*ast.SelectorExpr)
		if !ok || !handleFields[sel.Sel.Name] {
			return true
		}
		root := sel.X
		for {
			if inner, ok := root.(*ast.SelectorExpr); ok {
				root = inner.X
				continue
			}
			break
		}
		o := s.str(root)
		if x, ok := ranges[o]; ok {
			o = x
		}
		if !local[o] {
			err = &RuleError{"keep-alive", s.line(sel), "a parameter or a variable of the function", o}
		}
		if !have[o] {
			have[o] = true
			out = append(out, o)
		}
		return true
	})
	return out, err
}

// handles reads handles through a method that knows dropped tensors, instead of the field.
func handles(m *module) (int, error) {
	n := 0
	for _, name := range m.goFiles("ts", true) {
		if strings.HasPrefix(name, "ts/goddp") {
			continue
		}
		err := m.edit(name, func(s *source) error {
			ast.Inspect(s.file, func(node ast.Node) bool {
				if sel, ok := node.(*ast.SelectorExpr); ok && (sel.Sel.Name == "ctensor" || sel.Sel.Name == "cscalar") {
					s.replace(sel.Sel, "handle()")
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

// fatal makes every log.Fatal a panic with the error, so that a rank can tell why it died, run its defers, and end its peers.
func fatal(m *module) (int, error) {
	const rule = "fatal"
	n := 0
	for _, name := range m.goFiles("", false) {
		err := m.edit(name, func(s *source) error {
			var err error
			ast.Inspect(s.file, func(node ast.Node) bool {
				var list []ast.Stmt
				switch b := node.(type) {
				case *ast.BlockStmt:
					list = b.List
				case *ast.CaseClause:
					list = b.Body
				}
				for i, st := range list {
					e, ok := st.(*ast.ExprStmt)
					if !ok || i+2 != len(list) {
						continue
					}
					_, fn, ok := isCall(e.X, "log")
					ret, last := list[i+1].(*ast.ReturnStmt)
					if ok && strings.HasPrefix(fn, "Fatal") && last {
						s.replace(ret, "") // out of reach behind a panic
					}
				}
				if _, fn, ok := isCall(node, "os"); ok && fn == "Exit" {
					err = m.fail(rule, s.line(node), "no os.Exit", "one")
				}
				call, fn, ok := isCall(node, "log")
				if !ok || !strings.HasPrefix(fn, "Fatal") && !strings.HasPrefix(fn, "Panic") {
					return true
				}
				var args []string
				for _, a := range call.Args {
					args = append(args, s.str(a))
				}
				all := strings.Join(args, ", ")
				switch {
				case fn == "Fatal" && len(args) == 1 && args[0] == "err":
					s.replace(call, "panic(err)")
				case fn == "Fatalf" && len(args) > 0:
					s.replace(call, "panic(fmt.Errorf("+strings.ReplaceAll(all, `\n"`, `"`)+"))")
					s.need("fmt")
				case fn == "Fatal" && len(args) == 1 && strings.HasPrefix(args[0], `"`):
					s.replace(call, "panic(errors.New("+strings.ReplaceAll(all, `\n"`, `"`)+"))")
					s.need("errors")
				case fn == "Fatal" && len(args) > 0:
					s.replace(call, "panic(errors.New(fmt.Sprint("+all+")))")
					s.need("errors", "fmt")
				default:
					err = m.fail(rule, s.line(call), "log.Fatal or log.Fatalf", "log.%s(%s)", fn, all)
				}
				n++
				return true
			})
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// deadEnds drops the last statement of functions that cannot reach it, most of them since log.Fatal became a panic, so that
// go vet has nothing to say about the copy.
func deadEnds(m *module) (int, error) {
	n := 0
	for _, name := range m.goFiles("", false) {
		err := m.edit(name, func(s *source) error {
			for _, f := range s.funcs() {
				list := f.Body.List
				if len(list) < 2 {
					continue
				}
				if sw, ok := list[len(list)-2].(*ast.SwitchStmt); ok && neverEnds(sw) {
					s.replace(list[len(list)-1], "")
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

// neverEnds tells whether every way through a switch returns or panics.
func neverEnds(sw *ast.SwitchStmt) bool {
	hasDefault := false
	for _, st := range sw.Body.List {
		c := st.(*ast.CaseClause)
		hasDefault = hasDefault || c.List == nil
		if len(c.Body) == 0 {
			return false
		}
		switch last := c.Body[len(c.Body)-1].(type) {
		case *ast.ReturnStmt:
		case *ast.ExprStmt:
			call, ok := last.X.(*ast.CallExpr)
			if !ok {
				return false
			}
			if id, ok := call.Fun.(*ast.Ident); !ok || id.Name != "panic" {
				return false
			}
		default:
			return false
		}
	}
	breaks := false
	ast.Inspect(sw, func(n ast.Node) bool {
		if b, ok := n.(*ast.BranchStmt); ok && b.Tok == token.BREAK {
			breaks = true
		}
		return true
	})
	return hasDefault && !breaks
}
