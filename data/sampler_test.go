package data_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
)

// ints is a data set whose sample i is i.
type ints int

func (n ints) Len() int                                   { return int(n) }
func (n ints) Item(_ context.Context, i int) (int, error) { return i, nil }

func collect(samples []int, _ *rand.Rand) ([]int, error) { return slices.Clone(samples), nil }

func digest[E any](lists [][]E) string {
	var rows []string
	for _, l := range lists {
		rows = append(rows, strings.Trim(strings.ReplaceAll(fmt.Sprint(l), " ", ","), "[]"))
	}
	h := sha256.Sum256([]byte(strings.Join(rows, ";")))
	return hex.EncodeToString(h[:8])
}

// py prints a value as Python does.
func py(v any) string {
	s := fmt.Sprint(v)
	switch v.(type) {
	case []int, [][]int:
		s = strings.ReplaceAll(s, " ", ", ")
	case bool:
		s = strings.ToUpper(s[:1]) + s[1:]
	}
	return s
}

func defaultDigest(t testing.TB) string {
	g, err := tdp.DefaultGenerator(gotch.CPU)
	require.NoError(t, err)
	s, err := g.State()
	require.NoError(t, err)
	b, err := tdp.ToSlice[uint8](s)
	require.NoError(t, err)
	return digest([][]uint8{b})
}

func genDigest(t testing.TB, g *data.Generator) string {
	if g == nil {
		return defaultDigest(t)
	}
	return digest([][]uint8{g.State()})
}

