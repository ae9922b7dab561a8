// Package program has what the training programs share: how their command line is read and refused, which ranks they
// start and what those compute on, where their images come from, and the running figures that the tutorials print.
//
// A program is a [Command]:
//
//	func main() { os.Exit(launch.Main(run)) }
//
//	func run(ctx context.Context) error {
//		c := config{…defaults}
//		return program.Command{Name: "mnist", Bind: c.bind, Check: c.check, Ranks: &c.ranks, Rank: c.rank}.Run(ctx)
//	}
package program

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/spf13/pflag"
)

// Command is a program that trains with several ranks. Started plainly it starts them itself; under torchrun, goddp
// run, Slurm or Kubernetes it is one of those that they started.
type Command struct {
	Name  string
	Usage string               // what --help says before the flags
	Bind  func(*pflag.FlagSet) // makes its own flags
	Check func() error         // tells what of them makes no sense
	Ranks *Ranks               // gets flags too
	// Prepare finds out what would stop every rank, in the process that is about to start them. It may be nil.
	Prepare func(context.Context) error
	// JSON tells, once the command line is read, that standard output is for JSON lines only. It may be nil.
	JSON *bool
	// Rank is what each rank does.
	Rank func(context.Context, *torchddp.ProcessGroup) error
}

// Run is what launch.Main calls. A command line that makes no sense ends the program with status 2, before any rank is
// started.
func (c Command) Run(ctx context.Context) error {
	if err := c.Parse(os.Args[1:], os.Stdout); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return c.refuse(err)
	}
	start := launch.SpawnOptions{MasterPort: c.Ranks.MasterPort, Prefix: launch.PrefixOff}
	ranks, err := c.place(ctx, &start)
	if err != nil {
		return err
	}
	return launch.Run(ctx, ranks, func(ctx context.Context, env launch.Env) (err error) {
		pg, err := c.Ranks.join(ctx, env)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, pg.Destroy()) }()
		return c.Rank(ctx, pg)
	}, start)
}

func (c Command) refuse(err error) error {
	return &launch.ExitError{Code: 2, Err: fmt.Errorf("%w\nRun %s --help for usage", err, c.Name)}
}

// Parse reads the command line. Its error is what the user did wrong.
func (c Command) Parse(args []string, out io.Writer) error {
	flags := pflag.NewFlagSet(c.Name, pflag.ContinueOnError)
	flags.SortFlags = false
	flags.SetOutput(io.Discard)
	// Python's programs spell them with an underscore.
	flags.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	c.Bind(flags)
	c.Ranks.bind(flags)
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			fmt.Fprintf(out, "%s\n\nUsage:\n  %s [flags]\n\nFlags:\n%s", strings.TrimSpace(c.Usage), c.Name, flags.FlagUsages())
		}
		return err
	}
	if flags.NArg() != 0 {
		return fmt.Errorf("unexpected argument %q: all settings are flags", flags.Arg(0))
	}
	return errors.Join(c.Check(), c.Ranks.check())
}

// place tells how many ranks to start here, none where this process is one already.
func (c Command) place(ctx context.Context, o *launch.SpawnOptions) (int, error) {
	env, inRank, err := launch.FromEnv()
	if err != nil {
		return 0, err
	}
	if inRank {
		if err := c.Ranks.agree(env); err != nil {
			return 0, c.refuse(err)
		}
		return 0, nil
	}
	n, why, err := c.Ranks.here()
	if err != nil {
		return 0, c.refuse(err)
	}
	if c.Prepare != nil {
		if err := c.Prepare(ctx); err != nil {
			return 0, err
		}
	}
	fmt.Fprintln(Out(c.JSON != nil && *c.JSON), why)
	o.Env = c.Ranks.threads(n)
	return n, nil
}

// Out is where lines for people go: standard output, unless that is for JSON lines.
func Out(json bool) io.Writer {
	if json {
		return os.Stderr
	}
	return os.Stdout
}
