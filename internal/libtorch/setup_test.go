package libtorch

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"
)

func exist(t testing.TB, path string) bool {
	ok, err := exists(path)
	require.NoError(t, err)
	return ok
}

func TestSetupFromNothing(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	_, err := Find(t.Context(), cfg)
	require.ErrorIs(t, err, ErrNotSetUp)
	entries, err := os.ReadDir(cfg.Cache)
	require.NoError(t, err)
	require.Empty(t, entries, "Find made something")

	var said bytes.Buffer
	cfg.Out = &said
	in, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.True(t, in.Worked)
	require.Equal(t, CPU, in.Flavor)
	require.Equal(t, []string{"g++:a.cpp", "g++:b.cpp", "g++:key.cpp", "g++:torch_api.cpp", "pip:nvidia-cuda-runtime", "pip:torch"}, w.calls(t))
	for _, line := range []string{"fetching torch 2.11.0", "unpacking", "preparing gotch", "goddp [3/3]", "gotch [1/1]", "no GPU in this test"} {
		require.Contains(t, said.String(), line)
	}

	torch := in.Tree.Torch
	for name, want := range map[string]bool{
		"lib/libtorch_cpu.so": true, "include/ATen/ATen.h": true, "version.py": true, "../nvidia/cu13/lib/libcudart.so.13": true,
		"lib/libtorch_cuda.so": false, "lib/libtorch_python.so": false, "nn/functional.py": false, "../nvidia/cu13/include/cuda.h": false,
	} {
		require.Equal(t, want, exist(t, filepath.Join(torch, name)), name)
	}
	left, err := filepath.Glob(filepath.Join(cfg.Cache, "downloads", "*"))
	require.NoError(t, err)
	require.Empty(t, left, "wheels are of no use once the tree is there")
	for _, f := range []string{"libtdp.a", "go.mod", "link.go"} {
		require.True(t, exist(t, filepath.Join(in.Link, f)), f)
	}
	link, err := os.ReadFile(filepath.Join(in.Link, "link.go"))
	require.NoError(t, err)
	require.Contains(t, string(link), "-L"+in.Link+" -ltdp -L"+torch+"/lib")
	require.Contains(t, string(link), "-Wl,-rpath,$ORIGIN/lib")
	require.NotContains(t, string(link), "torch_cuda")
	root, err := os.ReadFile(filepath.Join(in.Gotch, "goddp_link.go"))
	require.NoError(t, err)
	require.Contains(t, string(root), linkModule)

	// Again: nothing is done, and quickly.
	said.Reset()
	cfg.Quiet = true
	again, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.False(t, again.Worked)
	require.Empty(t, w.calls(t))
	require.Empty(t, said.String())
	require.Less(t, again.Took, 5*time.Second) // 0.1 s; what else runs here must not fail the test
	again.Worked, again.Took = in.Worked, in.Took
	require.Equal(t, in, again)
}

func TestCUDAFlavor(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	_, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	w.calls(t)
	cfg.seams.gpu = func() (bool, string) { return true, "a GPU in this test" }
	in, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, CUDA, in.Flavor)
	require.True(t, exist(t, filepath.Join(in.Tree.Torch, "lib", "libtorch_cuda.so")))
	require.True(t, exist(t, filepath.Join(in.Tree.Torch, "..", "nvidia", "cu13", "include", "cuda.h")))
	link, err := os.ReadFile(filepath.Join(in.Link, "link.go"))
	require.NoError(t, err)
	require.Contains(t, string(link), "-Wl,--push-state,--no-as-needed -ltorch_cuda -lc10_cuda")
	require.NotContains(t, w.calls(t), "g++:a.cpp", "what does not mention CUDA is the same for both flavours")
	object, err := exec.Command("ar", "p", filepath.Join(in.Link, "libtdp.a")).Output()
	require.NoError(t, err)
	require.Contains(t, string(object), "-DTDP_CUDA -isystem "+in.Tree.Includes[0])
}

