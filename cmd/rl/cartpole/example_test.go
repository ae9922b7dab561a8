package cartpole_test

import (
	"fmt"
	"log"
	"math/rand/v2"

	"github.com/goddp/goddp/cmd/rl/cartpole"
)

// Two episodes: one always pushes right, the other pushes to where the pole falls.
func Example() {
	envs, err := cartpole.New(2)
	if err != nil {
		log.Fatal(err)
	}
	envs.Reset(rand.New(rand.NewPCG(1, 0)))
	actions := make([]int64, envs.Len())
	for envs.Running() > 0 {
		s := envs.State(1)
		actions[0], actions[1] = 1, 0
		if s[2]+0.5*s[3]+0.02*s[0]+0.1*s[1] > 0 {
			actions[1] = 1
		}
		if err := envs.Step(actions); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println(envs.Steps(0) < 15, envs.Steps(1))
	// Output: true 500
}
