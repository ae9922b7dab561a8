package libtorch

import (
	"archive/zip"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"
)

// The tests run set-up with a Python, a compiler and wheels of their own: this test program under other names.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "fake-python", "python":
		os.Exit(fakePython(os.Args[1:]))
	case "fake-g++":
		os.Exit(fakeCompiler(os.Args[1:]))
	}
	if world := os.Getenv("LIBTORCH_TEST_WORLD"); world != "" { // a set-up as a process of its own
		os.Exit(childSetup(world))
	}
	os.Exit(m.Run())
}

// world is a machine in a folder: tools/ with the fake programs and what steers them, index/ with the wheels that pip
// finds, cache/.
type world struct {
	dir    string
	wheels []wheel
}

func newWorld(t testing.TB) *world {
	w := &world{dir: t.TempDir()}
	exe, err := os.Executable()
	require.NoError(t, err)
	for _, d := range []string{"tools", "index", "cache"} {
		require.NoError(t, os.Mkdir(filepath.Join(w.dir, d), 0o755))
	}
	for _, name := range []string{"fake-python", "fake-g++"} {
		require.NoError(t, os.Symlink(exe, filepath.Join(w.dir, "tools", name)))
	}
	w.addWheel(t, "torch", fakeTorch(), nil)
	w.addWheel(t, "nvidia-cuda-runtime", map[string]string{"nvidia/cu13/lib/libcudart.so.13": "cudart", "nvidia/cu13/include/cuda.h": "h"}, nil)
	return w
}

func fakeTorch() map[string]string {
	files := map[string]string{
		"torch/version.py":                                       "__version__ = '2.11.0+cu130'\n",
		"torch/nn/functional.py":                                 "python\n",
		"torch/lib/libtorch_cpu.so":                              strings.Repeat("cpu", 100_000),
		"torch/lib/libtorch_cuda.so":                             "cuda",
		"torch/lib/libc10_cuda.so":                               "cuda",
		"torch/lib/libc10.so":                                    "c10",
		"torch/lib/libtorch_python.so":                           "py",
		"torch/include/torch/headeronly/version.h":               "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 11\n#define TORCH_VERSION_PATCH 0\n",
		"torch/include/ATen/ATen.h":                              "",
		"torch-2.11.0.dist-info/licenses/LICENSE":                "text",
		"torch/include/torch/csrc/api/include/torch/torch.h":     "",
		"torch/include/torch/csrc/distributed/c10d/TCPStore.hpp": "",
		"torch/include/torch/csrc/distributed/c10d/reducer.hpp":  "",
	}
	for i := range 40 {
		files[fmt.Sprintf("torch/include/ATen/ops/op%d.h", i)] = strings.Repeat("// op\n", i)
	}
	return files
}

// addWheel makes a wheel and puts it into the index. twist may change its RECORD.
func (w *world) addWheel(t testing.TB, name string, files map[string]string, twist func(record map[string]string)) {
	info := strings.ReplaceAll(name, "-", "_") + "-2.11.0.dist-info"
	record := map[string]string{}
	var names []string
	for n, text := range files {
		sum := sha256.Sum256([]byte(text))
		record[n] = "sha256=" + base64.RawURLEncoding.EncodeToString(sum[:])
		names = append(names, n)
	}
	sort.Strings(names)
	if twist != nil {
		twist(record)
	}
	var buf bytes.Buffer
	z := zip.NewWriter(&buf)
	add := func(n, text string) {
		f, err := z.Create(n)
		require.NoError(t, err)
		_, err = f.Write([]byte(text))
		require.NoError(t, err)
	}
	var lines strings.Builder
	for _, n := range names {
		add(n, files[n])
		if record[n] != "" {
			fmt.Fprintf(&lines, "%s,%s,%d\n", n, record[n], len(files[n]))
		}
	}
	fmt.Fprintf(&lines, "%s/RECORD,,\n", info)
	add(info+"/RECORD", lines.String())
	require.NoError(t, z.Close())
	sum := sha256.Sum256(buf.Bytes())
	wh := wheel{name: name, version: "2.11.0", file: name + "-2.11.0-py3-none-any.whl", sha256: hex.EncodeToString(sum[:]), size: int64(buf.Len()), cpu: true}
	w.wheels = slices.DeleteFunc(w.wheels, func(o wheel) bool { return o.name == name })
	w.wheels = append(w.wheels, wh)
	require.NoError(t, os.WriteFile(filepath.Join(w.dir, "index", wh.file), buf.Bytes(), 0o644))
}