func TestKeys(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	first, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	w.calls(t)

	sources := fakeSources()
	sources["tdp/a.cpp"] = &fstest.MapFile{Data: []byte("another a")}
	cfg.Sources = sources
	second, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"g++:a.cpp", "g++:key.cpp"}, w.calls(t), "only what changed, and what holds the key, is compiled")
	require.NotEqual(t, first.Link, second.Link)
	require.Equal(t, first.Gotch, second.Gotch, "a change of our C++ must not recompile gotch's cgo")

	sources["tdp/tdp.h"] = &fstest.MapFile{Data: []byte("another header")}
	third, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, []string{"g++:a.cpp", "g++:b.cpp", "g++:key.cpp"}, w.calls(t))
	require.NotEqual(t, second.Link, third.Link)

	cfg.Sources = fakeSources()
	back, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, first.Link, back.Link)
	require.Empty(t, w.calls(t), "the former state is still there")

	w.steer(t, "compiler-version", "+1")
	other, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Len(t, w.calls(t), 4, "another compiler's objects are not mixed in")
	require.NotEqual(t, first.Gotch, other.Gotch)
}

func TestDamagedTree(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	in, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	lib := filepath.Join(in.Tree.Torch, "lib", "libtorch_cpu.so")
	good, err := os.ReadFile(lib)
	require.NoError(t, err)
	var said bytes.Buffer
	cfg.Out = &said
	for name, damage := range map[string]func(){
		"shortened": func() { require.NoError(t, os.Truncate(lib, 10)) },
		"removed":   func() { require.NoError(t, os.Remove(lib)) },
		"no manifest": func() {
			require.NoError(t, os.Remove(filepath.Join(in.Tree.Torch, "..", manifestName)))
		},
		"flipped": func() {
			cfg.Verify = true
			bad := bytes.Clone(good)
			bad[1000] ^= 1
			require.NoError(t, os.WriteFile(lib, bad, 0o644))
		},
		"library": func() { require.NoError(t, os.Truncate(filepath.Join(in.Link, "libtdp.a"), 1)) },
	} {
		damage()
		said.Reset()
		_, err := Find(t.Context(), cfg)
		require.ErrorIs(t, err, ErrNotSetUp, name)
		again, err := Setup(t.Context(), cfg)
		require.NoError(t, err, name)
		require.True(t, again.Worked, name)
		require.Contains(t, said.String(), "is not whole", name)
		text, err := os.ReadFile(lib)
		require.NoError(t, err)
		require.Equal(t, good, text, name)
		cfg.Verify = false
	}
}

func TestDownloadIsCheckedAndKept(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	var said bytes.Buffer
	cfg.Out = &said

	// A pip that lets damaged content through: three tries, an error with what to do, and nothing that looks whole.
	w.steer(t, "corrupt", "1")
	_, err := Setup(t.Context(), cfg)
	require.ErrorIs(t, err, errWheelContent)
	require.ErrorContains(t, err, "set LIBTORCH to an existing libtorch")
	require.Equal(t, []string{"pip:torch", "pip:torch", "pip:torch"}, w.calls(t))
	require.NoDirExists(t, filepath.Join(cfg.Cache, "libtorch", "2.11.0-cpu"))
	w.steer(t, "corrupt", "")

	// The second wheel is not to be had: the first one stays.
	second := filepath.Join(w.dir, "index", w.wheels[1].file)
	require.NoError(t, os.Rename(second, second+".away"))
	_, err = Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "No matching distribution")
	require.ErrorContains(t, err, "pip config list")
	require.Equal(t, []string{"pip:nvidia-cuda-runtime", "pip:torch"}, w.calls(t))
	require.NoError(t, os.Rename(second+".away", second))

	// It is used again, unless it was damaged meanwhile.
	torch := filepath.Join(cfg.Cache, "downloads", w.wheels[0].file)
	text, err := os.ReadFile(torch)
	require.NoError(t, err)
	text[len(text)/2] ^= 1
	require.NoError(t, os.WriteFile(torch, text, 0o644))
	said.Reset()
	_, err = Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Contains(t, said.String(), torch+" is damaged")
	require.Subset(t, w.calls(t), []string{"pip:nvidia-cuda-runtime", "pip:torch"})
}

