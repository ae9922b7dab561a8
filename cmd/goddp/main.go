// Command goddp sets up libtorch for Go modules that use this library, and runs and looks after training jobs.
//
//	goddp setup    # make the Go module in this folder build with libtorch
//	goddp env      # the same for a shell, without a go.work file
//
// `goddp help` lists the commands, `goddp help COMMAND` shows one.
//
// It must build before there is a libtorch: nothing it imports may use gotch or internal/tdp.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/spf13/pflag"
)

// The exit statuses.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2 // the command line makes no sense
)

// command is one subcommand. Each lies in a file of its own and is listed in commands.
type command struct {
	name    string
	group   string // the heading it stands under in the help
	args    string // what follows the flags
	summary string // one line
	help    string // the rest of the help
	// flags adds the command's flags and gives the function that runs it with the other arguments.
	flags func(*pflag.FlagSet) func(ctx context.Context, args []string, std stdio) error
}

// stdio is where a command reads and writes.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

// usageError is a command line that makes no sense.
type usageError struct{ error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// exitError ends the program with a status of its own, for a command that has said already what was wrong.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], stdio{os.Stdin, os.Stdout, os.Stderr})
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, std stdio) int {
	if len(args) == 0 {
		printCommands(std.err)
		return exitUsage
	}
	switch args[0] {
	case "help", "-h", "--help":
		if len(args) == 1 {
			printCommands(std.out)
			return exitOK
		}
		args = []string{args[1], "--help"}
	}
	i := slices.IndexFunc(commands, func(c *command) bool { return c.name == args[0] })
	if i < 0 {
		fmt.Fprintf(std.err, "goddp: unknown command %q\n\n", args[0])
		printCommands(std.err)
		return exitUsage
	}
	c := commands[i]
	set := pflag.NewFlagSet("goddp "+c.name, pflag.ContinueOnError)
	set.SetOutput(io.Discard)
	set.SortFlags = false
	set.SetInterspersed(false) // what follows the first argument may be another program's
	do := c.flags(set)
	usage := func(w io.Writer) {
		fmt.Fprintf(w, "Usage: goddp %s [flags]%s\n\n%s.\n", c.name, c.args, c.summary)
		if c.help != "" {
			fmt.Fprintf(w, "\n%s\n", c.help)
		}
		if set.HasAvailableFlags() {
			fmt.Fprintf(w, "\nFlags:\n%s", set.FlagUsages())
		}
	}
	err := set.Parse(args[1:])
	if errors.Is(err, pflag.ErrHelp) {
		usage(std.out)
		return exitOK
	}
	if err != nil {
		err = usageError{err}
	} else {
		err = do(ctx, set.Args(), std)
	}
	var status statusError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, new(usageError)):
		fmt.Fprintf(std.err, "goddp %s: %v\n\n", c.name, err)
		usage(std.err)
		return exitUsage
	case errors.As(err, &status):
		return int(status)
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintf(std.err, "goddp %s: interrupted\n", c.name)
		return 130
	}
	fmt.Fprintf(std.err, "goddp %s: %v\n", c.name, err)
	return exitError
}

func printCommands(w io.Writer) {
	fmt.Fprint(w, "goddp: distributed data-parallel training in Go on libtorch.\n\nUsage: goddp COMMAND [flags] [arguments]\n")
	group := ""
	for _, c := range commands {
		if c.group != group {
			group = c.group
			fmt.Fprintf(w, "\n%s:\n", group)
		}
		fmt.Fprintf(w, "  %-10s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, "\n`goddp help COMMAND` shows a command's flags.\n")
}
