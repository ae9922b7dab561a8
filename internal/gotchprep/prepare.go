package gotchprep

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
)

// Options says where the parts of the prepared copy go and what they link with.
type Options struct {
	// LDFLAGS is written into libtch/lib.go, so that plain go build, go test and gopls need no environment variable.
	LDFLAGS []string
	// CPPDir receives the C++ sources and headers: every .cpp in it is to be compiled into libtch.a, with CompileFlags
	// and the folder itself on the include path. It is made if it does not exist.
	CPPDir string
	// TorchInclude is libtorch's include folder. When set, the wrappers are held against the schemas in its ATen/ops.
	TorchInclude string
}

// A RuleError says that gotch's text is not what a rule expects.
type RuleError struct {
	Rule, File, Expected, Found string
}

func (e *RuleError) Error() string {
	return fmt.Sprintf("gotchprep: rule %s: %s: expected %s, found %s; these rules know gotch v0.9.1 only", e.Rule, e.File, e.Expected, e.Found)
}

// A rule mends one thing in the whole module. It returns how many places it changed, and fails rather than guess.
type rule struct {
	name  string
	apply func(*module) (int, error)
	want  int // how many places gotch v0.9.1 has; -1: the rule itself checks
}

// module is the copy under work: its files by slash-separated path, and what earlier rules learnt for later ones.
type module struct {
	opts    Options
	files   map[string][]byte
	cpp     map[string][]byte
	proto   map[string]*cfunc // C functions by name
	inplace map[string]string // Go name in libtch -> what it assigns to, see inPlace
	refused map[string]string // C function -> why it must not be called
	outs    map[string]int    // libtch function -> its number of outputs
	counts  map[string]int
}

func (m *module) fail(rule, file, expected, found string, args ...any) error {
	return &RuleError{rule, file, expected, fmt.Sprintf(found, args...)}
}

// edit parses a file, lets fn edit it, and keeps the result.
func (m *module) edit(name string, fn func(*source) error) error {
	text, ok := m.files[name]
	if !ok {
		return m.fail("edit", name, "the file", "nothing")
	}
	s, err := parseSource(name, text)
	if err != nil {
		return err
	}
	if err := fn(s); err != nil {
		return err
	}
	out, err := s.apply()
	if err != nil {
		return err
	}
	m.files[name] = out
	return nil
}

// goFiles lists the Go files below a folder ("" for all), sorted; flat keeps to the folder itself.
func (m *module) goFiles(dir string, flat bool) []string {
	var out []string
	for name := range m.files {
		if strings.HasSuffix(name, ".go") && (dir == "" || strings.HasPrefix(name, dir+"/")) {
			if flat && path.Dir(name) != dir {
				continue
			}
			out = append(out, name)
		}
	}
	sort.Strings(out)
	return out
}

//go:embed *.go files
var self embed.FS

// Version is a hash of the rules: a prepared copy is as good as new while it stays the same.
func Version() string {
	h := sha256.New()
	err := fs.WalkDir(self, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasSuffix(name, "_test.go") {
			return err
		}
		text, err := self.ReadFile(name)
		fmt.Fprintf(h, "%s %d\n", name, len(text))
		h.Write(text)
		return err
	})
	if err != nil {
		panic(err) // the files are in the program
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// CompileFlags are the flags gotch's C++ needs beside -std=c++17, -fPIC, an optimisation level and the include paths.
func CompileFlags() []string { return []string{"-include", "goddp_compat.h"} }

// own is one of our files.
func own(name string) []byte {
	text, err := self.ReadFile("files/" + name)
	if err != nil {
		panic(err)
	}
	return text
}

// Prepare writes a mended copy of the unmodified gotch module in src: the Go module without its C++ into dst, a folder that
// it makes, and the C++ into opts.CPPDir. It changes nothing when a rule fails.
func Prepare(src, dst string, opts Options) error {
	m, err := load(src, opts)
	if err != nil {
		return err
	}
	if err := m.run(rules()); err != nil {
		return err
	}
	if err := write(dst, m.files); err != nil {
		return err
	}
	return write(opts.CPPDir, m.cpp)
}

// load reads the files of the module that the rules may need.
func load(src string, opts Options) (*module, error) {
	m := &module{opts: opts, files: map[string][]byte{}, cpp: map[string][]byte{}, counts: map[string]int{}}
	err := filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if rel == "gen" || rel == "example" {
				return fs.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() {
			return nil
		}
		m.files[rel], err = os.ReadFile(p)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("gotchprep: read gotch: %w", err)
	}
	return m, nil
}

func (m *module) run(rules []rule) error {
	for _, r := range rules {
		n, err := r.apply(m)
		if err != nil {
			return fmt.Errorf("gotchprep: %s: %w", r.name, err)
		}
		if r.want >= 0 && n != r.want {
			return &RuleError{r.name, "the module", fmt.Sprintf("%d places to change", r.want), fmt.Sprint(n)}
		}
		m.counts[r.name] = n
	}
	for _, name := range m.goFiles("", false) {
		text, err := format.Source(m.files[name])
		if err != nil {
			return fmt.Errorf("gotchprep: %s does not parse after the rules: %w", name, err)
		}
		m.files[name] = text
	}
	return nil
}

func write(dir string, files map[string][]byte) error {
	for name, text := range files {
		p := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(p, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