func TestDownloadedWheelIsNotFetchedAgain(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	require.NoError(t, os.CopyFS(filepath.Join(cfg.Cache, "downloads"), os.DirFS(filepath.Join(w.dir, "index"))))
	_, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	for _, c := range w.calls(t) {
		require.NotContains(t, c, "pip:")
	}
}

func TestWheelsRecord(t *testing.T) {
	for name, twist := range map[string]func(map[string]string){
		"in place of":       func(r map[string]string) { r["torch/lib/libc10.so"] = r["torch/lib/libtorch_cpu.so"] },
		"not in its RECORD": func(r map[string]string) { delete(r, "torch/lib/libc10.so") },
	} {
		w := newWorld(t)
		w.addWheel(t, "torch", fakeTorch(), twist)
		_, err := Setup(t.Context(), w.config())
		require.ErrorContains(t, err, "torch/lib/libc10.so")
		require.ErrorContains(t, err, name)
		require.NoDirExists(t, filepath.Join(w.dir, "cache", "libtorch", "2.11.0-cpu"))
	}
	w := newWorld(t)
	w.addWheel(t, "nvidia-cuda-runtime", map[string]string{"nvidia/x/lib/../../../../../libcudart.so.13": "evil"}, nil)
	_, err := Setup(t.Context(), w.config())
	require.ErrorContains(t, err, "a path outside of itself")
	require.NoFileExists(t, filepath.Join(w.dir, "libcudart.so.13"))
}

func TestPipFailures(t *testing.T) {
	for _, c := range []struct{ steer, value, want string }{
		{"no-pip", "1", "apt-get install python3-pip python3-venv"},
		{"pip-says", "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk full: make room in"},
		{"pip-says", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "a mirror that repackages?"},
	} {
		w := newWorld(t)
		w.steer(t, c.steer, c.value)
		_, err := Setup(t.Context(), w.config())
		require.ErrorContains(t, err, c.want)
	}
	w := newWorld(t)
	cfg := w.config()
	cfg.seams.python = "python-that-is-not-there"
	_, err := Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "python3 is not installed")
	cfg = w.config()
	cfg.CXX = "g++-that-is-not-there"
	_, err = Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "apt-get install g++")
	require.Empty(t, w.calls(t), "the compiler is looked for before anything is downloaded")
}

func TestDiskFull(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	cfg.seams.free = func(string) (int64, error) { return 100e6, nil }
	_, err := Setup(t.Context(), cfg)
	require.ErrorIs(t, err, ErrDiskFull)
	require.ErrorContains(t, err, "0.1 GB are free there: make room, or set GODDP_CACHE")
	require.Empty(t, w.calls(t), "known before the download")

	s := newSetup(cfg)
	err = s.explain(&fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC})
	require.ErrorIs(t, err, ErrDiskFull)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.ErrorContains(t, err, cfg.Cache)
	require.NoError(t, s.explain(nil))
	other := errors.New("other")
	require.Equal(t, other, s.explain(other))
}

func TestCompileErrorIsWhole(t *testing.T) {
	w := newWorld(t)
	w.steer(t, "bad-source", "b.cpp")
	_, err := Setup(t.Context(), w.config())
	require.ErrorContains(t, err, "compiling b.cpp")
	require.ErrorContains(t, err, "b.cpp:1: error: first line\nsecond line\n")
	require.ErrorContains(t, err, "last line")
	require.Equal(t, 1000, strings.Count(err.Error(), "note\n"))
	w.steer(t, "bad-source", "")
	w.calls(t)
	_, err = Setup(t.Context(), w.config())
	require.NoError(t, err)
	require.NotContains(t, w.calls(t), "pip:torch", "what was done before the error stays")
}

// startChild starts a set-up of the world as a process.
func (w *world) startChild(t testing.TB) (*exec.Cmd, *bytes.Buffer) {
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "LIBTORCH_TEST_WORLD="+w.dir)
	var out bytes.Buffer
	cmd.Stderr = &out
	require.NoError(t, cmd.Start())
	return cmd, &out
}

