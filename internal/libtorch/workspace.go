package libtorch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ErrNoModule: there is no go.mod in the folder or above it.
var ErrNoModule = errors.New("no go.mod here or above")

// FindModule is the folder of the nearest go.mod, from dir upwards.
func FindModule(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		if ok, err := exists(filepath.Join(d, "go.mod")); err != nil {
			return "", err
		} else if ok {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("%s: %w", dir, ErrNoModule)
		}
	}
}

// replacements are what a workspace needs to build with this installation.
func (in *Installation) replacements() []replacement {
	return []replacement{{gotchModule, in.Gotch}, {linkModule, in.Link}}
}

type replacement struct{ module, dir string }

// Workspace is the state of a go.work file after WriteWorkspace.
type Workspace struct {
	File    string
	Changed bool
	Ours    bool   // set-up wrote it
	Warning string // what the user should know
}

// WriteWorkspace makes the Go module in a folder build with this installation, through its go.work: a new one beside
// its go.mod, or the one that is in force already, of which only the two replacements are changed.
func (in *Installation) WriteWorkspace(ctx context.Context, module string) (*Workspace, error) {
	// GOWORK=off is how a clone runs this program before there is a workspace; it has no say in where that goes.
	env := program{dir: module}
	if os.Getenv("GOWORK") == "off" {
		env.env = []string{"GOWORK="}
	}
	out, err := env.output(ctx, "go", "env", "GOWORK", "GOFLAGS", "CGO_ENABLED")
	if err != nil {
		return nil, fmt.Errorf("is Go installed? %w", err)
	}
	said := append(strings.Split(out, "\n"), "", "", "")
	w := &Workspace{File: said[0]}
	switch {
	case strings.Contains(said[1], "-mod=mod"), strings.Contains(said[1], "-modfile"):
		w.Warning = "GOFLAGS holds " + said[1] + ", which Go does not accept together with a go.work file"
	case said[2] == "0":
		w.Warning = "CGO_ENABLED is 0: nothing that uses libtorch builds without cgo"
	}
	if w.File == "" {
		w.File, w.Ours = filepath.Join(module, "go.work"), true
		w.Changed = true
		return w, in.newWorkspace(ctx, w.File, ".", module)
	}
	text, err := program{}.output(ctx, "go", "work", "edit", "-json", w.File)
	if err != nil {
		return nil, fmt.Errorf("the workspace %s is in force here, and it cannot be read: %w", w.File, err)
	}
	var have struct {
		Use     []struct{ DiskPath string }
		Replace []struct {
			Old, New struct{ Path, Version string }
		}
	}
	if err := json.Unmarshal([]byte(text), &have); err != nil {
		return nil, fmt.Errorf("%s: %w", w.File, err)
	}
	used := false
	for _, u := range have.Use {
		d := u.DiskPath
		if !filepath.IsAbs(d) {
			d = filepath.Join(filepath.Dir(w.File), d)
		}
		used = used || sameDir(d, module)
	}
	if !used && w.Warning == "" {
		w.Warning = fmt.Sprintf("the workspace %s is in force here but does not use this module: `go work use %s`", w.File, module)
	}
	edit := []string{"go", "work", "edit"}
	for _, r := range in.replacements() {
		same := false
		for _, h := range have.Replace {
			same = same || h.Old.Path == r.module && h.Old.Version == "" && h.New.Path == r.dir
		}
		if !same {
			edit = append(edit, "-replace="+r.module+"="+r.dir)
		}
	}
	if len(edit) == 3 {
		return w, nil
	}
	w.Changed = true
	// The go command writes in place; a copy and a rename keep a killed run from leaving half a file.
	old, err := os.ReadFile(w.File)
	if err != nil {
		return nil, err
	}
	tmp := w.File + tmpMark + strconv.Itoa(os.Getpid())
	defer os.Remove(tmp)
	if err := os.WriteFile(tmp, old, 0o644); err != nil {
		return nil, err
	}
	if _, err := (program{env: []string{"GOWORK=off"}}).output(ctx, append(edit, tmp)...); err != nil {
		return nil, fmt.Errorf("edit %s: %w", w.File, err)
	}
	return w, os.Rename(tmp, w.File)
}

func sameDir(a, b string) bool {
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(x, y)
}

// newWorkspace writes a workspace for one module, or leaves the file alone when it is like that.
func (in *Installation) newWorkspace(ctx context.Context, file, use, module string) error {
	out, err := (program{env: []string{"GOWORK=off"}}).output(ctx, "go", "mod", "edit", "-json", filepath.Join(module, "go.mod"))
	var mod struct{ Go string }
	if err == nil {
		err = json.Unmarshal([]byte(out), &mod)
	}
	if err != nil {
		return fmt.Errorf("read go.mod: %w", err)
	}
	if mod.Go == "" {
		mod.Go = "1.24"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "// Written by `goddp setup`: where goddp's libraries lie on this machine. Not to be committed.\n\n")
	fmt.Fprintf(&b, "go %s\n\nuse %s\n\nreplace (\n", mod.Go, quotePath(use))
	for _, r := range in.replacements() {
		fmt.Fprintf(&b, "\t%s => %s\n", r.module, quotePath(r.dir))
	}
	b.WriteString(")\n")
	if old, err := os.ReadFile(file); err == nil && string(old) == b.String() {
		return nil
	}
	tmp := file + tmpMark + strconv.Itoa(os.Getpid())
	defer os.Remove(tmp)
	if err := os.WriteFile(tmp, []byte(b.String()), 0o644); err != nil {
		return fmt.Errorf("%w (a folder that cannot be written works with `eval \"$(goddp env)\"`)", err)
	}
	return os.Rename(tmp, file)
}

func quotePath(p string) string {
	if strings.ContainsAny(p, " \"'`") {
		return strconv.Quote(p)
	}
	return p
}

// Environment is what `goddp env` prints: variables with which the Go module in a folder builds without a go.work
// file of its own. The workspace file they name lies in the cache.
func (in *Installation) Environment(ctx context.Context, module string) ([]EnvVar, error) {
	file := filepath.Join(in.Cache, "work", key(module), "go.work")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, err
	}
	if err := in.newWorkspace(ctx, file, module, module); err != nil {
		return nil, err
	}
	return []EnvVar{
		{"GOWORK", file},
		{"GODDP_TORCH", in.Tree.Torch},
	}, nil
}

// EnvVar is one variable of the environment.
type EnvVar struct{ Name, Value string }

// Shell is the line that sets the variable in a POSIX shell.
func (v EnvVar) Shell() string {
	return "export " + v.Name + "='" + strings.ReplaceAll(v.Value, "'", `'\''`) + "'"
}
