package checkpoint

import (
	"encoding/json"
	"iter"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/internal/cptest"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
)

// fakeModule has parameters and buffers by name, and nothing else.
type fakeModule struct {
	params, buffers *StateDict
	versions        map[string]int64
	order           []string
}

func (m *fakeModule) ClassName() string                              { return "Net" }
func (m *fakeModule) NamedParameters() iter.Seq2[string, *ts.Tensor] { return m.params.All() }
func (m *fakeModule) NamedBuffers() iter.Seq2[string, *ts.Tensor]    { return m.buffers.All() }

type versioned struct{ *fakeModule }

func (m versioned) ModuleVersions() iter.Seq2[string, int64] {
	return func(yield func(string, int64) bool) {
		for _, p := range m.order {
			if !yield(p, m.versions[p]) {
				return
			}
		}
	}
}

func zeros(t testing.TB, dtype gotch.DType, shape ...int64) *ts.Tensor {
	t.Helper()
	x, err := tdp.Empty(shape, dtype, gotch.CPU, false)
	require.NoError(t, err)
	b, err := tdp.HostBytes(x)
	require.NoError(t, err)
	clear(b)
	runtime.KeepAlive(x)
	return x
}

// net is the Python class Net below.
func net(t testing.TB) versioned {
	m := &fakeModule{params: NewStateDict(), buffers: NewStateDict(), order: []string{"", "conv", "bn", "head", "head.0", "head.1"}}
	m.params.Set("scale", zeros(t, gotch.Float))
	m.params.Set("conv.weight", zeros(t, gotch.Float, 4, 3, 3, 3))
	m.params.Set("bn.weight", zeros(t, gotch.Float, 4)).Set("bn.bias", zeros(t, gotch.Float, 4))
	m.params.Set("head.0.weight", zeros(t, gotch.Float, 5, 4)).Set("head.0.bias", zeros(t, gotch.Float, 5))
	m.params.Set("head.1.weight", zeros(t, gotch.Float, 2, 5)).Set("head.1.bias", zeros(t, gotch.Float, 2))
	m.buffers.Set("bn.running_mean", zeros(t, gotch.Float, 4)).Set("bn.running_var", zeros(t, gotch.Float, 4))
	m.buffers.Set("bn.num_batches_tracked", zeros(t, gotch.Int64))
	m.versions = map[string]int64{"bn": 2}
	for _, p := range m.order {
		if p != "bn" {
			m.versions[p] = 1
		}
	}
	return versioned{m}
}

const pyNet = `
import collections, json, sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
torch.manual_seed(1)
m = Net()
`

func TestModuleStateHasPythonsOrder(t *testing.T) {
	var want struct {
		Names    []string
		Versions map[string]int64
		Paths    []string
	}
	dir := t.TempDir()
	fromPython, fromGo := filepath.Join(dir, "python", "net.pt"), filepath.Join(dir, "net.pt")
	require.NoError(t, os.Mkdir(filepath.Dir(fromPython), 0o777))
	out := testenv.RunPython(t, pyNet+`
sd = m.state_dict()
for v in sd.values(): v.zero_()
torch.save({"epoch": 3, "model": sd}, sys.argv[1])
print(json.dumps({"Names": list(sd), "Versions": {k: v["version"] for k, v in sd._metadata.items()}, "Paths": list(sd._metadata)}))`, fromPython)
	require.NoError(t, json.Unmarshal([]byte(out), &want))
	sd := ModuleState(net(t))
	require.Equal(t, want.Names, sd.Names())
	require.Equal(t, want.Versions, maps.Collect(sd.Versions()))
	var paths []string
	for p := range sd.Versions() {
		paths = append(paths, p)
	}
	require.Equal(t, want.Paths, paths)
	require.Equal(t, want.Names, ModuleState(net(t).fakeModule).Names(), "also without ModuleVersions")

	// A model of Go's is the same file as the model of Python's.
	require.NoError(t, Save(fromGo, NewDict().Set("epoch", 3).Set("model", sd)))
	a, err := os.ReadFile(fromPython)
	require.NoError(t, err)
	b, err := os.ReadFile(fromGo)
	require.NoError(t, err)
	cptest.SameButID(t, "net.pt", a, b)
}

