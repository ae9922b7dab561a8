package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/goddp/goddp/csrc"
	"github.com/goddp/goddp/internal/libtorch"
	"github.com/spf13/pflag"
)

const groupSetup = "Set-up"

var setupCommand = &command{
	name:    "setup",
	group:   groupSetup,
	summary: "Set up libtorch, and the Go module in this folder to build with it",
	help: `Fetches libtorch ` + libtorch.Version + ` with pip from the package index that pip is configured for, compiles the C++ parts, prepares
gotch, and writes go.work beside the nearest go.mod (or edits the go.work that is in force there). After that plain
go build, go run, go test and gopls work. What is there already is left alone; it can be interrupted and run again.

go.work holds paths of this machine and is not to be committed. Where no go.work can be, use --no-work and then
eval "$(goddp env)".

Variables:
  LIBTORCH      an existing libtorch ` + libtorch.Version + `: an unpacked archive, or the torch folder of a Python
  FLAVOR        cpu, cuda or auto, as --flavor
  GODDP_CACHE   where everything is kept; default goddp in the user's cache folder
  CXX           the C++ compiler; default g++
  LIBTORCH_BYPASS_VERSION_CHECK=1   try $LIBTORCH whatever its version`,
	flags: func(f *pflag.FlagSet) func(context.Context, []string, stdio) error {
		o := addSetupFlags(f)
		noWork := f.Bool("no-work", false, "write no go.work")
		python := f.Bool("python", false, "install a Python with torch, for the tests that compare with it, instead")
		f.BoolVar(&o.verify, "verify", false, "hash all files rather than compare their sizes")
		f.BoolVarP(&o.quiet, "quiet", "q", false, "say nothing when there is nothing to do")
		return func(ctx context.Context, args []string, std stdio) error {
			if len(args) > 0 {
				return usagef("unexpected argument %q", args[0])
			}
			cfg, err := o.config(std)
			if err != nil {
				return err
			}
			if *python {
				_, err := libtorch.SetupPython(ctx, cfg)
				return err
			}
			module := ""
			if !*noWork {
				if module, err = libtorch.FindModule(o.dir); err != nil {
					return fmt.Errorf("%w: run it in a Go module, or with --no-work", err)
				}
				if other, err := otherVersion(ctx, module); other != "" || err != nil {
					if err != nil {
						return err
					}
					return o.delegate(ctx, other, module, std)
				}
			}
			in, err := libtorch.Setup(ctx, cfg)
			if err != nil || module == "" {
				return err
			}
			w, err := in.WriteWorkspace(ctx, module)
			if err != nil {
				return err
			}
			switch {
			case w.Changed && w.Ours:
				fmt.Fprintf(std.err, "goddp: wrote %s; it is of this machine, so keep it and go.work.sum out of version control\n", w.File)
			case w.Changed:
				fmt.Fprintf(std.err, "goddp: edited %s\n", w.File)
			}
			if w.Warning != "" {
				fmt.Fprintf(std.err, "goddp: warning: %s\n", w.Warning)
			}
			return nil
		}
	},
}

// setupFlags are what setup and env have in common.
type setupFlags struct {
	flavor, dir   string
	verify, quiet bool
}

func addSetupFlags(f *pflag.FlagSet) *setupFlags {
	o := &setupFlags{}
	f.StringVar(&o.flavor, "flavor", os.Getenv(libtorch.EnvFlavor), "cpu, cuda, or auto: CUDA when an NVIDIA GPU is there")
	f.StringVarP(&o.dir, "directory", "C", ".", "the Go module's folder")
	return o
}

func (o *setupFlags) config(std stdio) (libtorch.Config, error) {
	cfg, err := libtorch.FromEnv()
	if err != nil {
		return cfg, usageError{err}
	}
	if cfg.Flavor, err = libtorch.ParseFlavor(o.flavor); err != nil {
		return cfg, usageError{err}
	}
	cfg.Verify, cfg.Quiet, cfg.Out = o.verify, o.quiet, std.err
	return cfg, nil
}

const (
	modulePath   = "github.com/goddp/goddp"
	envDelegated = "GODDP_SETUP_OF" // set in the set-up that another version's set-up has started
)

// otherVersion is the folder of the goddp that the module uses, when its C++ is not the one that this program carries.
func otherVersion(ctx context.Context, module string) (string, error) {
	if os.Getenv(envDelegated) != "" {
		return "", nil
	}
	cmd := exec.CommandContext(ctx, "go", "list", "-m", "-json", modulePath)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		return "", nil // it does not use goddp (yet): this version will do
	}
	var info struct {
		Dir, Version string
		Replace      *struct{ Dir string }
	}
	if err := json.Unmarshal(out, &info); err != nil {
		return "", fmt.Errorf("go list -m %s: %w", modulePath, err)
	}
	if info.Dir == "" && info.Version != "" { // not in the module cache yet
		get := exec.CommandContext(ctx, "go", "mod", "download", "-json", modulePath+"@"+info.Version)
		get.Env = append(os.Environ(), "GOWORK=off")
		get.Dir = module
		if out, err = get.Output(); err == nil {
			err = json.Unmarshal(out, &info)
		}
		if err != nil {
			return "", fmt.Errorf("fetch %s %s: %w", modulePath, info.Version, err)
		}
	}
	if info.Dir == "" {
		return "", nil
	}
	key, err := csrc.KeyOf(os.DirFS(filepath.Join(info.Dir, "csrc")))
	if err != nil || key == csrc.Key() {
		return "", err
	}
	return info.Dir, nil
}

// delegate has the goddp that the module uses do its set-up: its Go and its C++ belong together.
func (o *setupFlags) delegate(ctx context.Context, goddp, module string, std stdio) error {
	fmt.Fprintf(std.err, "goddp: %s uses the goddp in %s: running that one\n", module, goddp)
	flavor := o.flavor
	if flavor == "" {
		flavor = string(libtorch.Auto)
	}
	args := []string{"run", "-C", goddp, "./cmd/goddp", "setup", "--directory", module, "--flavor", flavor}
	if o.verify {
		args = append(args, "--verify")
	}
	if o.quiet {
		args = append(args, "--quiet")
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Env = append(os.Environ(), "GOWORK=off", envDelegated+"="+module)
	cmd.Stdout, cmd.Stderr = std.out, std.err
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return nil
}
