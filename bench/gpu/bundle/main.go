// Command bundle packs the CUDA tests and benchmarks for a machine that has a GPU and Python's torch, but neither Go nor a
// network: test programs, cmd/multigpu and bench/gpu, the Python scripts they compare with, and run.sh.
//
//	go run ./bench/gpu/bundle               # dist/gpu-bundle.tar.gz
//	go run ./bench/gpu/bundle -try          # and run it here: without a GPU every test skips with the reason
//
// On the other machine: tar xzf gpu-bundle.tar.gz && gpu-bundle/run.sh. It holds no libtorch: it runs with that machine's.
//
// It sets the CUDA flavour up if need be: with the libtorch of the Python that `make setup-python` installed, if that is
// there, which takes two files to compile and no large download, and otherwise with one of its own. The workspace of this
// module stays as it is.
package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"debug/elf"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/libtorch"
)

//go:embed run.sh
var runner []byte

//go:embed results.py
var results []byte

// atMost is the largest bundle that can be carried, in bytes.
const atMost = 64 << 20

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bundle:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("bundle", flag.ContinueOnError)
	out := flags.String("out", filepath.Join("dist", "gpu-bundle.tar.gz"), "the `FILE` to write")
	try := flags.Bool("try", false, "unpack it and run it on this machine, which has no GPU")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	root, err := libtorch.FindModule(".")
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "goddp-bundle-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	b := bundle{root: root, dir: filepath.Join(tmp, "gpu-bundle")}
	if b.env, err = workspace(ctx, root, tmp); err != nil {
		return fmt.Errorf("set the CUDA flavour up: %w", err)
	}
	if err := b.fill(ctx); err != nil {
		return err
	}
	size, err := pack(*out, b.dir)
	if err != nil {
		return err
	}
	fmt.Printf("%s: %.1f MB, %d test programs\n", *out, float64(size)/1e6, len(b.packages))
	if size > atMost {
		return fmt.Errorf("%s has %d bytes, and only %d can be carried: leave a package out, or strip more", *out, size, atMost)
	}
	if *try {
		return b.try(ctx, tmp)
	}
	return nil
}

// workspace sets the CUDA flavour up and gives the environment in which go builds with it.
func workspace(ctx context.Context, root, tmp string) ([]string, error) {
	cfg, err := libtorch.FromEnv()
	if err != nil {
		return nil, err
	}
	cfg.Flavor, cfg.Out, cfg.Quiet = libtorch.CUDA, os.Stderr, true
	if cfg.Libtorch == "" {
		cache, err := libtorch.CacheDir()
		if err != nil {
			return nil, err
		}
		found, err := filepath.Glob(filepath.Join(libtorch.PythonDir(cache), "lib", "python*", "site-packages", "torch"))
		if err != nil {
			return nil, err
		}
		if len(found) > 0 {
			cfg.Libtorch = found[0]
		}
	}
	in, err := libtorch.Setup(ctx, cfg)
	if err != nil {
		return nil, err
	}
	file := filepath.Join(tmp, "go.work")
	text := fmt.Sprintf("go 1.26.0\n\nuse %q\n\nreplace (\n\tgithub.com/sugarme/gotch => %q\n\tgoddp.local/link => %q\n)\n", root, in.Gotch, in.Link)
	return append(os.Environ(), "GOWORK="+file), os.WriteFile(file, []byte(text), 0o644)
}

// bundle is what is packed, in a folder.
type bundle struct {
	root, dir string
	env       []string
	packages  []string // those with CUDA tests
}