// Whenever a set-up is killed, what has its name is whole, and the next one gets further.
func TestKilled(t *testing.T) {
	w := newWorld(t)
	w.steer(t, "slow", "15ms")
	cache := filepath.Join(w.dir, "cache")
	kills, finished := 0, false
	for delay := 4 * time.Millisecond; !finished; delay += 7 * time.Millisecond {
		require.Less(t, delay, 20*time.Second)
		cmd, out := w.startChild(t)
		timer := time.AfterFunc(delay, func() { cmd.Process.Kill() })
		err := cmd.Wait()
		timer.Stop()
		if finished = err == nil; finished {
			break
		}
		require.True(t, cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled(), "it failed by itself:\n%s", out)
		kills++
		for _, pattern := range []string{"libtorch/*", "gotch/*", "tdp/*"} {
			dirs, err := filepath.Glob(filepath.Join(cache, pattern))
			require.NoError(t, err)
			for _, d := range dirs {
				if !strings.HasPrefix(filepath.Base(d), ".") {
					require.NoError(t, whole(t.Context(), d, true), d)
				}
			}
		}
		if delay > 200*time.Millisecond { // it is known to work at each stage; now let it end
			delay *= 2
		}
	}
	require.Greater(t, kills, 3)
	t.Logf("killed %d times", kills)
	cfg := w.config()
	cfg.Verify = true
	in, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.False(t, in.Worked)
	require.NoError(t, os.Remove(filepath.Join(in.Link, "go.mod"))) // the next set-up that works tidies up
	_, err = Setup(t.Context(), cfg)
	require.NoError(t, err)
	for _, dir := range []string{"libtorch", "gotch", "tdp", "downloads", "obj"} {
		left, err := filepath.Glob(filepath.Join(cache, dir, "*"+tmpMark+"*"))
		require.NoError(t, err)
		hidden, err := filepath.Glob(filepath.Join(cache, dir, ".*"+tmpMark+"*"))
		require.NoError(t, err)
		require.Empty(t, append(left, hidden...), "left behind")
	}
}

func TestInterrupted(t *testing.T) {
	w := newWorld(t)
	w.steer(t, "slow", "20s")
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the user")
	time.AfterFunc(100*time.Millisecond, func() { cancel(why) })
	start := time.Now()
	_, err := Setup(ctx, w.config())
	require.ErrorIs(t, err, why)
	require.Less(t, time.Since(start), 5*time.Second)
}

// Several projects set up at a time: each thing is made once, and all end with it.
func TestSeveralAtATime(t *testing.T) {
	w := newWorld(t)
	w.steer(t, "slow", "50ms")
	var group sync.WaitGroup
	outs := make([]*bytes.Buffer, 4)
	for i := range outs {
		cmd, out := w.startChild(t)
		outs[i] = out
		group.Go(func() {
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	group.Wait()
	require.Equal(t, []string{"g++:a.cpp", "g++:b.cpp", "g++:key.cpp", "g++:torch_api.cpp", "pip:nvidia-cuda-runtime", "pip:torch"}, w.calls(t))
	waited := 0
	for _, out := range outs {
		waited += strings.Count(out.String(), "waiting for another set-up (process ")
	}
	require.Positive(t, waited)
}

func TestPrune(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	_, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	objects, err := filepath.Glob(filepath.Join(cfg.Cache, "obj", "*", "*.o"))
	require.NoError(t, err)
	require.Len(t, objects, 4)
	old := time.Now().Add(-31 * 24 * time.Hour)
	require.NoError(t, os.Chtimes(objects[0], old, old))
	killed := objects[1] + tmpMark + "1"
	require.NoError(t, os.WriteFile(killed, nil, 0o644))
	cfg, err = cfg.resolve()
	require.NoError(t, err)
	newSetup(cfg).prune()
	require.NoFileExists(t, objects[0])
	require.NoFileExists(t, killed)
	require.FileExists(t, objects[1])
}

func TestExistingLibtorch(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(t.TempDir(), "own")
	write := func(name, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	cfg := w.config()
	cfg.Libtorch = dir
	_, err := Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "holds no lib/libtorch_cpu.so")

	for name, text := range fakeTorch() {
		if !strings.Contains(name, "cuda") {
			write(name, text)
		}
	}
	in, err := Setup(t.Context(), cfg) // the folder above torch, as site-packages is, does as well
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "torch"), in.Tree.Torch)
	require.NotContains(t, w.calls(t), "pip:torch")
	cfg.Libtorch = filepath.Join(dir, "torch")
	again, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.False(t, again.Worked)

	cfg.Flavor = CUDA
	_, err = Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "built without CUDA")
	cfg.Flavor = CPU

	version := "torch/include/torch/headeronly/version.h"
	write(version, "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 15\n#define TORCH_VERSION_PATCH 1\n")
	_, err = Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "is libtorch 2.15.1, and this goddp is made for 2.11.0")
	require.ErrorContains(t, err, EnvAnyVersion+"=1")
	cfg.AnyVersion = true
	other, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, "2.15.1", other.Tree.Version)
	require.NotEqual(t, in.Gotch, other.Gotch)

	write(version, "nothing")
	_, err = Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "do not tell its version")
	write(version, "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n#define TORCH_VERSION_PATCH 0\n")
	require.NoError(t, os.Remove(filepath.Join(dir, "torch/include/torch/csrc/distributed/c10d/reducer.hpp")))
	_, err = Setup(t.Context(), cfg)
	require.ErrorContains(t, err, "reducer.hpp is missing: not a whole libtorch")
}

