package libtorch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// pythonPackages are what the tests that compare with Python need.
var pythonPackages = []string{"torch==" + Version, "torchvision==0.26.0", "numpy", "safetensors", "tensorboard==2.21.0"}

// PythonDir is where Python's torch lies in a cache.
func PythonDir(cache string) string { return filepath.Join(cache, "python", Version) }

// SetupPython makes a Python with torch, for tests that hold Go against it, and gives its interpreter.
func SetupPython(ctx context.Context, cfg Config) (string, error) {
	if err := supported(); err != nil {
		return "", err
	}
	cfg, err := cfg.resolve()
	if err != nil {
		return "", err
	}
	s := newSetup(cfg)
	dir := PythonDir(cfg.Cache)
	if lacks := lacking(dir); lacks != "" {
		s.ui.say("Python's torch has no %s: making it anew", lacks)
		if err := os.Remove(filepath.Join(dir, manifestName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	err = s.ensure(ctx, dir, "python", "Python's torch", func(ctx context.Context, tmp string) (content, error) {
		return content{sizesOnly: true}, s.fillPython(ctx, tmp, dir)
	})
	if err != nil {
		return "", s.explain(err)
	}
	if s.worked.Load() || !cfg.Quiet {
		s.ui.say("Python's torch %s is set up in %s", Version, dir)
	}
	return filepath.Join(dir, "bin", "python"), nil
}

// lacking names a package that an environment of an earlier goddp does not have yet, in the version that it should.
func lacking(dir string) string {
	if _, err := os.Stat(filepath.Join(dir, manifestName)); err != nil {
		return "" // it is to be made anyway
	}
	for _, p := range pythonPackages {
		name, version, _ := strings.Cut(p, "==")
		found, err := filepath.Glob(filepath.Join(dir, "lib", "python*", "site-packages", name+"-"+version+"*.dist-info"))
		if err != nil || len(found) == 0 {
			return p
		}
	}
	return ""
}

func (s *setup) fillPython(ctx context.Context, tmp, dir string) error {
	if err := s.needSpace("Python's torch", 12e9); err != nil {
		return err
	}
	s.ui.say("installing %s with pip; this takes some minutes and 6 GB", strings.Join(pythonPackages, ", "))
	// venv wants to make the folder's content itself.
	if _, err := (program{}).all(ctx, s.cfg.seams.python, "-c",
		"import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] <= (3, 14) else 'torch "+Version+" is for Python 3.10 to 3.14, this is %s' % sys.version)"); err != nil {
		if errors.Is(err, exec.ErrNotFound) {
			return fmt.Errorf("python3 is not installed: `apt-get install python3-pip python3-venv`: %w", err)
		}
		return err
	}
	if _, err := (program{}).all(ctx, s.cfg.seams.python, "-m", "venv", tmp); err != nil {
		return fmt.Errorf("python3 cannot make a virtual environment: `apt-get install python3-venv`: %w", err)
	}
	pipTmp := filepath.Join(tmp, "pip-tmp")
	if err := os.Mkdir(pipTmp, 0o755); err != nil {
		return err
	}
	argv := append([]string{filepath.Join(tmp, "bin", "python"), "-m", "pip", "install"}, pythonPackages...)
	if err := s.follow(ctx, tmp, append(pipEnv(), "TMPDIR="+pipTmp), argv); err != nil {
		return fmt.Errorf("installing Python's torch: %w", err)
	}
	if err := os.RemoveAll(pipTmp); err != nil {
		return err
	}
	if out, err := (program{dir: tmp}).all(ctx, filepath.Join(tmp, "bin", "python"), "-c",
		"import torch, torchvision, numpy, safetensors, tensorboard; print(torch.__version__)"); err != nil || !strings.HasPrefix(out, Version) {
		return fmt.Errorf("the installed Python does not import torch %s: %q %w", Version, out, err)
	}
	return relocate(tmp, dir)
}

// follow runs a long program, showing each line it prints, and how much it has written.
func (s *setup) follow(ctx context.Context, dir string, env, argv []string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	var all bytes.Buffer
	lines := &lineWriter{each: func(line string) { s.ui.move("%.100s", strings.TrimSpace(line)) }}
	cmd.Stdout = io.MultiWriter(&all, lines)
	cmd.Stderr = cmd.Stdout
	err := cmd.Run()
	s.ui.still()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return failed(argv, err, all.String())
	}
	return nil
}

// lineWriter hands on whole lines.
type lineWriter struct {
	rest []byte
	each func(string)
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(p), nil
		}
		w.each(string(w.rest[:i]))
		w.rest = w.rest[i+1:]
	}
}

// relocate makes an environment that was built in tmp work in dir: its scripts name their interpreter by path. Links,
// which the manifest does not list, are those to the system's Python.
func relocate(tmp, dir string) error {
	files, err := filepath.Glob(filepath.Join(tmp, "bin", "*"))
	if err != nil {
		return err
	}
	for _, path := range append(files, filepath.Join(tmp, "pyvenv.cfg")) {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if moved := bytes.ReplaceAll(text, []byte(tmp), []byte(dir)); !bytes.Equal(moved, text) {
			if err := os.WriteFile(path, moved, info.Mode().Perm()); err != nil {
				return err
			}
		}
	}
	return nil
}