// samplerLines gives what testdata/gen_samplers.py prints.
func samplerLines(t testing.TB) []string {
	var out []string
	line := func(label string, values ...any) {
		s := label + ":"
		for _, v := range values {
			s += " " + py(v)
		}
		out = append(out, s)
	}
	both := []bool{true, false}
	for _, n := range []int{0, 1, 2, 3, 10, 31, 100, 1000} {
		for _, world := range []int{1, 2, 3, 4, 8} {
			for _, shuffle := range both {
				for _, drop := range both {
					var lists [][]int
					for _, seed := range []int64{0, 1, 42, -7, 1 << 40} {
						for _, epoch := range []int{0, 1, 5} {
							for rank := range world {
								s, err := data.NewDistributedSampler(n, data.DistributedOptions{
									Replicas: world, Rank: rank, NoShuffle: !shuffle, Seed: seed, DropLast: drop})
								require.NoError(t, err)
								s.SetEpoch(epoch)
								x := slices.Collect(s.All())
								require.Len(t, x, s.Len())
								lists = append(lists, x)
							}
						}
					}
					line(fmt.Sprintf("distributed %d %d %s %s", n, world, py(shuffle), py(drop)), digest(lists))
				}
			}
		}
	}
	s, err := data.NewDistributedSampler(10, data.DistributedOptions{Replicas: 3, Rank: 1})
	require.NoError(t, err)
	line("distributed 10 3 rank 1", slices.Collect(s.All()))
	line("randperm", data.NewGenerator(0).Perm(10), digest([][]int{data.NewGenerator(3).Perm(50000)}))

	weights := []float64{0.9, 0.4, 0.05, 0.2, 0.3, 0.1, 0.0, 7.5}
	random := func(n int, o data.RandomOptions) func(*data.Generator) (data.Sampler, error) {
		return func(g *data.Generator) (data.Sampler, error) {
			o.Generator = g
			return data.NewRandomSampler(n, o)
		}
	}
	weighted := func(o data.WeightedOptions) func(*data.Generator) (data.Sampler, error) {
		return func(g *data.Generator) (data.Sampler, error) {
			o.Generator = g
			return data.NewWeightedRandomSampler(weights, o)
		}
	}
	own := func(own bool, seed int64) *data.Generator {
		if own {
			return data.NewGenerator(seed)
		}
		return nil
	}
	for _, mine := range []bool{false, true} {
		for _, c := range []struct {
			name string
			make func(*data.Generator) (data.Sampler, error)
		}{
			{"random", random(10, data.RandomOptions{})},
			{"random 25", random(10, data.RandomOptions{NumSamples: 25})},
			{"random with", random(10, data.RandomOptions{Replacement: true, NumSamples: 70})},
			{"random wide", random(1<<29, data.RandomOptions{Replacement: true, NumSamples: 3})},
			{"subset", func(g *data.Generator) (data.Sampler, error) {
				return data.NewSubsetRandomSampler([]int{5, 3, 8, 1, 13}, g), nil
			}},
			{"weighted", weighted(data.WeightedOptions{NumSamples: 40})},
			{"weighted without", weighted(data.WeightedOptions{NumSamples: 6, NoRepeat: true})},
		} {
			require.NoError(t, tdp.ManualSeed(17))
			g := own(mine, 5)
			s, err := c.make(g)
			require.NoError(t, err)
			line(c.name+" "+py(mine), slices.Collect(s.All()), slices.Collect(s.All()), defaultDigest(t), genDigest(t, g))
		}
	}
	for _, n := range []int{0, 1, 7, 12} {
		for _, size := range []int{1, 3, 4} {
			for _, drop := range both {
				b, err := data.NewBatchSampler(data.NewSequentialSampler(n), size, drop)
				require.NoError(t, err)
				all := [][]int{}
				for x := range b.All() {
					all = append(all, slices.Clone(x))
				}
				line(fmt.Sprintf("batch %d %d %s", n, size, py(drop)), b.Len(), all)
			}
		}
	}
	for _, mine := range []bool{false, true} {
		for _, shuffle := range []bool{false, true} {
			require.NoError(t, tdp.ManualSeed(0))
			g := own(mine, 5)
			l, err := data.NewCollated(ints(10), collect, data.Options{BatchSize: 4, Shuffle: shuffle, Generator: g})
			require.NoError(t, err)
			pass := func() (all [][]int) {
				for b, err := range l.All(context.Background()) {
					require.NoError(t, err)
					all = append(all, b)
				}
				return all
			}
			line("loader "+py(mine)+" "+py(shuffle), l.Len(), pass(), pass(), defaultDigest(t), genDigest(t, g))
		}
	}
	for _, mine := range []bool{false, true} {
		require.NoError(t, tdp.ManualSeed(3))
		g := own(mine, 42)
		indices := func(parts []*data.Subset[int], err error) (all [][]int) {
			require.NoError(t, err)
			for _, p := range parts {
				all = append(all, p.Indices())
			}
			return all
		}
		a := indices(data.RandomSplit(ints(10), []int{3, 7}, g))
		b := indices(data.RandomSplitFractions(ints(31), []float64{0.3, 0.3, 0.4}, g))
		line("split "+py(mine), a, b, defaultDigest(t), genDigest(t, g))
	}
	return out
}

func TestSamplersGolden(t *testing.T) {
	want, err := os.ReadFile("testdata/samplers.txt")
	require.NoError(t, err)
	require.Equal(t, string(want), strings.Join(samplerLines(t), "\n")+"\n")
}

// The golden file is what the Python at hand says today.
func TestSamplersLive(t *testing.T) {
	script, err := os.ReadFile("testdata/gen_samplers.py")
	require.NoError(t, err)
	require.Equal(t, testenv.RunPython(t, string(script)), strings.Join(samplerLines(t), "\n")+"\n")
}