func TestCompilerWithArguments(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	cfg.CXX = "env " + cfg.CXX
	_, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	require.Contains(t, w.calls(t), "g++:a.cpp")
}

func TestPathsInFlags(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	cfg.Cache = filepath.Join(w.dir, "a,b")
	_, err := Setup(t.Context(), cfg)
	require.ErrorContains(t, err, `holds ","`)
	cfg.Cache = filepath.Join(w.dir, "größe und platz")
	in, err := Setup(t.Context(), cfg)
	require.NoError(t, err)
	link, err := os.ReadFile(filepath.Join(in.Link, "link.go"))
	require.NoError(t, err)
	require.Contains(t, string(link), `"-L`+in.Link+`" -ltdp`)
}

func TestSetupPython(t *testing.T) {
	w := newWorld(t)
	cfg := w.config()
	python, err := SetupPython(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(cfg.Cache, "python", Version, "bin", "python"), python)
	script, err := os.ReadFile(filepath.Join(filepath.Dir(python), "torchrun"))
	require.NoError(t, err)
	require.Equal(t, "#!"+python+"\n", string(script), "scripts name the interpreter where it ends up")
	site := filepath.Join(filepath.Dir(filepath.Dir(python)), "lib", "python3", "site-packages")
	packages, err := os.ReadFile(filepath.Join(site, "torch.py"))
	require.NoError(t, err)
	require.Contains(t, string(packages), "torch==2.11.0 torchvision==0.26.0 numpy")

	changed := func() time.Time {
		info, err := os.Stat(filepath.Join(site, "torch.py"))
		require.NoError(t, err)
		return info.ModTime()
	}
	before := changed()
	require.NoError(t, os.WriteFile(filepath.Join(site, "__pycache__", "torch.pyc"), []byte("compiled anew"), 0o644))
	_, err = SetupPython(t.Context(), cfg)
	require.NoError(t, err)
	require.Equal(t, before, changed(), "it was there")
	require.NoError(t, os.Remove(filepath.Join(filepath.Dir(python), "torchrun")))
	_, err = SetupPython(t.Context(), cfg)
	require.NoError(t, err)
	require.NotEqual(t, before, changed(), "it was not whole")

	before = changed()
	require.NoError(t, os.Remove(filepath.Join(site, "tensorboard-2.21.0.dist-info")))
	_, err = SetupPython(t.Context(), cfg)
	require.NoError(t, err)
	require.NotEqual(t, before, changed(), "it was made before that package was on the list")
	require.DirExists(t, filepath.Join(site, "tensorboard-2.21.0.dist-info"))
}
