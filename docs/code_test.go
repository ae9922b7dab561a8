package docs

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/goddp/goddp/"

// ours are the packages that pages speak of, by name; others are what their code uses beside them.
var (
	ours = map[string]string{
		"torchddp": module + "torchddp", "optim": module + "torchddp/optim", "amp": module + "torchddp/amp",
		"launch": module + "launch", "data": module + "data", "vision": module + "data/vision",
		"transforms": module + "data/transforms", "models": module + "models", "nn": module + "models/nn",
		"checkpoint": module + "checkpoint", "train": module + "train", "report": module + "train/report",
	}
	others = map[string]string{
		"context": "context", "errors": "errors", "fmt": "fmt", "io": "io", "os": "os", "slog": "log/slog", "time": "time",
		"gotch": "github.com/sugarme/gotch", "ts": "github.com/sugarme/gotch/ts", "rand": "math/rand/v2",
	}
)

// variables are what fragments of code take for granted.
const variables = `
var (
	ctx     context.Context
	err     error
	env     launch.Env
	pg      *torchddp.ProcessGroup
	store   *torchddp.Store
	model   *models.ResNet
	ddp     *torchddp.DDP
	opt     *optim.SGD
	scheduler optim.Scheduler
	scaler  *amp.GradScaler
	set     *data.TensorDataset
	sampler *data.DistributedSampler
	loader  *data.DataLoader[*data.Batch]
	batch   *data.Batch
	snapshot *checkpoint.Snapshot
	sd      *checkpoint.StateDict
	device  gotch.Device
	x, y, t, out, loss, scaled *ts.Tensor
	params  []*ts.Tensor
	outputs []*ts.Tensor
	epoch, epochs, step, n int
	path    string
	fn      func(context.Context, launch.Env) error
)
`

// checker type-checks pieces of Go against the packages as they are built now.
type checker struct {
	fset *token.FileSet
	imp  types.Importer
}

func newChecker(t *testing.T) *checker {
	t.Helper()
	args := []string{"list", "-deps", "-export", "-f", "{{if .Export}}{{.ImportPath}}={{.Export}}{{end}}",
		"github.com/spf13/pflag"}
	for _, m := range []map[string]string{ours, others} {
		for _, p := range m {
			args = append(args, p)
		}
	}
	var stderr bytes.Buffer
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stderr = root, &stderr
	list, err := cmd.Output()
	if err != nil {
		t.Fatalf("the packages do not build: %v\n%s", err, stderr.String())
	}
	files := map[string]string{}
	for line := range strings.Lines(string(list)) {
		name, file, _ := strings.Cut(strings.TrimSpace(line), "=")
		files[name] = file
	}
	c := &checker{fset: token.NewFileSet()}
	c.imp = importer.ForCompiler(c.fset, "gc", func(p string) (io.ReadCloser, error) {
		if files[p] == "" {
			return nil, fmt.Errorf("pages may not import %s: it is not in docs/code_test.go", p)
		}
		return os.Open(files[p])
	})
	return c
}

