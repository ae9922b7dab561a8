package libtorch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/goddp/goddp/csrc"
)

// buildFormat is part of every key: raise it when set-up makes something else of the same inputs.
const buildFormat = "1"

// Our own C++ and gotch's are compiled alike but for the optimiser: gotch's wrapper only passes calls on, and -O2
// would take it two minutes.
var (
	commonFlags = []string{"-std=c++17", "-g0", "-fPIC", "-DUSE_C10D_GLOO"}
	tdpFlags    = []string{"-O2", "-Wall", "-I."}
	cudaFlags   = []string{"-DTDP_CUDA"} // for the files that mention it
	gotchFlags  = []string{"-O1", "-w", "-I."}
)

// compiler names the compiler in keys: objects of another one are not mixed in.
func (s *setup) compiler(ctx context.Context) (string, error) {
	out, err := program{}.output(ctx, append(s.cfg.Compiler(), "--version")...)
	if err != nil {
		return "", fmt.Errorf("no C++ compiler: `apt-get install g++`, or set %s to one: %w", EnvCXX, err)
	}
	line, _, _ := strings.Cut(out, "\n")
	return strings.Join(s.cfg.Compiler(), " ") + ": " + line, nil
}

// Compiler is the C++ compiler's command: a program, or as in "ccache g++" one with arguments.
func (c Config) Compiler() []string {
	cxx := cmp.Or(c.CXX, "g++")
	if _, err := exec.LookPath(cxx); err != nil {
		if words := strings.Fields(cxx); len(words) > 1 {
			return words
		}
	}
	return []string{cxx}
}

// key hashes parts, each set off from the next.
func key(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d %s\n", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// unit is one C++ file to compile.
type unit struct {
	dir, file string // compiled as "file" in dir, so that messages hold no path of this machine
	flags     []string
	object    string // where the object file lies, named by all that goes in
}

// units lists the .cpp files in a folder, biggest first: it takes longest.
func (s *setup) units(dir string, t Tree, compiler string, flags []string, define func(text string) []string) ([]unit, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.cpp"))
	if err != nil {
		return nil, err
	}
	headers, err := headersKey(dir)
	if err != nil {
		return nil, err
	}
	var list []unit
	for _, path := range names {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		u := unit{dir: dir, file: filepath.Base(path), flags: slices.Concat(flags, define(string(text)))}
		name := key(buildFormat, compiler, t.id, strings.Join(u.flags, "\x00"), headers, u.file, string(text))
		for _, d := range t.Include() { // where they lie does not matter, what they are is in t.id
			u.flags = append(u.flags, "-isystem", d)
		}
		u.object = filepath.Join(s.cfg.Cache, "obj", name[:2], name+".o")
		list = append(list, u)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s holds no C++ sources", dir)
	}
	return list, nil
}

// headersKey hashes all headers below a folder: whichever of them changes, all files are compiled again.
func headersKey(dir string) (string, error) {
	var parts []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".h" {
			return err
		}
		text, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		parts = append(parts, rel, string(text))
		return err
	})
	return key(parts...), err
}

