package pair

import (
	"context"
	"fmt"
	"slices"
)

// Request is what a side is asked to do. What Do and the others mean is the benchmark's affair.
type Request struct {
	Do   string `json:"do"`
	N    int    `json:"n,omitempty"`    // how often
	Size int    `json:"size,omitempty"` // how large
	Path string `json:"path,omitempty"` // with which file
}

// Answer are the numbers of one turn by name, such as one of "seconds" for each step.
type Answer map[string][]float64

// Player is what can take turns.
type Player interface {
	Name() string
	Turn(ctx context.Context, r Request) (Answer, error)
}

// Plan says how often the sides take turns.
type Plan struct {
	Rounds int // turns that count, of each side; 0 is 1
	Warmup int // turns before them
	// Say is told about the progress; nil: no one is.
	Say func(format string, a ...any)
}

// Play lets the players answer the request by turns, A B, B A, A B…, and gives the turns of each player.
func (p Plan) Play(ctx context.Context, r Request, players ...Player) ([]Turns, error) {
	return p.PlayEach(ctx, func(Player) Request { return r }, players...)
}

// PlayEach is Play with a request for each player.
func (p Plan) PlayEach(ctx context.Context, request func(Player) Request, players ...Player) ([]Turns, error) {
	turns := make([]Turns, len(players))
	order := make([]int, len(players))
	for i, player := range players {
		turns[i].Name, order[i] = player.Name(), i
	}
	rounds := max(p.Rounds, 1)
	for round := -p.Warmup; round < rounds; round++ {
		for _, i := range order {
			answer, err := players[i].Turn(ctx, request(players[i]))
			if err != nil {
				return nil, fmt.Errorf("%s, turn %d: %w", players[i].Name(), round+1, err)
			}
			if round >= 0 {
				turns[i].Answers = append(turns[i].Answers, answer)
			}
		}
		slices.Reverse(order)
		if p.Say != nil && round >= 0 {
			p.Say("turn %d of %d", round+1, rounds)
		}
	}
	return turns, nil
}

// Func is a player of this process.
type Func struct {
	Side string
	Do   func(ctx context.Context, r Request) (Answer, error)
}

// Name is the side's.
func (f Func) Name() string { return f.Side }

// Turn calls the function.
func (f Func) Turn(ctx context.Context, r Request) (Answer, error) { return f.Do(ctx, r) }

// mean is the mean of several ranks' answers, number by number. Ranks of one job are to answer alike.
func mean(answers []Answer) (Answer, error) {
	if len(answers) == 1 {
		return answers[0], nil
	}
	out := Answer{}
	for name, values := range answers[0] {
		sum := slices.Clone(values)
		for rank, a := range answers[1:] {
			if len(a[name]) != len(sum) {
				return nil, fmt.Errorf("rank %d gave %d numbers of %q and rank 0 gave %d", rank+1, len(a[name]), name, len(sum))
			}
			for i, v := range a[name] {
				sum[i] += v
			}
		}
		for i := range sum {
			sum[i] /= float64(len(answers))
		}
		out[name] = sum
	}
	return out, nil
}
