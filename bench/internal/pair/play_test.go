package pair

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func ExamplePlan_Play() {
	clock := 0.0 // seconds
	side := func(name string, seconds float64) Player {
		return Func{Side: name, Do: func(context.Context, Request) (Answer, error) {
			clock += seconds
			return Answer{"seconds": {seconds}}, nil
		}}
	}
	plan := Plan{Rounds: 3, Warmup: 1}
	turns, err := plan.Play(context.Background(), Request{Do: "work"}, side("Go", 1), side("Python", 4))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(turns[0].Name, turns[0].Summary("seconds").Median, turns[1].Name, turns[1].Summary("seconds").Median)
	fmt.Println("ratio", Ratio(turns[0], turns[1], "seconds").Median, "after", clock, "seconds")
	// Output:
	// Go 1 Python 4
	// ratio 0.25 after 20 seconds
}

func TestSidesTakeTurns(t *testing.T) {
	var order string
	side := func(name string) Player {
		n := 0.0
		return Func{Side: name, Do: func(_ context.Context, r Request) (Answer, error) {
			order += name
			n++
			return Answer{"turn": {n}, "asked": {float64(r.N)}}, nil
		}}
	}
	said := 0
	plan := Plan{Rounds: 3, Warmup: 1, Say: func(string, ...any) { said++ }}
	a, b := side("a"), side("b")
	turns, err := plan.PlayEach(t.Context(), func(p Player) Request {
		return Request{N: map[string]int{"a": 1, "b": 2}[p.Name()]}
	}, a, b)
	require.NoError(t, err)
	require.Equal(t, "abbaabba", order)
	require.Equal(t, []float64{2, 3, 4}, turns[0].All("turn"), "the first turn warms up")
	require.Equal(t, []float64{2, 2, 2}, turns[1].All("asked"))
	require.Equal(t, 3, said)
}

func TestFailedTurnNamesTheSide(t *testing.T) {
	bad := Func{Side: "Python", Do: func(context.Context, Request) (Answer, error) { return nil, errors.New("no torch") }}
	_, err := Plan{}.Play(t.Context(), Request{}, bad)
	require.EqualError(t, err, "Python, turn 1: no torch")
}
