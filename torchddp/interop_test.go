package torchddp

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// peerScript is one rank of a mixed group: Python's DDP, with the same steps as mixedRank below.
const peerScript = `
import datetime, os, sys, torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
rank, world, port, steps, view = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5] == "view"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
torch.manual_seed(rank)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(20, 64)
        self.b = nn.Linear(64, 1)
        self.register_buffer("seen", torch.full((1,), float(rank)))
    def forward(self, x):
        return self.b(torch.relu(self.a(x)))
net = Net()
ddp = DDP(net, gradient_as_bucket_view=view)
for k in range(steps):
    torch.manual_seed(1000 + 10 * k + rank)
    x, y = torch.rand(32, 20), torch.rand(32, 1)
    out = ddp(x)
    for p in net.parameters(): p.grad = None
    nn.functional.mse_loss(out, y).backward()
    with torch.no_grad():
        for p in net.parameters(): p.add_(p.grad, alpha=-0.01)
for n, p in net.named_parameters():
    print(n, p.detach().double().sum().item().hex(), p.detach().numpy().tobytes().hex()[:64])
print("seen", net.seen.item())
dist.barrier()
dist.destroy_process_group()
`

// linear is a two-layer network made of plain ops, with torch.nn's names and initial numbers.
func twoLayers(t testing.TB, rank int) *toy {
	seed := func(shape []int64, bound float64) *ts.Tensor {
		x := ts.MustEmpty(shape, gotch.Float, gotch.CPU)
		if err := NoGrad(func() error { x.MustUniform_(-bound, bound); return nil }); err != nil {
			t.Fatal(err)
		}
		if err := tdp.SetRequiresGrad(x, true); err != nil {
			t.Fatal(err)
		}
		return x
	}
	a, ab := seed([]int64{64, 20}, 0.1), seed([]int64{64}, 0.1)
	b, bb := seed([]int64{1, 64}, 0.1), seed([]int64{1}, 0.1)
	seen, err := tdp.FromSlice([]float32{float32(rank)}, []int64{1}, gotch.CPU)
	require.NoError(t, err)
	return &toy{
		params:  []Named{{"a.weight", a}, {"a.bias", ab}, {"b.weight", b}, {"b.bias", bb}},
		buffers: []Named{{"seen", seen}},
		forward: func(x *ts.Tensor) *ts.Tensor {
			h := ts.MustLinear(x, a, ab)
			return ts.MustLinear(h.MustRelu(true), b, bb)
		},
	}
}

// mixedRank is the Go rank of a mixed group. It gives lines like the peer's.
func mixedRank(t testing.TB, rank, world, port, steps int, view bool) ([]string, error) {
	pg, err := InitProcessGroup(context.Background(), InitOptions{
		InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=%d&world_size=%d", port, rank, world), Timeout: time.Minute,
	})
	if err != nil {
		return nil, err
	}
	defer pg.Destroy()
	if err := ManualSeed(uint64(rank)); err != nil {
		return nil, err
	}
	net := twoLayers(t, rank)
	ddp, err := NewDDP(net, pg, DDPOptions{GradientAsBucketView: view})
	if err != nil {
		return nil, err
	}
	defer ddp.Close()
	sgd, err := optim.NewSGD(net.NamedParameters(), optim.SGDOptions{LR: 0.01})
	if err != nil {
		return nil, err
	}
	for k := range steps {
		if err := ManualSeed(uint64(1000 + 10*k + rank)); err != nil {
			return nil, err
		}
		x := ts.MustRand([]int64{32, 20}, gotch.Float, gotch.CPU)
		y := ts.MustRand([]int64{32, 1}, gotch.Float, gotch.CPU)
		out, err := ddp.Forward(x)
		if err != nil {
			return nil, err
		}
		if err := sgd.ZeroGrad(true); err != nil {
			return nil, err
		}
		const mean = 1
		if err := ddp.Backward(out.MustMseLoss(y, mean, true)); err != nil {
			return nil, err
		}
		if err := sgd.Step(); err != nil {
			return nil, err
		}
	}
	var lines []string
	for _, p := range net.params {
		d := p.Tensor.MustDetach(false)
		raw, err := tdp.HostBytes(d.MustContiguous(false))
		if err != nil {
			return nil, err
		}
		sum := d.MustTotype(gotch.Double, false).MustSum(gotch.Double, true).Float64Values()[0]
		lines = append(lines, fmt.Sprintf("%s %s %.64s", p.Name, hexFloat(sum), fmt.Sprintf("%x", raw)))
	}
	lines = append(lines, fmt.Sprintf("seen %.1f", values(net.buffers[0].Tensor)[0]))
	return lines, pg.Barrier()
}

