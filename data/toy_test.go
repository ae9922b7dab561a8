package data_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

func sum(t testing.TB, x *ts.Tensor) string {
	info, err := tdp.Describe(x)
	require.NoError(t, err)
	b := make([]byte, info.Numel*int64(info.ElementSize))
	require.NoError(t, tdp.ToBytes(x, b))
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:8])
}

func defaultState(t testing.TB) string {
	g, err := tdp.DefaultGenerator(gotch.CPU)
	require.NoError(t, err)
	s, err := g.State()
	require.NoError(t, err)
	return sum(t, s)
}

// The seed program's job: seed, data set, model, then batches in the sampler's order. Everything drawn is Python's.
const toyPython = `
import hashlib, torch
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
def h(t): return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16]
class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]
    def __len__(self): return self.size
    def __getitem__(self, i): return self.data[i]
def job(seed):
    torch.manual_seed(seed)
    d = MyTrainDataset(2048)
    print(h(torch.stack([x for x, _ in d.data])), h(torch.stack([y for _, y in d.data])), h(torch.default_generator.get_state()))
    m = torch.nn.Linear(20, 1)
    print(h(torch.default_generator.get_state()))
    for rank in range(3):
        s = DistributedSampler(d, num_replicas=3, rank=rank)
        l = DataLoader(d, batch_size=32, shuffle=False, sampler=s)
        for epoch in range(2):
            s.set_epoch(epoch)
            for x, y in l: print(h(x), h(y))
    print(h(torch.default_generator.get_state()))
job(0)
job(42)
`

// toyRun is the same job in Go.
func toyRun(t testing.TB, seed uint64, workers int) (got []string) {
	require.NoError(t, tdp.ManualSeed(seed))
	d, err := data.NewRandomToy(2048)
	require.NoError(t, err)
	defer d.Close()
	got = append(got, sum(t, d.Tensors()[0])+" "+sum(t, d.Tensors()[1])+" "+defaultState(t))
	// What Linear(20, 1) draws: 20 weights and a bias, uniform.
	ts.MustRand([]int64{21}, gotch.Float, gotch.CPU).MustDrop()
	got = append(got, defaultState(t))
	for rank := range 3 {
		s, err := data.NewDistributedSampler(d.Len(), data.DistributedOptions{Replicas: 3, Rank: rank})
		require.NoError(t, err)
		l, err := data.NewDataLoader(d, data.Options{BatchSize: 32, Sampler: s, Workers: workers})
		require.NoError(t, err)
		for epoch := range 2 {
			s.SetEpoch(epoch)
			for b, err := range l.All(context.Background()) {
				require.NoError(t, err)
				got = append(got, sum(t, b.Input())+" "+sum(t, b.Target()))
			}
		}
		require.NoError(t, l.Close())
	}
	return append(got, defaultState(t))
}

func TestRandomToyIsPythons(t *testing.T) {
	want := strings.TrimSpace(testenv.RunPython(t, toyPython))
	for _, workers := range []int{0, 3} {
		got := append(toyRun(t, 0, workers), toyRun(t, 42, workers)...)
		require.Equal(t, want, strings.Join(got, "\n"))
	}
}

// What Python printed once, for machines without it: the data set and the generator's state with seed 0, and a digest
// of the whole job.
func TestRandomToyGolden(t *testing.T) {
	got := toyRun(t, 0, 2)
	h := sha256.Sum256([]byte(strings.Join(got, "\n")))
	require.Equal(t, "fca4c15761b6d688 2f207353cadcec57 dd47dfc672017931", got[0])
	require.Equal(t, "ede3f955bd8652a15d00f4776020b29f4753279285503600f6eba311092540c3", hex.EncodeToString(h[:]))
}