// Every way in which a state dict can fail to fit is reported in Python's own words.
func TestStrictErrorsAreWordedAsPythons(t *testing.T) {
	dir := t.TempDir()
	cases := map[string]string{
		"fits":       "pass",
		"missing":    "del sd['conv.weight'], sd['head.1.bias'], sd['bn.running_var']",
		"unexpected": "sd['zzz'] = torch.ones(1); sd['conv.bias'] = torch.ones(4); sd['head.7.weight'] = torch.ones(1); sd['bn.sub.x'] = torch.ones(1); sd['other.weight'] = torch.ones(1)",
		"mismatch":   "sd['conv.weight'] = torch.ones(4, 3, 1, 1); sd['scale'] = torch.ones(2, 2); sd['head.0.bias'] = torch.ones(())",
		"all":        "del sd['conv.weight']; sd['zzz'] = torch.ones(1); sd['bn.bias'] = torch.ones(5)",
		"old":        "del sd['bn.num_batches_tracked']; sd._metadata['bn'] = {'version': 1}",
		"nometa":     "del sd['bn.num_batches_tracked']; del sd._metadata",
		"tracked":    "del sd['bn.num_batches_tracked']",
		"scalar":     "sd['scale'] = torch.tensor([7.0])",
		"dtype":      "sd['conv.weight'] = sd['conv.weight'].double(); sd['bn.weight'] = sd['bn.weight'].half()",
	}
	edits, err := json.Marshal(cases)
	require.NoError(t, err)
	out := testenv.RunPython(t, pyNet+`
import os
results = {}
for name, edit in json.loads(sys.argv[2]).items():
    sd = Net().state_dict()
    exec(edit)
    path = os.path.join(sys.argv[1], name + ".pt")
    torch.save(sd, path)
    for strict in (True, False):
        m, r = Net(), {}
        try:
            k = m.load_state_dict(torch.load(path), strict=strict)
            r["missing"], r["unexpected"] = k.missing_keys, k.unexpected_keys
            r["sum"] = sum(v.double().sum().item() for v in m.state_dict().values())
        except RuntimeError as e:
            r["error"] = str(e)
        results[name + str(strict)] = r
print(json.dumps(results))`, dir, string(edits))
	var results map[string]struct {
		Error               string
		Missing, Unexpected []string
		Sum                 float64
	}
	require.NoError(t, json.Unmarshal([]byte(out), &results))
	require.Len(t, results, 2*len(cases))
	for name := range cases {
		for _, strict := range []bool{true, false} {
			want := results[name+map[bool]string{true: "True", false: "False"}[strict]]
			sd, err := LoadStateDictFile(filepath.Join(dir, name+".pt"), LoadOptions{})
			require.NoError(t, err)
			m := net(t)
			got, err := LoadStateDict(m, sd, strict)
			if want.Error != "" {
				require.EqualError(t, err, want.Error, "%s strict=%v", name, strict)
				for _, x := range m.params.All() {
					require.Zero(t, sum(t, x), "nothing is copied when something does not fit")
				}
				continue
			}
			require.NoError(t, err, "%s strict=%v", name, strict)
			require.Equal(t, strings.Join(want.Missing, " "), strings.Join(got.Missing, " "), name)
			require.Equal(t, strings.Join(want.Unexpected, " "), strings.Join(got.Unexpected, " "), name)
			if name == "fits" || name == "scalar" || name == "dtype" {
				total := 0.0
				for _, x := range ModuleState(m).All() {
					total += sum(t, x)
				}
				require.InDelta(t, want.Sum, total, 1e-4, name)
			}
		}
	}
}

func sum(t testing.TB, x *ts.Tensor) float64 {
	t.Helper()
	d, err := tdp.Describe(x)
	require.NoError(t, err)
	wide, err := tdp.Empty(d.Shape, gotch.Double, gotch.CPU, false)
	require.NoError(t, err)
	require.NoError(t, tdp.Copy(wide, x, false))
	v, err := tdp.ToSlice[float64](wide)
	require.NoError(t, err)
	s := 0.0
	for _, f := range v {
		s += f
	}
	return s
}

// DDP's state_dict has "module." before every name.
func TestDDPPrefix(t *testing.T) {
	bare := ModuleState(net(t))
	wrapped := bare.AddPrefix(DDPPrefix)
	path := filepath.Join(t.TempDir(), "w.pt")
	require.NoError(t, Save(path, wrapped))
	require.Equal(t, "ok\n", testenv.RunPython(t, pyNet+`
class DDP(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.module = m
got, want = torch.load(sys.argv[1]), DDP(m).state_dict()
assert list(got) == list(want) and got._metadata == want._metadata and list(got._metadata) == list(want._metadata), (got._metadata, want._metadata)
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
consume_prefix_in_state_dict_if_present(got, "module.")
m.load_state_dict(got)
print("ok")`, path))
	back := wrapped.StripPrefix(DDPPrefix)
	require.Equal(t, bare.Names(), back.Names())
	require.Equal(t, maps.Collect(bare.Versions()), maps.Collect(back.Versions()))

	_, err := LoadStateDict(net(t), wrapped, true)
	require.ErrorContains(t, err, `load sd.StripPrefix("module.")`)
}
