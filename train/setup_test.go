package train

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
)

// TestMain also lets this binary be a training job of its own, which TestSIGTERM starts and stops.
func TestMain(m *testing.M) {
	os.Exit(launch.Main(func(ctx context.Context) error {
		if dir := os.Getenv("GODDP_TRAIN_JOB"); dir != "" {
			return launch.Run(ctx, 2, func(ctx context.Context, _ launch.Env) error { return slowJob(ctx, dir) })
		}
		return launch.Exit(m.Run())
	}))
}

// ranks runs fn for every rank of a Gloo group in this process, each rank on a thread of its own, and gives their errors.
func ranks(t *testing.T, size int, fn func(pg *torchddp.ProcessGroup) error) []error {
	t.Helper()
	store, err := torchddp.NewHashStore()
	require.NoError(t, err)
	t.Cleanup(func() { _ = store.Close() })
	var wg sync.WaitGroup
	errs := make([]error, size)
	for rank := range size {
		wg.Go(func() {
			runtime.LockOSThread()
			pg, err := torchddp.InitProcessGroup(context.Background(), torchddp.InitOptions{
				Backend: torchddp.Gloo, Store: store, Rank: rank, WorldSize: size, Timeout: time.Minute, GlooInterfaces: []string{"lo"},
			})
			if err == nil {
				err = fn(pg)
				err = errors.Join(err, pg.Destroy())
			}
			errs[rank] = err
		})
	}
	wg.Wait()
	return errs
}

// group is ranks for those that must not fail.
func group(t *testing.T, size int, fn func(pg *torchddp.ProcessGroup) error) {
	t.Helper()
	for rank, err := range ranks(t, size, fn) {
		require.NoError(t, err, "rank %d", rank)
	}
}

// setup is what a test trains: a small classifier in double precision on made-up samples.
type setup struct {
	samples, batch int // 0: 40, 4
	evals          int // samples to evaluate with
	dropout        bool
	evalSampler    func(n int, o data.DistributedOptions) (data.Sampler, error)
}

// rank is one rank's things.
type rank struct {
	pg           *torchddp.ProcessGroup
	model        nn.Module
	ddp          *torchddp.DDP
	opt          *optim.SGD
	evals        *data.TensorDataset
	loader, eval *data.DataLoader[*data.Batch]
	closers      []io.Closer
}

func (s setup) rank(pg *torchddp.ProcessGroup) (r *rank, err error) {
	r = &rank{pg: pg}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	layers := []nn.Module{nn.Must(nn.NewLinear(4, 8, nn.LinearOptions{})), nn.NewTanh(), nn.Must(nn.NewLinear(8, 3, nn.LinearOptions{}))}
	if s.dropout {
		layers = slices.Insert(layers, 2, nn.Module(nn.Must(nn.NewDropout(0.3))))
	}
	r.model = nn.NewSequential(layers...)
	if err := r.model.To(gotch.CPU, gotch.Double); err != nil {
		return r, err
	}
	// Ranks in one process share a generator, whose order of use is anyone's guess.
	k := 0
	for p := range r.model.Parameters() {
		v := make([]float64, p.Numel())
		for i := range v {
			k++
			v[i] = float64(k*7919%101)/101 - 0.5
		}
		w := ts.MustOfSlice(v).MustReshape(p.MustSize(), true)
		if err := tdp.Copy(p, w, false); err != nil {
			return r, err
		}
		w.MustDrop()
	}
	if r.ddp, err = torchddp.NewDDP(r.model, pg, torchddp.DDPOptions{}); err != nil {
		return r, err
	}
	r.closers = append(r.closers, r.ddp)
	if r.opt, err = optim.NewSGD(r.model.NamedParameters(), optim.SGDOptions{LR: 0.1, Momentum: 0.9}); err != nil {
		return r, err
	}
	r.closers = append(r.closers, r.opt)
	if s.samples == 0 {
		s.samples = 40
	}
	if s.batch == 0 {
		s.batch = 4
	}
	if s.evalSampler == nil {
		s.evalSampler = func(n int, o data.DistributedOptions) (data.Sampler, error) { return data.NewEvalSampler(n, o) }
	}
	load := func(n, from int, sampler data.Sampler, err error) (*data.TensorDataset, *data.DataLoader[*data.Batch], error) {
		if err != nil {
			return nil, nil, err
		}
		set, err := samples(n, from)
		if err != nil {
			return nil, nil, err
		}
		r.closers = append(r.closers, set)
		loader, err := data.NewDataLoader(set, data.Options{BatchSize: s.batch, Sampler: sampler})
		if err == nil {
			r.closers = append(r.closers, loader)
		}
		return set, loader, err
	}
	place := data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()}
	sampler, err := data.NewDistributedSampler(s.samples, place)
	if _, r.loader, err = load(s.samples, 0, sampler, err); err != nil || s.evals == 0 {
		return r, err
	}
	evalSampler, err := s.evalSampler(s.evals, place)
	r.evals, r.eval, err = load(s.evals, 1000, evalSampler, err)
	return r, err
}

