package launch_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/goddp/goddp/launch"
)

// A whole program: started plainly it spawns two ranks; under torchrun or srun it is one.
func ExampleMain() {
	train := func(ctx context.Context, env launch.Env) error {
		fmt.Printf("training as rank %d of %d\n", env.Rank, env.WorldSize)
		return ctx.Err()
	}
	run := func(ctx context.Context) error {
		return launch.Run(ctx, 2, train)
	}
	main := func() { os.Exit(launch.Main(run)) }
	_ = main
}

// A launcher for any program: two workers, and up to three restarts of both when one fails.
func ExampleElastic() {
	err := launch.Elastic{
		Command: []string{"sh", "-c", `[ "$WORLD_SIZE" = 2 ] && [ "$TORCHELASTIC_RESTART_COUNT" -gt 0 ]`}, // fails the first time
		Workers: 2, MaxRestarts: 3,
		Logger: slog.New(slog.DiscardHandler),
	}.Run(context.Background())
	fmt.Println(err, launch.ExitCode(err))
	// Output: <nil> 0
}

func ExampleExpandNodeList() {
	nodes, err := launch.ExpandNodeList("node[01-03,7]")
	fmt.Println(nodes, err)
	// Output: [node01 node02 node03 node7] <nil>
}