// hexFloat writes a float as Python's float.hex.
func hexFloat(f float64) string {
	s := fmt.Sprintf("%.13x", f) // 0x1.8p+01 in Go, 0x1.8p+1 in Python
	mantissa, exponent, _ := strings.Cut(s, "p")
	return mantissa + "p" + exponent[:1] + strings.TrimPrefix(exponent[1:], "0")
}

func TestMixedGroupWithPython(t *testing.T) {
	python := testenv.Python(t)
	require.NoError(t, SetNumThreads(1))
	for _, c := range []struct {
		name          string
		goRank, world int
		view          bool
	}{
		{"Go is rank 1", 1, 2, false},
		{"Go is rank 0", 0, 2, false},
		{"bucket views", 1, 2, true},
		{"one Go rank of three", 1, 3, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			port := testenv.FreePort(t)
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel()
			type result struct {
				lines []string
				err   error
			}
			results := make([]chan result, c.world)
			for rank := range c.world {
				results[rank] = make(chan result, 1)
				go func() {
					if rank == c.goRank {
						runtime.LockOSThread()
						lines, err := mixedRank(t, rank, c.world, port, 20, c.view)
						results[rank] <- result{lines, err}
						return
					}
					view := "copy"
					if c.view {
						view = "view"
					}
					cmd := exec.CommandContext(ctx, python, "-c", peerScript, fmt.Sprint(rank), fmt.Sprint(c.world), fmt.Sprint(port), "20", view)
					cmd.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1")
					var stderr strings.Builder
					cmd.Stderr = &stderr
					out, err := cmd.Output()
					if err != nil {
						err = fmt.Errorf("%w: %s", err, stderr.String())
					}
					results[rank] <- result{lines(string(out)), err}
				}()
			}
			var first []string
			for rank := range c.world {
				r := <-results[rank]
				require.NoError(t, r.err, "rank %d", rank)
				require.NotEmpty(t, r.lines)
				if rank == 0 {
					first = r.lines
				}
				require.Equal(t, first, r.lines, "rank %d against rank 0", rank)
			}
		})
	}
}

// TestMixedGroupMismatch: both sides say that the models differ, neither hangs.
func TestMixedGroupMismatch(t *testing.T) {
	python := testenv.Python(t)
	port := testenv.FreePort(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, "-c", peerScript, "0", "2", fmt.Sprint(port), "1", "copy")
	cmd.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pg, err := InitProcessGroup(ctx, InitOptions{InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=1&world_size=2", port), Timeout: 30 * time.Second})
	require.NoError(t, err)
	_, err = NewDDP(product(1), pg, DDPOptions{})
	var m *MismatchError
	require.ErrorAs(t, err, &m)
	require.Equal(t, "count", m.What)
	require.Contains(t, m.Detail, "rank 0: 4 parameters; rank 1: 1 parameters")
	require.Error(t, cmd.Wait())
	require.Contains(t, stderr.String(), "DDP expects same model across all ranks")
	require.NoError(t, pg.Destroy())
}

func lines(text string) (list []string) {
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		list = append(list, s.Text())
	}
	return list
}