// config is the configuration of a set-up in this world.
func (w *world) config() Config {
	return Config{
		Cache:   filepath.Join(w.dir, "cache"),
		CXX:     filepath.Join(w.dir, "tools", "fake-g++"),
		Sources: fakeSources(),
		seams: seams{
			python: filepath.Join(w.dir, "tools", "fake-python"),
			wheels: func(Flavor) []wheel { return w.wheels },
			gotch:  fakeGotch{},
			gpu:    func() (bool, string) { return false, "no GPU in this test" },
			free:   func(string) (int64, error) { return 1e15, nil },
			jobs:   2,
		},
	}
}

func fakeSources() fstest.MapFS {
	return fstest.MapFS{
		"tdp/tdp.h":     {Data: []byte("header")},
		"tdp/key.cpp":   {Data: []byte("TDP_SOURCE_KEY")},
		"tdp/a.cpp":     {Data: []byte("a")},
		"tdp/b.cpp":     {Data: []byte("b TDP_CUDA")},
		"tdp/a.cpp.swp": {Data: []byte("an editor's")},
	}
}

// fakeGotch stands for gotchprep.
type fakeGotch struct{}

func (fakeGotch) version() string { return "fake" }
func (fakeGotch) flags() []string { return []string{"-include", "compat.h"} }
func (fakeGotch) prepare(_ context.Context, _ Tree, dst, cpp string, ldflags []string) error {
	for path, text := range map[string]string{
		filepath.Join(dst, "go.mod"):           "module " + gotchModule + "\n\ngo 1.20\n",
		filepath.Join(dst, "libtch", "lib.go"): strings.Join(ldflags, " "),
		filepath.Join(cpp, "torch_api.cpp"):    "big",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// steer changes how the fake programs behave; "" undoes it.
func (w *world) steer(t testing.TB, name, value string) {
	path := filepath.Join(w.dir, "tools", name)
	if value == "" {
		require.NoError(t, os.RemoveAll(path))
		return
	}
	require.NoError(t, os.WriteFile(path, []byte(value), 0o644))
}

// calls lists what the fake programs were called for since the last call of calls.
func (w *world) calls(t testing.TB) []string {
	path := filepath.Join(w.dir, "tools", "calls")
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil
	}
	require.NoError(t, err)
	require.NoError(t, os.Remove(path))
	out := strings.Fields(string(text))
	sort.Strings(out)
	return out
}

// childSetup is one set-up of the world, for tests that kill it or run several.
func childSetup(dir string) int {
	w := &world{dir: dir}
	list, _ := filepath.Glob(filepath.Join(dir, "index", "*.whl"))
	sort.Sort(sort.Reverse(sort.StringSlice(list)))
	for _, path := range list {
		name, _, _ := strings.Cut(filepath.Base(path), "-2.11.0")
		sum, err := hashFile(context.Background(), path)
		if err != nil {
			return 1
		}
		info, _ := os.Stat(path)
		w.wheels = append(w.wheels, wheel{name, "2.11.0", filepath.Base(path), sum, info.Size(), true})
	}
	cfg := w.config()
	cfg.Out = os.Stderr
	if _, err := Setup(context.Background(), cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// toolDir reads what steers the fake programs.
func toolFile(name string) string {
	text, _ := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), name))
	return string(text)
}