// check type-checks a file. What is soft, such as a variable without use, is forgiven in fragments.
func (c *checker) check(src string, strict bool) error {
	file, err := parser.ParseFile(c.fset, "page.go", src, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	var worst error
	conf := types.Config{Importer: c.imp, Error: func(err error) {
		e, ok := err.(types.Error)
		forgiven := ok && !strict && (e.Soft || e.Msg == "missing return") // the end of a fragment may be left out
		if worst == nil && !forgiven {
			worst = err
		}
	}}
	conf.Check("page", c.fset, []*ast.File{file}, nil)
	return worst
}

// fragment makes a file of declarations or statements.
func fragment(code string) string {
	body := code
	if _, err := parser.ParseFile(token.NewFileSet(), "", "package page\n"+code, 0); err != nil {
		body = "func _() error {\nfor {\n" + code + "\n}\n}\n"
	}
	var b strings.Builder
	b.WriteString("package page\nimport (\n")
	for _, m := range []map[string]string{ours, others} {
		for name, p := range m {
			if regexp.MustCompile(`\b` + name + `\.`).MatchString(variables + body) {
				fmt.Fprintf(&b, "%s %q\n", importName(name, p), p)
			}
		}
	}
	b.WriteString(")\n" + variables + body)
	return b.String()
}

func importName(name, p string) string {
	if path.Base(p) == name {
		return ""
	}
	return name
}

func TestGoCode(t *testing.T) {
	c := newChecker(t)
	found := 0
	for _, p := range pages(t) {
		for _, b := range p.blocks {
			if b.lang != "go" {
				continue
			}
			found++
			if file, ok := strings.CutPrefix(b.mark, "from: "); ok {
				if err := excerpt(b.text, file); err != nil {
					t.Errorf("%s:%d: %v", p.path, b.line, err)
				}
				continue
			}
			src, whole := b.text, strings.HasPrefix(b.text, "package ")
			if !whole {
				src = fragment(b.text)
			}
			if err := c.check(src, whole); err != nil {
				t.Errorf("%s:%d: %v\n%s", p.path, b.line, err, b.text)
			}
		}
	}
	if found == 0 {
		t.Error("no Go code was found")
	}
	self := "docs/code_test.go"
	if excerpt("var (\n// …\npackage docs", self) == nil || excerpt("package docs\n// …\nvar (\n", self) != nil {
		t.Error("excerpts are not told apart")
	}
	for _, wrong := range []string{
		"pg.AllRedduce(x, torchddp.Sum)", "x := torchddp.DDPOptions{FindUnused: true}", "if {",
	} {
		if c.check(fragment(wrong), false) == nil {
			t.Errorf("%q was taken for Go", wrong)
		}
	}
}

// excerpt tells whether a block stands in a file, part after part, however the lines are broken.
func excerpt(text, file string) error {
	src, err := os.ReadFile(filepath.Join(root, file))
	if err != nil {
		return err
	}
	rest := words(string(src))
	for part := range strings.SplitSeq(text, "// …\n") {
		_, after, ok := strings.Cut(rest, words(part))
		if !ok {
			return fmt.Errorf("%s does not have\n%s", file, part)
		}
		rest = after
	}
	return nil
}

func words(text string) string { return " " + strings.Join(strings.Fields(text), " ") + " " }

var (
	span   = regexp.MustCompile("`([^`\n]+)`")
	dotted = regexp.MustCompile(`^[A-Za-z_]\w*(\.[A-Z]\w*)+$`)
	first  = regexp.MustCompile(`^[*&]?([a-z]\w*)\.[A-Z]`)
	python = regexp.MustCompile(`(?m)^\| .*? \|`) // the first column of a table, where names are Python's
	owned  = regexp.MustCompile(`(?m)^\t([a-z][\w, ]*?)\s+[*\[a-z]`)
)

// TestNames looks up what pages name between backquotes: torchddp.NewDDP, launch.Env.Rank, pg.Barrier(), and
// expressions such as optim.SGDOptions{LR: 0.1}.
func TestNames(t *testing.T) {
	c := newChecker(t)
	known := map[string]bool{}
	for name := range ours {
		known[name] = true
	}
	for _, m := range owned.FindAllStringSubmatch(variables, -1) {
		for name := range strings.SplitSeq(m[1], ",") {
			known[strings.TrimSpace(name)] = true
		}
	}
	found := map[string]int{}
	for _, p := range pages(t) {
		for _, m := range span.FindAllStringSubmatch(python.ReplaceAllString(p.prose, "|"), -1) {
			name := m[1]
			root := first.FindStringSubmatch(name)
			if root == nil || !known[root[1]] {
				continue
			}
			found[p.path]++
			if err := c.name(name); err != nil {
				t.Errorf("%s: `%s`: %v", p.path, name, err)
			}
		}
	}
	if n := found["docs/migration.md"]; n < 100 {
		t.Errorf("migration.md names %d things, which cannot be: the test does not find them", n)
	}
	for _, wrong := range []string{
		"torchddp.NewDPP", "torchddp.DDPOptions.FindUnused", "launch.Env.Rank.Foo", "pg.AllRedduce",
		"optim.SGDOptions{Lr: 1}",
	} {
		if c.name(wrong) == nil {
			t.Errorf("%q was found", wrong)
		}
	}
}

// name looks a name or an expression up.
func (c *checker) name(s string) error {
	pkg, rest, _ := strings.Cut(s, ".")
	if ours[pkg] == "" || !dotted.MatchString(s) {
		if e, err := parser.ParseExpr(s); err == nil {
			if _, call := e.(*ast.CallExpr); !call {
				s = "_ = " + s
			}
		}
		return c.check(fragment(s), false)
	}
	p, err := c.imp.Import(ours[pkg])
	if err != nil {
		return err
	}
	names := strings.Split(rest, ".")
	obj := p.Scope().Lookup(names[0])
	for _, n := range names[1:] {
		if obj == nil {
			break
		}
		obj, _, _ = types.LookupFieldOrMethod(types.NewPointer(obj.Type()), true, p, n)
	}
	if obj == nil || !obj.Exported() {
		return fmt.Errorf("there is no such name")
	}
	return nil
}

// TestExamples holds every library package to a runnable example and a comment.
func TestExamples(t *testing.T) {
	cmd := exec.Command("go", "list", "-f",
		"{{.ImportPath}}\t{{.Name}}\t{{.Dir}}\t{{.Doc}}\t{{len .GoFiles}}", "./...")
	cmd.Dir = root
	list, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	example := regexp.MustCompile(`(?m)^func Example`)
	found := 0
	for line := range strings.Lines(string(list)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		name := strings.TrimPrefix(f[0], module)
		if f[4] == "0" { // tests alone
			continue
		}
		if f[3] == "" {
			t.Errorf("%s has no package comment", name)
		}
		if f[1] == "main" || strings.Contains(f[0], "/internal/") || name == "csrc" { // csrc is not for users
			continue
		}
		found++
		files, err := filepath.Glob(filepath.Join(f[2], "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		has := slices.ContainsFunc(files, func(file string) bool {
			src, err := os.ReadFile(file)
			return err == nil && example.Match(src)
		})
		if !has {
			t.Errorf("%s has no example", name)
		}
	}
	if found < 15 {
		t.Errorf("found %d packages, which cannot be all", found)
	}
}