// compile makes the object files that are missing, several at a time. Each failure brings all that the compiler said.
func (s *setup) compile(ctx context.Context, what string, units []unit) error {
	var todo []unit
	now := time.Now()
	for _, u := range units {
		if info, err := os.Stat(u.object); err == nil && info.Size() > 0 {
			os.Chtimes(u.object, now, now) // in use: prune leaves it
			continue
		}
		todo = append(todo, u)
	}
	if len(todo) == 0 {
		return nil
	}
	s.ui.say("compiling %s: %d C++ files, %d at a time; what does not change is compiled once a machine", what, len(todo), cap(s.slots))
	size := func(u unit) int64 { info, _ := os.Stat(filepath.Join(u.dir, u.file)); return info.Size() }
	slices.SortStableFunc(todo, func(a, b unit) int { return cmp.Compare(size(b), size(a)) })

	var (
		mu    sync.Mutex
		errs  []error
		done  int
		total = len(todo)
		start = time.Now()
		group sync.WaitGroup
	)
	over := func() bool { return len(todo) == 0 || len(errs) > 0 }
	for range min(cap(s.slots), len(todo)) {
		group.Go(func() {
			for {
				mu.Lock()
				if over() {
					mu.Unlock()
					return
				}
				mu.Unlock()
				select {
				case s.slots <- struct{}{}:
				case <-ctx.Done():
					return
				}
				mu.Lock()
				if over() { // meanwhile
					mu.Unlock()
					<-s.slots
					return
				}
				u := todo[0]
				todo = todo[1:]
				mu.Unlock()
				began := time.Now()
				said, err := s.compileOne(ctx, u)
				<-s.slots
				mu.Lock()
				if err != nil {
					errs = append(errs, err)
				} else {
					done++
					s.ui.say("%s [%d/%d] %s, %.0f s", what, done, total, u.file, time.Since(began).Seconds())
					if said = strings.TrimSpace(said); said != "" {
						s.ui.say("%s", said)
					}
				}
				mu.Unlock()
			}
		})
	}
	all := make(chan struct{})
	go func() { group.Wait(); close(all) }()
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for waiting := true; waiting; {
		select {
		case <-all:
			waiting = false
		case <-ticker.C:
			mu.Lock()
			s.ui.move("compiling %s: %d of %d files, %.0f s", what, done, total, time.Since(start).Seconds())
			mu.Unlock()
		}
	}
	s.ui.still()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.Join(errs...)
}

func (s *setup) compileOne(ctx context.Context, u unit) (said string, err error) {
	if err := os.MkdirAll(filepath.Dir(u.object), 0o755); err != nil {
		return "", err
	}
	tmp := u.object + tmpMark + strconv.Itoa(os.Getpid())
	defer os.Remove(tmp)
	argv := slices.Concat(s.cfg.Compiler(), u.flags, []string{"-c", u.file, "-o", tmp})
	said, err = program{dir: u.dir}.all(ctx, argv...)
	if err != nil {
		if text := printed(err); strings.Contains(text, "Killed signal") || strings.Contains(text, "out of memory") {
			return "", fmt.Errorf("compiling %s: the compiler ran out of memory: it takes about 2 GB: %w", u.file, err)
		}
		return "", fmt.Errorf("compiling %s: %w", u.file, err)
	}
	f, err := os.Open(tmp)
	if err != nil {
		return "", err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return "", err
	}
	return said, os.Rename(tmp, u.object)
}

// compilers is how many compilers run at a time: as many as Go uses cores, and as fit in the free memory.
func compilers() int {
	const each = 2 << 30 // the biggest file takes 1.9 GB
	n := runtime.GOMAXPROCS(0)
	if free, ok := freeMemory("/proc/meminfo", "/sys/fs/cgroup"); ok {
		n = min(n, int(free/each))
	}
	return max(n, 1)
}

// freeMemory is what the machine, and the container if there is one, still gives.
func freeMemory(meminfo, cgroup string) (bytes int64, ok bool) {
	text, err := os.ReadFile(meminfo)
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, is := strings.CutPrefix(line, "MemAvailable:"); is {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			bytes, ok = kb<<10, err == nil
		}
	}
	number := func(name string) (int64, bool) {
		text, err := os.ReadFile(filepath.Join(cgroup, name))
		n, perr := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64) // "max" is no number
		return n, err == nil && perr == nil
	}
	if limit, limited := number("memory.max"); limited {
		used, _ := number("memory.current")
		bytes = min(bytes, max(limit-used, 0))
	}
	return bytes, ok
}

