package program

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/train"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch/ts"
)

func TestFloatIsPythons(t *testing.T) {
	values := []float64{0, 1, 100, 12.5, 2.2550809383392334, 0.1, 1.0 / 3, 9.765625, 100.0 * 2 / 3, 7.035156726837158}
	var script strings.Builder
	var want []string
	for _, v := range values {
		fmt.Fprintf(&script, "print(float.fromhex('%x'))\n", v)
		want = append(want, Float(v))
	}
	require.Equal(t, want, strings.Fields(testenv.RunPython(t, script.String())))
	require.Equal(t, "NaN", Float(nan()))
}

func nan() float64 { zero := 0.0; return zero / zero }

func TestTally(t *testing.T) {
	var tally Tally
	loss, accuracy := tally.Read()
	require.Zero(t, loss)
	require.Zero(t, accuracy)
	for _, b := range []struct {
		loss           float32
		right, samples int
	}{{2.5, 3, 4}, {0.5, 1, 2}} {
		l, err := ts.OfSlice([]float32{b.loss})
		require.NoError(t, err)
		r, err := ts.OfSlice([]int64{int64(b.right)})
		require.NoError(t, err)
		result := train.Result{Loss: l.MustSqueeze(true), Samples: b.samples, Sums: []train.Sum{{Name: "accuracy", Total: r.MustSqueeze(true)}}}
		require.NoError(t, tally.add(result))
		result.Loss.MustDrop()
		result.Sums[0].Total.MustDrop()
	}
	loss, accuracy = tally.Read()
	require.Equal(t, 1.5, loss, "of batches, not of samples, as the tutorials have it")
	require.Equal(t, 100.0*4/6, accuracy)
	tally.Reset()
	require.Equal(t, Tally{}, tally)
	require.ErrorContains(t, tally.add(train.Result{}), "accuracy")
}

func TestParse(t *testing.T) {
	var workers int
	var r Ranks
	command := func() Command {
		r = Ranks{Flag: "world-size"}
		return Command{Name: "p", Usage: "Does it.", Ranks: &r, Check: func() error { return nil },
			Bind: func(f *pflag.FlagSet) { f.IntVar(&workers, "num-workers", 1, "goroutines") }}
	}
	var out bytes.Buffer
	require.NoError(t, command().Parse([]string{"--num_workers", "3", "--world_size=4", "--local-rank=1"}, &out))
	require.Equal(t, 3, workers)
	require.Equal(t, "4", r.Count)
	require.ErrorIs(t, command().Parse([]string{"--help"}, &out), pflag.ErrHelp)
	require.Contains(t, out.String(), "Does it.\n\nUsage:\n  p [flags]")
	require.NotContains(t, out.String(), "local-rank")
	require.ErrorContains(t, command().Parse([]string{"more"}, &out), `unexpected argument "more"`)
	require.ErrorContains(t, command().Parse([]string{"--backend", "mpi"}, &out), "--backend must be auto, nccl or gloo")
	require.ErrorContains(t, command().Parse([]string{"--master-port", "-1"}, &out), "--master-port must lie between")
}

func TestRanksAgree(t *testing.T) {
	env := launch.Env{WorldSize: 2}
	require.NoError(t, (&Ranks{Flag: "world-size", Count: "auto"}).agree(env))
	require.NoError(t, (&Ranks{Flag: "world-size", Count: "2"}).agree(env))
	require.NoError(t, (&Ranks{Flag: "nproc-per-node", Count: "4"}).agree(env))
	require.ErrorContains(t, (&Ranks{Flag: "world-size", Count: "4"}).agree(env), "this job was started with 2 ranks")
}

func TestThreads(t *testing.T) {
	t.Setenv("OMP_NUM_THREADS", "")
	r := Ranks{Backend: "gloo"}
	require.Equal(t, []string{fmt.Sprintf("OMP_NUM_THREADS=%d", Threads(1))}, r.threads(1))
	require.Equal(t, []string{"OMP_NUM_THREADS=1"}, r.threads(1<<20), "never none")
	t.Setenv("OMP_NUM_THREADS", "5")
	require.Empty(t, r.threads(1), "the user's own word")
}

func TestImages(t *testing.T) {
	m := Images{Load: vision.MNIST, Synthetic: true, Size: 10}
	require.NoError(t, m.Check())
	require.NoError(t, m.Prepare(context.Background()))
	set, err := m.Set(context.Background(), false, nil)
	require.NoError(t, err)
	require.Equal(t, 10, set.Len())
	set, err = m.Set(context.Background(), true, nil)
	require.NoError(t, err)
	require.Equal(t, 2, set.Len())
	require.Error(t, (&Images{Size: 1}).Check())
	require.Error(t, (&Images{Size: -1, Synthetic: true}).Check())
	require.Error(t, (&Images{Download: true, Synthetic: true}).Check())

	m = Images{Load: vision.MNIST, Dir: t.TempDir()}
	err = m.Prepare(context.Background())
	require.Equal(t, 2, launch.ExitCode(err))
	require.ErrorContains(t, err, m.Dir)
}