// fill builds everything into the folder.
func (b *bundle) fill(ctx context.Context) error {
	tests, err := filepath.Glob(filepath.Join(b.root, "*", "cuda_test.go"))
	if err != nil {
		return err
	}
	deeper, err := filepath.Glob(filepath.Join(b.root, "*", "*", "cuda_test.go"))
	if err != nil {
		return err
	}
	for _, path := range slices.Sorted(slices.Values(append(tests, deeper...))) {
		pkg, err := filepath.Rel(b.root, filepath.Dir(path))
		if err != nil {
			return err
		}
		b.packages = append(b.packages, filepath.ToSlash(pkg))
		dst := filepath.Join(b.dir, "pkg", pkg)
		if err := b.build(ctx, filepath.Join(dst, "package.test"), "test", "-c", pkg); err != nil {
			return err
		}
		data := filepath.Join(filepath.Dir(path), "testdata")
		if _, err := os.Stat(data); err == nil {
			if err := os.CopyFS(filepath.Join(dst, "testdata"), os.DirFS(data)); err != nil {
				return err
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if len(b.packages) == 0 {
		return errors.New("there are no CUDA tests: run this in a clone of goddp")
	}
	for _, pkg := range []string{"cmd/multigpu", "bench/gpu"} {
		if err := b.build(ctx, filepath.Join(b.dir, "bin", filepath.Base(pkg)), "build", pkg); err != nil {
			return err
		}
	}
	commit, dirty := record.Commit(b.root)
	if dirty {
		commit += "+changes"
	}
	for name, text := range map[string][]byte{
		"run.sh": runner, "results.py": results, "commit": []byte(commit + "\n"), "packages": []byte(strings.Join(b.packages, "\n") + "\n"),
	} {
		if err := os.WriteFile(filepath.Join(b.dir, name), text, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// build runs go build or go test -c for a package, without symbols, and makes sure that CUDA's part is linked.
func (b *bundle) build(ctx context.Context, out string, args ...string) error {
	verb, pkg := args[:len(args)-1], args[len(args)-1]
	fmt.Fprintf(os.Stderr, "building %s of %s\n", filepath.Base(out), pkg)
	cmd := exec.CommandContext(ctx, "go", slices.Concat(verb, []string{"-ldflags=-s -w", "-o", out, "./" + pkg})...)
	cmd.Dir, cmd.Env, cmd.Stderr, cmd.Stdout = b.root, b.env, os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s %s: %w", strings.Join(verb, " "), pkg, err)
	}
	f, err := elf.Open(out)
	if err != nil {
		return err
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	if !slices.Contains(libs, "libtorch_cuda.so") {
		return fmt.Errorf("%s is not linked with libtorch_cuda.so but with %v", pkg, libs)
	}
	return nil
}

// pack writes a folder as a compressed archive and gives its size.
func pack(out, dir string) (size int64, err error) {
	if err := os.MkdirAll(filepath.Dir(out), 0o777); err != nil {
		return 0, err
	}
	f, err := os.Create(out)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return 0, err
	}
	t := tar.NewWriter(z)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		h, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		name, err := filepath.Rel(filepath.Dir(dir), path)
		if err != nil {
			return err
		}
		h.Name, h.Uid, h.Gid, h.Uname, h.Gname = filepath.ToSlash(name), 0, 0, "", ""
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		in, err := os.Open(path)
		if err != nil {
			return err
		}
		defer in.Close()
		_, err = io.Copy(t, in)
		return err
	})
	if err = errors.Join(err, t.Close(), z.Close()); err != nil {
		return 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// try runs the runner here, for a machine without a GPU: every program has to start and to say what is missing.
func (b *bundle) try(ctx context.Context, tmp string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(b.dir, "run.sh"), "no-gpu")
	cmd.Env = append(os.Environ(), "OUT="+filepath.Join(tmp, "out"))
	if cache, err := libtorch.CacheDir(); err == nil && os.Getenv("GODDP_PYTHON") == "" {
		cmd.Env = append(cmd.Env, "GODDP_PYTHON="+filepath.Join(libtorch.PythonDir(cache), "bin", "python"))
	}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		for _, name := range []string{"tests.txt", "bench.txt", "multigpu.txt"} {
			if text, readErr := os.ReadFile(filepath.Join(tmp, "out", name)); readErr == nil {
				fmt.Fprintf(os.Stderr, "--- %s\n%s", name, text)
			}
		}
		return fmt.Errorf("run.sh no-gpu: %w", err)
	}
	return nil
}