// archive packs object files into a static library.
func (s *setup) archive(ctx context.Context, path string, units []unit) error {
	argv := []string{"ar", "rcsD", path}
	for _, u := range units {
		argv = append(argv, u.object)
	}
	_, err := program{}.all(ctx, argv...)
	return err
}

// torchFlags are the linker flags that libtorch needs.
func (s *setup) torchFlags(t Tree) []string {
	flags := []string{"-L" + t.Lib(), "-Wl,--push-state,--as-needed", "-ltorch_cpu", "-lc10", "-Wl,--pop-state"}
	if s.flavor == CUDA {
		// Nothing calls into them: they register their kernels and the NCCL group when they are loaded.
		flags = append(flags, "-Wl,--push-state,--no-as-needed", "-ltorch_cuda", "-lc10_cuda", "-Wl,--pop-state")
		for _, d := range t.LibDirs {
			flags = append(flags, "-Wl,-rpath-link,"+d)
		}
	}
	// First the cache, so that a program runs where it was built; then a lib folder beside the program, to be shipped
	// with it.
	return append(flags, "-lstdc++", "-lm", "-Wl,-rpath,"+t.Lib(), "-Wl,-rpath,$ORIGIN/lib")
}

// gotch prepares gotch and compiles its C++. The result is a module (gotch/) and a library (lib/libtch.a).
func (s *setup) gotch(ctx context.Context, t Tree, compiler string) (dir string, err error) {
	source := s.cfg.seams.gotch
	flags := slices.Concat(commonFlags, gotchFlags, source.flags())
	dir = filepath.Join(s.cfg.Cache, "gotch",
		key(buildFormat, gotchVersion, gotchSum, source.version(), compiler, t.id, t.Torch, string(s.flavor), strings.Join(flags, "\x00")))
	return dir, s.ensure(ctx, dir, "gotch", "gotch", func(ctx context.Context, tmp string) (content, error) {
		s.ui.say("preparing gotch %s for libtorch %s", gotchVersion, t.Version)
		cpp, err := s.scratch()
		if err != nil {
			return content{}, err
		}
		defer os.RemoveAll(cpp)
		module, lib := filepath.Join(tmp, "gotch"), filepath.Join(dir, "lib")
		ldflags := slices.Concat([]string{"-L" + lib, "-ltch"}, s.torchFlags(t))
		if err := source.prepare(ctx, t, module, cpp, ldflags); err != nil {
			return content{}, fmt.Errorf("prepare gotch: %w", err)
		}
		if err := importLink(module); err != nil {
			return content{}, fmt.Errorf("prepare gotch: %w", err)
		}
		units, err := s.units(cpp, t, compiler, flags, func(string) []string { return nil })
		if err == nil {
			err = s.compile(ctx, "gotch", units)
		}
		if err == nil {
			err = os.Mkdir(filepath.Join(tmp, "lib"), 0o755)
		}
		if err == nil {
			err = s.archive(ctx, filepath.Join(tmp, "lib", "libtch.a"), units)
		}
		return content{}, err
	})
}

// linkModule is the module that holds the linker flags of our own library.
const linkModule = "goddp.local/link"

// importLink makes the prepared gotch import the link module.
func importLink(module string) error {
	f, err := os.OpenFile(filepath.Join(module, "go.mod"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "\nrequire %s v0.0.0\n", linkModule)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(module, "goddp_link.go"), []byte(`// Code generated by goddp setup. DO NOT EDIT.

package gotch

import _ "`+linkModule+`" // the linker flags of goddp's C++
`), 0o644)
}