func logCall(name string) {
	f, err := os.OpenFile(filepath.Join(filepath.Dir(os.Args[0]), "calls"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err == nil {
		fmt.Fprintln(f, name)
		f.Close()
	}
}

func slow() {
	if d, err := time.ParseDuration(toolFile("slow")); err == nil {
		time.Sleep(d)
	}
}

// fakePython is python3 as far as set-up uses it: pip download, pip install, venv, -c.
func fakePython(args []string) int {
	after := func(flag string) string {
		if i := slices.Index(args, flag); i >= 0 {
			return args[i+1]
		}
		return ""
	}
	switch {
	case args[0] == "-c":
		fmt.Println(Version + "+fake")
		return 0
	case slices.Equal(args[:2], []string{"-m", "venv"}):
		bin := filepath.Join(args[2], "bin")
		os.MkdirAll(bin, 0o755)
		exe, _ := os.Readlink(os.Args[0])
		os.Symlink(exe, filepath.Join(bin, "fake-python"))
		os.Symlink("fake-python", filepath.Join(bin, "python"))
		os.WriteFile(filepath.Join(args[2], "pyvenv.cfg"), []byte("home = /usr/bin\n"), 0o644)
		os.WriteFile(filepath.Join(bin, "torchrun"), []byte("#!"+bin+"/python\n"), 0o755)
		return 0
	}
	if args[2] == "install" {
		site := filepath.Join(filepath.Dir(filepath.Dir(os.Args[0])), "lib", "python3", "site-packages")
		os.MkdirAll(filepath.Join(site, "__pycache__"), 0o755)
		for _, p := range args[3:] {
			name, version, _ := strings.Cut(p, "==")
			os.Mkdir(filepath.Join(site, name+"-"+cmp.Or(version, "1.0")+".dist-info"), 0o755)
		}
		os.WriteFile(filepath.Join(site, "torch.py"), []byte(strings.Join(args[3:], " ")), 0o644)
		os.WriteFile(filepath.Join(site, "__pycache__", "torch.pyc"), []byte("x"), 0o644)
		return 0
	}
	if text := toolFile("no-pip"); text != "" {
		fmt.Println("/usr/bin/python3: No module named pip")
		return 1
	}
	req, err := os.ReadFile(after("--requirement"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	name, rest, _ := strings.Cut(string(req), "==")
	pinned := strings.TrimSpace(rest[strings.LastIndex(rest, ":")+1:])
	logCall("pip:" + name)
	if text := toolFile("pip-says"); text != "" {
		fmt.Println(text)
		return 1
	}
	file := name + "-2.11.0-py3-none-any.whl"
	body, err := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), "..", "index", file))
	if err != nil {
		fmt.Println("ERROR: No matching distribution found for " + name)
		return 1
	}
	if toolFile("corrupt") == "" { // pip checks; "corrupt" is a pip that does not
		if sum := sha256.Sum256(body); hex.EncodeToString(sum[:]) != pinned {
			fmt.Println("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE")
			return 1
		}
	} else {
		body = append(slices.Clone(body), "damaged"...)
	}
	half := len(body) / 2
	dest := filepath.Join(after("--dest"), file)
	os.WriteFile(dest, body[:half], 0o644)
	slow()
	os.WriteFile(dest, body, 0o644)
	return 0
}

// fakeCompiler writes its input behind its flags to its output.
func fakeCompiler(args []string) int {
	if args[0] == "--version" {
		fmt.Println("fake-g++ 1.0" + toolFile("compiler-version"))
		return 0
	}
	in, out := args[slices.Index(args, "-c")+1], args[slices.Index(args, "-o")+1]
	logCall("g++:" + in)
	text, err := os.ReadFile(in)
	if err != nil {
		fmt.Println(err)
		return 1
	}
	if bad := toolFile("bad-source"); bad == in {
		fmt.Fprintf(os.Stderr, "%s:1: error: first line\nsecond line\n%s\nlast line\n", in, strings.Repeat("note\n", 1000))
		return 1
	}
	f, err := os.Create(out)
	if err != nil {
		return 1
	}
	fmt.Fprintln(f, strings.Join(args, " "))
	slow()
	f.Write(text)
	f.Close()
	return 0
}
