package main

import (
	"context"
	"fmt"

	"github.com/goddp/goddp/internal/libtorch"
	"github.com/spf13/pflag"
)

var envCommand = &command{
	name:    "env",
	group:   groupSetup,
	args:    " [NAME]",
	summary: "Print shell lines that make the Go module in this folder build with libtorch",
	help: `For a module that cannot have a go.work file:

  goddp setup --no-work
  eval "$(goddp env)"

  GOWORK        a workspace file in the cache, for this module
  GODDP_TORCH   the libtorch in use, with its include and lib folders

With NAME, prints that variable's value only.`,
	flags: func(f *pflag.FlagSet) func(context.Context, []string, stdio) error {
		o := addSetupFlags(f)
		return func(ctx context.Context, args []string, std stdio) error {
			if len(args) > 1 {
				return usagef("more than one NAME")
			}
			cfg, err := o.config(std)
			if err != nil {
				return err
			}
			module, err := libtorch.FindModule(o.dir)
			if err != nil {
				return err
			}
			in, err := libtorch.Find(ctx, cfg)
			if err != nil {
				return err
			}
			vars, err := in.Environment(ctx, module)
			if err != nil {
				return err
			}
			for _, v := range vars {
				switch {
				case len(args) == 0:
					fmt.Fprintln(std.out, v.Shell())
				case args[0] == v.Name:
					fmt.Fprintln(std.out, v.Value)
					return nil
				}
			}
			if len(args) == 1 {
				return usagef("no variable %s", args[0])
			}
			return nil
		}
	},
}