// samples makes n points of the plane and beyond, and their classes.
func samples(n, from int) (*data.TensorDataset, error) {
	x, y := make([]float64, 4*n), make([]int64, n)
	for i := range x {
		x[i] = float64((i+4*from)*31%97)/48 - 1
	}
	for i := range y {
		s := 1.5 + x[4*i] + x[4*i+1]
		y[i] = int64(max(0, min(2, s)))
	}
	return data.NewTensorDataset(ts.MustOfSlice(x).MustReshape([]int64{int64(n), 4}, true), ts.MustOfSlice(y))
}

func (r *rank) task() Task[*data.Batch] {
	return Task[*data.Batch]{Model: r.ddp, Optimizer: r.opt, Train: r.loader, Eval: r.eval, Step: Supervised(nn.CrossEntropyLoss{}, Accuracy())}
}

// train runs the trainer.
func (r *rank) train(ctx context.Context, o Options) error {
	trainer, err := New(r.task(), o)
	if err != nil {
		return err
	}
	return trainer.Run(ctx)
}

func (r *rank) close() {
	for _, c := range slices.Backward(r.closers) {
		_ = c.Close()
	}
	r.model.Drop()
}

// weights are all the model's parameters in a row.
func (r *rank) weights() (out []float64) {
	for p := range r.model.Parameters() {
		out = append(out, nn.Must(tdp.ToSlice[float64](p))...)
	}
	return out
}

// each makes the rank's things, calls fn and frees them.
func (s setup) each(fn func(r *rank) error) func(pg *torchddp.ProcessGroup) error {
	return func(pg *torchddp.ProcessGroup) error {
		r, err := s.rank(pg)
		if err != nil {
			return err
		}
		defer r.close()
		return fn(r)
	}
}

// quiet is a logger for tests whose log does not matter.
var quiet = slog.New(slog.DiscardHandler)

// snapshotOf reads a snapshot without what differs from run to run: the times among the figures.
func snapshotOf(t *testing.T, path string) map[string]any {
	t.Helper()
	v, err := checkpoint.Load(path, checkpoint.LoadOptions{})
	require.NoError(t, err)
	out := map[string]any{}
	flatten(t, "", v, out)
	for i := range parts + 1 {
		delete(out, fmt.Sprintf(".train.epoch.%d", figSeconds+i))
	}
	return out
}

// flatten gives every leaf of a value a name.
func flatten(t *testing.T, name string, v any, out map[string]any) {
	switch v := v.(type) {
	case *checkpoint.StateDict:
		for k, x := range v.All() {
			flatten(t, name+"."+k, x, out)
		}
	case *checkpoint.Dict:
		for k, x := range v.All() {
			flatten(t, fmt.Sprint(name, ".", k), x, out)
		}
	case *checkpoint.List:
		for i, x := range v.Items {
			flatten(t, fmt.Sprint(name, ".", i), x, out)
		}
	case *checkpoint.Tuple:
		for i, x := range v.Items {
			flatten(t, fmt.Sprint(name, ".", i), x, out)
		}
	case *ts.Tensor:
		info, err := tdp.Describe(v)
		require.NoError(t, err)
		b := make([]byte, int64(info.ElementSize)*info.Numel)
		require.NoError(t, tdp.ToBytes(v, b))
		out[name] = fmt.Sprintf("%v %v %x", info.DType, info.Shape, b)
	default:
		out[name] = v
	}
}

// requireSame names what differs, which is easier to read than what a whole snapshot looks like.
func requireSame(t *testing.T, want, got map[string]any) {
	t.Helper()
	var differ []string
	for k, v := range want {
		if !reflect.DeepEqual(got[k], v) {
			differ = append(differ, fmt.Sprintf("%s: %.80v, not %.80v", k, got[k], v))
		}
	}
	slices.Sort(differ)
	require.Empty(t, differ)
	require.Len(t, got, len(want))
}