// tdp compiles our own C++. The result is a library beside the module that links it.
func (s *setup) tdp(ctx context.Context, t Tree, compiler string) (dir string, err error) {
	sources, err := csrc.KeyOf(s.cfg.Sources)
	if err != nil {
		return "", err
	}
	flags := slices.Concat(commonFlags, tdpFlags)
	dir = filepath.Join(s.cfg.Cache, "tdp",
		key(buildFormat, sources, compiler, t.id, t.Torch, string(s.flavor), strings.Join(slices.Concat(flags, cudaFlags), "\x00")))
	return dir, s.ensure(ctx, dir, "tdp", "goddp's C++", func(ctx context.Context, tmp string) (content, error) {
		src, err := s.scratch()
		if err != nil {
			return content{}, err
		}
		defer os.RemoveAll(src)
		if err := writeSources(src, s.cfg.Sources); err != nil {
			return content{}, err
		}
		forCUDA := slices.Clone(cudaFlags)
		for _, d := range t.Includes {
			forCUDA = append(forCUDA, "-isystem", d)
		}
		units, err := s.units(filepath.Join(src, "tdp"), t, compiler, flags, func(text string) []string {
			// Only where it is used: it changes with every file, and would have all of them compiled again.
			var more []string
			if strings.Contains(text, "TDP_SOURCE_KEY") {
				more = append(more, `-DTDP_SOURCE_KEY="`+sources+`"`)
			}
			// The others' object files serve both flavours.
			if s.flavor == CUDA && strings.Contains(text, "TDP_CUDA") {
				more = append(more, forCUDA...)
			}
			return more
		})
		if err == nil {
			err = s.compile(ctx, "goddp", units)
		}
		if err == nil {
			err = s.archive(ctx, filepath.Join(tmp, "libtdp.a"), units)
		}
		if err == nil {
			ldflags := slices.Concat([]string{"-L" + dir, "-ltdp"}, s.torchFlags(t))
			err = writeLink(tmp, quoteAll(ldflags))
		}
		return content{}, err
	})
}

func writeLink(dir string, ldflags []string) error {
	err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module "+linkModule+"\n\ngo 1.24\n"), 0o644)
	return errors.Join(err, os.WriteFile(filepath.Join(dir, "link.go"), []byte(`// Code generated by goddp setup. DO NOT EDIT.

// Package link holds the linker flags of goddp's C++ and of libtorch.
package link

// #cgo LDFLAGS: `+strings.Join(ldflags, " ")+`
import "C"
`), 0o644))
}

// quoteAll quotes flags for a #cgo line.
func quoteAll(flags []string) []string {
	out := make([]string, len(flags))
	for i, f := range flags {
		if strings.Contains(f, " ") {
			f = `"` + f + `"`
		}
		out[i] = f
	}
	return out
}

// writeSources copies the C++ sources out of a file system that the compiler cannot read.
func writeSources(dst string, tree fs.FS) error {
	return fs.WalkDir(tree, "tdp", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !csrc.IsSource(name) {
			return err
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		path := filepath.Join(dst, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.WriteFile(path, text, 0o644)
	})
}

// scratch is a folder for sources that the compiler reads. Killed runs leave it behind; prune removes it.
func (s *setup) scratch() (string, error) {
	dir := filepath.Join(s.cfg.Cache, "obj")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return os.MkdirTemp(dir, "src"+tmpMark)
}

// prune removes what nobody will use: object files not used for a month, and what killed runs left. It needs
// the locks "gotch" and "tdp".
func (s *setup) prune() {
	dir := filepath.Join(s.cfg.Cache, "obj")
	list, _ := filepath.Glob(filepath.Join(dir, "src"+tmpMark+"*"))
	for _, d := range list {
		os.RemoveAll(d)
	}
	for _, sub := range []string{"gotch", "tdp"} {
		list, _ = filepath.Glob(filepath.Join(s.cfg.Cache, sub, ".*"+tmpMark+"*"))
		for _, d := range list {
			os.RemoveAll(d)
		}
	}
	list, _ = filepath.Glob(filepath.Join(dir, "*", "*"))
	for _, f := range list {
		if info, err := os.Stat(f); err == nil && (strings.Contains(f, tmpMark) || time.Since(info.ModTime()) > 30*24*time.Hour) {
			os.Remove(f)
		}
	}
}
