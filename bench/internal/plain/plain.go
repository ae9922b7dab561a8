// Package plain is an iteration of DDP in plain C++, with nothing of goddp: what remains of the time of one is libtorch's.
//
// It is a shared library of its own, compiled when it is first wanted, which goddp's side and Python's load. Each compares
// itself with it in its own process, where memory and caches are the same for both.
package plain

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

typedef char *(*goddp_new_fn)(void **, int, int, void **);
typedef char *(*goddp_call_fn)(void *);

static char *goddp_new(void *f, void **params, int n, int norms, void **out) {
	return ((goddp_new_fn)f)(params, n, norms, out);
}
static char *goddp_call(void *f, void *layer) { return ((goddp_call_fn)f)(layer); }
*/
import "C"

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"unsafe"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/csrc"
	"github.com/goddp/goddp/internal/libtorch"
)

//go:embed cpp/layer.cpp
var source []byte

var flags = []string{"-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-DUSE_C10D_GLOO"}

// Compile compiles the library, once for each state of its source, and gives its path. say is told if that takes time.
func Compile(ctx context.Context, say func(format string, a ...any)) (path string, err error) {
	cfg, err := libtorch.FromEnv()
	if err != nil {
		return "", err
	}
	in, err := libtorch.Find(ctx, cfg)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %s %s %s", flags, in.Tree.Torch, csrc.Key(), source))
	path = filepath.Join(in.Cache, "bench", hex.EncodeToString(sum[:8]), "layer.so")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	say("compiling bench/internal/plain/cpp/layer.cpp, once: half a minute")
	tmp, err := os.MkdirTemp("", "goddp-plain-")
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	// Gloo's headers, which the wheel lacks and csrc stands in for.
	headers, err := fs.Sub(csrc.Files(), "tdp")
	if err != nil {
		return "", err
	}
	file, include := filepath.Join(tmp, "layer.cpp"), filepath.Join(tmp, "headers")
	if err := errors.Join(os.WriteFile(file, source, 0o666), os.CopyFS(include, headers),
		os.MkdirAll(filepath.Dir(path), 0o777)); err != nil {
		return "", err
	}
	made := path + "." + strconv.Itoa(os.Getpid())
	argv := slices.Concat(cfg.Compiler(), flags, []string{"-I" + include})
	for _, d := range in.Tree.Include() {
		argv = append(argv, "-isystem", d)
	}
	// It names libtorch and not where it is: the process that loads it has one.
	argv = append(argv, file, "-o", made, "-L"+in.Tree.Lib(), "-ltorch_cpu", "-lc10")
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%s layer.cpp: %w\n%s", argv[0], err, out)
	}
	return path, os.Rename(made, path)
}

// Layer is a model of small parameters, with what reduces their gradients, in a group of one rank.
type Layer struct{ layer, step, free unsafe.Pointer }

// New loads the library at path and makes a model of these parameters and of norms batch norms of one channel, whose
// parameters are among them. The parameters have to outlive it.
func New(path string, params []*ts.Tensor, norms int) (*Layer, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	lib := C.dlopen(name, C.RTLD_NOW|C.RTLD_LOCAL)
	if lib == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	var l Layer
	var create unsafe.Pointer
	for _, s := range []struct {
		name string
		to   *unsafe.Pointer
	}{{"layer_new", &create}, {"layer_step", &l.step}, {"layer_free", &l.free}} {
		name := C.CString(s.name)
		*s.to = C.dlsym(lib, name)
		C.free(unsafe.Pointer(name))
		if *s.to == nil {
			return nil, fmt.Errorf("%s has no %s", path, s.name)
		}
	}
	handles := []unsafe.Pointer{}
	for _, p := range params {
		handles = append(handles, unsafe.Pointer(p.Ctensor()))
	}
	return &l, failure(C.goddp_new(create, unsafe.SliceData(handles), C.int(len(handles)), C.int(norms), &l.layer))
}

// Step makes one iteration.
func (l *Layer) Step() error { return failure(C.goddp_call(l.step, l.layer)) }

// Close frees the model and ends its group.
func (l *Layer) Close() error { return failure(C.goddp_call(l.free, l.layer)) }

func failure(text *C.char) error {
	if text == nil {
		return nil
	}
	defer C.free(unsafe.Pointer(text))
	return errors.New(C.GoString(text))
}
