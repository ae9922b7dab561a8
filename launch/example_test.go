package launch_test

import (
	"context"
	"fmt"
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

func ExampleExpandNodeList() {
	nodes, err := launch.ExpandNodeList("node[01-03,7]")
	fmt.Println(nodes, err)
	// Output: [node01 node02 node03 node7] <nil>
}
