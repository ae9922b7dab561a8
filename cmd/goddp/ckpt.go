package main

import (
	"context"
	"errors"

	"github.com/goddp/goddp/checkpoint/ckptool"
	"github.com/spf13/pflag"
)

const groupCheckpoint = "Checkpoints"

func init() { commands = append(commands, ckptCommand) }

var ckptCommand = &command{
	name:    "ckpt",
	group:   groupCheckpoint,
	args:    " show FILE | convert FROM TO | diff A B",
	summary: "Show, convert or compare checkpoint files",
	help: `Files of torch.save (every version since 0.2) and .safetensors files, with no need of Python or libtorch.
Nothing in a file is executed.

  goddp ckpt show model.pt                      # keys, dtypes, shapes, sizes, plain values, metadata
  goddp ckpt show --verify --key optimizer ckpt.pt
  goddp ckpt convert --key model ckpt.pt model.safetensors
  goddp ckpt convert --strip-prefix module. ddp.pt model.pt
  goddp ckpt convert old.pt new.pt              # into today's format, with checksums
  goddp ckpt diff a.pt b.safetensors            # exit status 1 where they differ`,
	flags: func(f *pflag.FlagSet) func(context.Context, []string, stdio) error {
		key := f.String("key", "", "this `KEY` of the file only, such as model or optimizer/state/0 (diff: of both files)")
		verify := f.Bool("verify", false, "show: read everything and check the checksums")
		strip := f.String("strip-prefix", "", "convert: take `PREFIX` from the front of the names that have it")
		cpu := f.Bool("cpu", false, "convert: let PyTorch load to the CPU what was saved from a GPU")
		meta := f.StringToString("metadata", nil, "convert: free text for a .safetensors file, as `NAME=TEXT`")
		tolerance := f.Float64("tolerance", 0, "diff: numbers that differ by no more are equal")
		return func(_ context.Context, args []string, std stdio) error {
			if len(args) == 0 {
				return usagef("show, convert or diff?")
			}
			// Flags may also stand behind the verb.
			verb := args[0]
			f.SetInterspersed(true)
			if err := f.Parse(args[1:]); err != nil {
				return usageError{err}
			}
			args = f.Args()
			want := map[string]int{"show": 1, "convert": 2, "diff": 2}[verb]
			switch {
			case want == 0:
				return usagef("unknown: ckpt %s", verb)
			case len(args) != want:
				return usagef("ckpt %s: %d file names are given, not %d", verb, len(args), want)
			}
			switch verb {
			case "show":
				return ckptool.Show(std.out, args[0], ckptool.ShowOptions{Key: *key, Verify: *verify})
			case "convert":
				return ckptool.Convert(args[0], args[1], ckptool.ConvertOptions{
					Key: *key, StripPrefix: *strip, CPU: *cpu, Metadata: *meta, Notes: std.err,
				})
			case "diff":
				differ, err := ckptool.Diff(std.out, args[0], args[1], ckptool.DiffOptions{KeyA: *key, KeyB: *key, Tolerance: *tolerance})
				if err == nil && differ {
					err = statusError(1)
				}
				return err
			}
			return errors.ErrUnsupported
		}
	},
}