// A random grid against Python, indices printed in full.
func TestDistributedSamplerLive(t *testing.T) {
	type config struct {
		N, World, Rank int
		Seed           int64
		Epoch          int
		Shuffle, Drop  bool
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var configs []config
	var got [][]int
	for range 200 {
		c := config{N: rng.IntN(300), World: 1 + rng.IntN(12), Seed: int64(rng.Uint64() >> 2), Epoch: rng.IntN(1000),
			Shuffle: rng.IntN(3) > 0, Drop: rng.IntN(2) > 0}
		c.Rank = rng.IntN(c.World)
		configs = append(configs, c)
		s, err := data.NewDistributedSampler(c.N, data.DistributedOptions{Replicas: c.World, Rank: c.Rank,
			NoShuffle: !c.Shuffle, Seed: c.Seed, DropLast: c.Drop})
		require.NoError(t, err)
		s.SetEpoch(c.Epoch)
		got = append(got, append([]int{}, slices.Collect(s.All())...))
	}
	arg, err := json.Marshal(configs)
	require.NoError(t, err)
	out := testenv.RunPython(t, `
import json, sys
from torch.utils.data.distributed import DistributedSampler
out = []
for c in json.loads(sys.argv[1]):
    s = DistributedSampler(range(c["N"]), c["World"], c["Rank"], c["Shuffle"], c["Seed"], c["Drop"])
    s.set_epoch(c["Epoch"])
    out.append(list(s))
print(json.dumps(out))`, string(arg))
	var want [][]int
	require.NoError(t, json.Unmarshal([]byte(out), &want))
	for i := range want {
		require.Equal(t, want[i], got[i], "%+v", configs[i])
	}
}

func TestGeneratorStateMoves(t *testing.T) {
	g := data.NewGenerator(9)
	g.Perm(700) // past one block
	out := testenv.RunPython(t, `
import sys, torch
g = torch.Generator()
g.set_state(torch.tensor(list(bytes.fromhex(sys.argv[1])), dtype=torch.uint8))
print(torch.randperm(5, generator=g).tolist(), g.initial_seed(), torch.randn(3, generator=g).dtype)
print(bytes(g.get_state().tolist()).hex())
print(torch.rand(1, generator=g).item(), torch.empty((), dtype=torch.int64).random_(generator=g).item())`, hex.EncodeToString(g.State()))
	lines := strings.Split(strings.TrimSpace(out), "\n")
	require.Equal(t, fmt.Sprintf("%s 9 torch.float32", py(g.Perm(5))), lines[0])
	state, err := hex.DecodeString(lines[1])
	require.NoError(t, err)
	var back data.Generator
	require.NoError(t, back.SetState(state)) // holds a cached normal, which must survive
	require.Equal(t, state, back.State())
	require.Equal(t, lines[2], strconv.FormatFloat(float64(back.Rand()), 'g', -1, 64)+" "+fmt.Sprint(back.Random64()))
	require.Error(t, back.SetState(state[1:]))
	for _, at := range []int{8, 12, 16, 17} { // left, seeded, next: no value may lead outside the block
		damaged := slices.Clone(state)
		damaged[at] ^= 0xff
		if back.SetState(damaged) == nil {
			back.Perm(2000)
		}
	}
}

// A sampler with a generator of its own leaves the default one alone: what else draws from that, at the same time too,
// gets its usual numbers.
func TestWeightedSamplerOwnGenerator(t *testing.T) {
	draw := func(n int) (out []int64) {
		def, err := tdp.DefaultGenerator(gotch.CPU)
		require.NoError(t, err)
		for range n {
			x, err := def.Random64()
			require.NoError(t, err)
			out = append(out, x)
		}
		return out
	}
	require.NoError(t, tdp.ManualSeed(3))
	want := draw(2000)
	indices := func() []int {
		s, err := data.NewWeightedRandomSampler([]float64{1, 2, 3, 4}, data.WeightedOptions{NumSamples: 50, Generator: data.NewGenerator(6)})
		require.NoError(t, err)
		return slices.Collect(s.All())
	}
	alone := indices()
	require.Len(t, alone, 50)
	require.NoError(t, tdp.ManualSeed(3))
	done := make(chan []int)
	go func() {
		var all []int
		for range 40 {
			all = append(all, indices()...)
		}
		done <- all
	}()
	require.Equal(t, want, draw(2000))
	require.Equal(t, slices.Repeat(alone, 40), <-done)
}

func TestSamplerErrors(t *testing.T) {
	_, err := data.NewDistributedSampler(10, data.DistributedOptions{Replicas: 3, Rank: 3})
	require.ErrorContains(t, err, "Invalid rank 3, rank should be in the interval [0, 2]")
	_, err = data.NewDistributedSampler(10, data.DistributedOptions{Replicas: -1})
	require.Error(t, err)
	t.Setenv("WORLD_SIZE", "4")
	t.Setenv("RANK", "2")
	s, err := data.NewDistributedSampler(10, data.DistributedOptions{NoShuffle: true})
	require.NoError(t, err)
	require.Equal(t, []int{2, 6, 0}, slices.Collect(s.All()))
	t.Setenv("RANK", "x")
	_, err = data.NewDistributedSampler(10, data.DistributedOptions{})
	require.ErrorContains(t, err, `RANK="x"`)
	for _, w := range [][]float64{nil, {0, 0}, {1, -1}, {1, nan()}} {
		_, err := data.NewWeightedRandomSampler(w, data.WeightedOptions{})
		require.Error(t, err, "%v", w)
	}
	_, err = data.NewWeightedRandomSampler([]float64{1, 2}, data.WeightedOptions{NumSamples: 3, NoRepeat: true})
	require.ErrorContains(t, err, "without replacement")
	_, err = data.NewRandomSampler(0, data.RandomOptions{NumSamples: 1})
	require.Error(t, err)
	_, err = data.NewBatchSampler(data.NewSequentialSampler(3), 0, false)
	require.ErrorContains(t, err, "batch_size")
	_, err = data.NewSubset(ints(3), []int{0, 3})
	var out *data.IndexError
	require.ErrorAs(t, err, &out)
	_, err = data.RandomSplit(ints(3), []int{1, 1}, nil)
	require.ErrorContains(t, err, "Sum of input lengths")
	_, err = data.RandomSplitFractions(ints(3), []float64{0.5, 0.6}, nil)
	require.Error(t, err)
}

func nan() float64 { z := 0.0; return z / z }

func TestEvalSamplerIsExact(t *testing.T) {
	for n := range 40 {
		for world := 1; world < 9; world++ {
			seen := make([]int, n)
			for rank := range world {
				s, err := data.NewEvalSampler(n, data.DistributedOptions{Replicas: world, Rank: rank})
				require.NoError(t, err)
				count := 0
				for i := range s.All() {
					seen[i]++
					count++
				}
				require.Equal(t, s.Len(), count)
				require.InDelta(t, float64(n)/float64(world), count, 1)
			}
			for i, c := range seen {
				require.Equal(t, 1, c, "sample %d of %d over %d ranks", i, n, world)
			}
		}
	}
}

func TestCurriculumSampler(t *testing.T) {
	scores := make([]float64, 100)
	for i := range scores {
		scores[i] = float64((i * 37) % 100)
	}
	for _, world := range []int{1, 3} {
		seen := map[int]bool{}
		last := 0
		for epoch := range 12 {
			var all []int
			for rank := range world {
				s, err := data.NewCurriculumSampler(scores, data.LinearPace(0.2, 10), data.DistributedOptions{Replicas: world, Rank: rank, DropLast: true})
				require.NoError(t, err)
				s.SetEpoch(epoch)
				got := slices.Collect(s.All())
				require.Len(t, got, s.Len())
				all = append(all, got...)
			}
			pool := 20 + 8*min(epoch, 10)
			require.Equal(t, pool/world*world, len(all))
			for _, i := range all {
				require.Less(t, scores[i], float64(pool), "epoch %d visits a sample that is too hard", epoch)
				seen[i] = true
			}
			slices.Sort(all)
			require.Len(t, slices.Compact(all), pool/world*world, "a sample twice")
			require.GreaterOrEqual(t, pool, last)
			last = pool
		}
		require.Len(t, seen, 100)
	}
	_, err := data.NewCurriculumSampler([]float64{1, nan()}, nil, data.DistributedOptions{})
	require.ErrorContains(t, err, "sample 1")
}
