package data_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
)

// The tutorial's data: a rank's batches of the random toy set.
func Example() {
	set, err := data.NewRandomToy(2048)
	if err != nil {
		panic(err)
	}
	defer set.Close()
	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{Replicas: 4, Rank: 1})
	if err != nil {
		panic(err)
	}
	loader, err := data.NewDataLoader(set, data.Options{BatchSize: 32, Sampler: sampler})
	if err != nil {
		panic(err)
	}
	defer loader.Close()
	for epoch := range 2 {
		sampler.SetEpoch(epoch)
		steps := 0
		for batch, err := range loader.All(context.Background()) {
			if err != nil {
				panic(err)
			}
			if steps == 0 {
				fmt.Println(epoch, batch.Input().MustSize(), batch.Target().MustSize(), batch.Indices()[:4])
			}
			steps++
		}
		fmt.Println(steps, "steps")
	}
	// Output:
	// 0 [32 20] [32 1] [1316 1649 2011 777]
	// 16 steps
	// 1 [32 20] [32 1] [1497 96 1780 1316]
	// 16 steps
}

// A job that was stopped goes on with the very next batch, here with half as many ranks.
func ExampleDataLoader_Restore() {
	open := func(ranks int) (*data.DataLoader[[]int], *data.DistributedSampler) {
		sampler, err := data.NewDistributedSampler(12, data.DistributedOptions{Replicas: ranks, NoShuffle: true})
		if err != nil {
			panic(err)
		}
		loader, err := data.NewCollated(ints(12), collect, data.Options{BatchSize: 1, Sampler: sampler})
		if err != nil {
			panic(err)
		}
		return loader, sampler
	}
	first, _ := open(4)
	var saved data.State
	for batch, err := range first.All(context.Background()) {
		if err != nil {
			panic(err)
		}
		fmt.Println("rank 0 of 4:", batch)
		if saved, err = first.State(); err != nil {
			panic(err)
		}
		break // the job is stopped: the four ranks have consumed 0 to 3
	}
	second, sampler := open(2)
	if err := second.Restore(saved); err != nil {
		panic(err)
	}
	sampler.SetEpoch(0)
	for batch, err := range second.All(context.Background()) {
		if err != nil {
			panic(err)
		}
		fmt.Println("rank 0 of 2:", batch)
	}
	// Output:
	// rank 0 of 4: [0]
	// rank 0 of 2: [4]
	// rank 0 of 2: [6]
	// rank 0 of 2: [8]
	// rank 0 of 2: [10]
}

// words is a data set of one's own: any type with Len and Item.
type words []string

func (w words) Len() int                                      { return len(w) }
func (w words) Item(_ context.Context, i int) (string, error) { return w[i], nil }

// Batches of any type, made by a collate function.
func ExampleNewCollated() {
	join := func(samples []string, _ *rand.Rand) (string, error) { return strings.Join(samples, "+"), nil }
	loader, err := data.NewCollated(words{"all", "reduce", "gather", "scatter", "barrier"}, join, data.Options{BatchSize: 2})
	if err != nil {
		panic(err)
	}
	for batch, err := range loader.All(context.Background()) {
		fmt.Println(batch, err)
	}
	// Output:
	// all+reduce <nil>
	// gather+scatter <nil>
	// barrier <nil>
}

// The same seed splits as Python does.
func ExampleRandomSplit() {
	parts, err := data.RandomSplit(ints(10), []int{7, 3}, data.NewGenerator(42))
	if err != nil {
		panic(err)
	}
	fmt.Println(parts[0].Indices(), parts[1].Indices())
	// Output:
	// [2 6 1 8 4 5 0] [9 3 7]
}

func ExampleNewRandomSampler() {
	if err := tdp.ManualSeed(0); err != nil { // torch.manual_seed(0)
		panic(err)
	}
	loader, err := data.NewCollated(ints(10), collect, data.Options{BatchSize: 4, Shuffle: true})
	if err != nil {
		panic(err)
	}
	for batch := range loader.All(context.Background()) {
		fmt.Println(batch)
	}
	// Output:
	// [6 7 1 4]
	// [2 0 9 8]
	// [3 5]
}
