package ckptool

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/internal/testenv"
)

const data = "../ptfile/testdata/"

func show(t *testing.T, path string, opt ShowOptions) string {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, Show(&out, path, opt))
	return out.String()
}

func TestShow(t *testing.T) {
	out := show(t, data+"train_adamw.ckpt", ShowOptions{Verify: true})
	for _, want := range []string{
		"train_adamw.ckpt: torch.save, 20.", "41 tensors, 5820 elements", "38 float32", "the checksums are right", "iter_no    3\n",
		"  conv.weight             float32 [4, 3, 3, 3]  432 B\n", "module versions: 1 for 6 modules, 2 for bn", "betas                   (0.9, 0.999)",
		"params                  [1, 2, 3, 4]", "rng        uint8 [5056]",
	} {
		require.Contains(t, out, want)
	}
	require.Contains(t, show(t, data+"train_sgd.ckpt", ShowOptions{Key: "optimizer/param_groups"}), "momentum        0.9")
	require.Contains(t, show(t, data+"legacy.ckpt", ShowOptions{Verify: true}), "the format before 1.6")
	require.Contains(t, show(t, data+"legacy.ckpt", ShowOptions{Verify: true}), "no checksums")
	require.Contains(t, show(t, data+"cuda.ckpt", ShowOptions{}), "from cuda:0")
	require.Contains(t, show(t, data+"big_endian.ckpt", ShowOptions{}), "big endian")
	views := show(t, data+"views.ckpt", ShowOptions{})
	require.Contains(t, views, "col            float32 [4]  16 B, strides [6], shares storage 0 with 5 more")
	values := show(t, data+"values.ckpt", ShowOptions{})
	require.Contains(t, values, "[0, 1, 255, 256, 65535, 65536, -1, …, -140737488355328: 26 items]")
	require.Contains(t, values, `"line\nbreak"`, "nothing reaches the terminal that could disturb it")

	var b bytes.Buffer
	require.ErrorContains(t, Show(&b, data+"linear.ckpt", ShowOptions{Key: "model"}), `there is no "model"; the keys are weight, bias`)
	require.Error(t, Show(&b, data+"gen_corpus.py", ShowOptions{}))
	require.Error(t, Show(&b, data+"none", ShowOptions{}))
}

func TestConvert(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	var notes, out bytes.Buffer
	err := Convert(data+"train_sgd.ckpt", at("x.safetensors"), ConvertOptions{})
	require.ErrorContains(t, err, "choose a part with --key model or --key ema")
	require.NoFileExists(t, at("x.safetensors"))
	require.ErrorContains(t, Convert(data+"linear.ckpt", at("x.txt"), ConvertOptions{}), "must end in")

	require.NoError(t, Convert(data+"train_sgd.ckpt", at("m.safetensors"), ConvertOptions{Key: "model", Metadata: map[string]string{"run": "7"}}))
	require.Contains(t, show(t, at("m.safetensors"), ShowOptions{Verify: true}), "metadata run: 7")
	require.NoError(t, Convert(at("m.safetensors"), at("m.pt"), ConvertOptions{}))
	differ, err := Diff(&out, at("m.pt"), at("m.safetensors"), DiffOptions{})
	require.NoError(t, err)
	require.False(t, differ, out.String())

	// Strides are made plain, shared memory is told of.
	require.NoError(t, Convert(data+"views.ckpt", at("v.pt"), ConvertOptions{}))
	err = Convert(data+"views.ckpt", at("v.safetensors"), ConvertOptions{Notes: &notes})
	require.ErrorContains(t, err, "pending conjugation")
	v, err := ptfile.Open(data+"views.ckpt", ptfile.ReadOptions{})
	require.NoError(t, err)
	defer v.Close()
	v.Value.(*pickle.Dict).Delete("conj")
	v.Value.(*pickle.Dict).Delete("neg")
	f, err := os.Create(at("w.pt"))
	require.NoError(t, err)
	require.NoError(t, ptfile.Write(f, "w", v.Value, ptfile.WriteOptions{}))
	require.NoError(t, f.Close())
	require.NoError(t, Convert(at("w.pt"), at("w.safetensors"), ConvertOptions{Notes: &notes}))
	require.Contains(t, notes.String(), "base and same share memory")
	out.Reset()
	differ, err = Diff(&out, at("w.pt"), at("w.safetensors"), DiffOptions{})
	require.NoError(t, err)
	require.False(t, differ, out.String())

	require.NoError(t, Convert(data+"ddp.ckpt", at("bare.pt"), ConvertOptions{StripPrefix: "module."}))
	require.NoError(t, Convert(data+"wrapped.ckpt", at("bare2.pt"), ConvertOptions{StripPrefix: "module."}))
	for _, name := range []string{"bare.pt", "bare2.pt"} {
		out.Reset()
		differ, err = Diff(&out, at(name), data+"block.ckpt", DiffOptions{})
		require.NoError(t, err)
		require.False(t, differ, out.String())
	}
	require.NoError(t, Convert(data+"cuda.ckpt", at("cpu.pt"), ConvertOptions{CPU: true}))
	require.NoError(t, Convert(data+"legacy.ckpt", at("new.pt"), ConvertOptions{}))
	require.NoError(t, Convert(data+"big_endian.ckpt", at("little.pt"), ConvertOptions{}))

	require.Equal(t, "ok\n", testenv.RunPython(t, `
import os, sys, torch
d, data = sys.argv[1:]
load = lambda n: torch.load(os.path.join(d, n))
def same(a, b):
    assert list(a) == list(b), (list(a), list(b))
    for k in a: assert a[k].dtype == b[k].dtype and a[k].equal(b[k]), k
block = torch.load(data + "block.ckpt")
same(load("bare.pt"), block); same(load("bare2.pt"), block)
assert load("bare2.pt")._metadata == block._metadata, load("bare2.pt")._metadata
assert load("cpu.pt")["a"].tolist() == [0, 1, 2]
old, new = torch.load(data + "legacy.ckpt"), load("new.pt")
same(old["model"], new["model"]); assert new["big"] == 2**70 and new["views"]["col"].data_ptr() != 0 and new["views"]["col"].equal(old["views"]["col"])
dtypes = torch.load(data + "dtypes.ckpt")
same(load("little.pt"), {k: dtypes[k] for k in load("little.pt")})
print("ok")`, dir, data))
}

func TestDiff(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.pt"), filepath.Join(dir, "b.pt")
	testenv.RunPython(t, `
import sys, torch
x = {"same": torch.arange(4.0), "shape": torch.ones(2), "dtype": torch.ones(2), "values": torch.tensor([1.0, 2.0, 3.0]), "half": torch.ones(3).half(),
     "nan": torch.tensor([float("nan")]), "gone": torch.ones(1), "n": 1, "f": 0.5, "s": "x", "l": [1, 2], "t": (1, {"deep": 2}), "i": torch.tensor([5]), "z": None, "cf": torch.tensor([1j])}
torch.save(x, sys.argv[1])
y = dict(x, shape=torch.ones(3), dtype=torch.ones(2).double(), values=torch.tensor([1.0, 2.5, 3.25]), half=torch.tensor([1, 1, 1.5]).half(), n=2, s="y", l=[1, 2, 3],
         t=(1, {"deep": 3}), i=torch.tensor([7]), new=1, z=False, cf=torch.tensor([2j]))
del y["gone"]
torch.save(y, sys.argv[2])`, a, b)
	var out bytes.Buffer
	differ, err := Diff(&out, a, b, DiffOptions{})
	require.NoError(t, err)
	require.True(t, differ)
	require.Equal(t, strings.TrimLeft(`
shape: float32 [2], float32 [3]
dtype: float32 [2], float64 [2]
values: 2 of 3 elements differ, by up to 0.5
half: 1 of 3 elements differ, by up to 0.5
gone: only in the first (float32 [1]  4 B)
n: 1, 2
s: "x", "y"
l: 2 items, 3 items
t/1/deep: 2, 3
i: 1 of 1 elements differ, by up to 2
z: None, False
cf: 1 of 1 elements differ
new: only in the second (1)
`, "\n"), out.String())
	out.Reset()
	differ, err = Diff(&out, a, b, DiffOptions{KeyA: "values", KeyB: "values", Tolerance: 0.5})
	require.NoError(t, err)
	require.False(t, differ)
	differ, err = Diff(&out, a, a, DiffOptions{})
	require.NoError(t, err)
	require.False(t, differ, "a NaN equals itself")
	_, err = Diff(&out, a, filepath.Join(dir, "none"), DiffOptions{})
	require.Error(t, err)
}

// What is no checkpoint, or only half of one, is an error with the file's name in each of the three commands, and
// leaves nothing behind.
func TestOddFiles(t *testing.T) {
	dir := t.TempDir()
	whole, err := os.ReadFile(data + "linear.ckpt")
	require.NoError(t, err)
	put := func(name string, b []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o666))
		return path
	}
	pipe := filepath.Join(dir, "pipe.pt")
	require.NoError(t, syscall.Mkfifo(pipe, 0o666))
	damaged := bytes.Clone(whole)
	damaged[bytes.Index(damaged, []byte("linear/data/0"))+80] ^= 1
	python := filepath.Join(dir, "script.pt")
	testenv.RunPython(t, `
import sys, torch
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), sys.argv[1])`, python)
	good := put("good.pt", whole)
	for path, want := range map[string]string{
		put("empty.pt", nil):                                                      "too short",
		put("short.pt", []byte("PK")):                                             "too short",
		put("text.pt", []byte("epoch,loss\n1,0.5\n")):                             "neither a zip archive nor a pickle",
		put("cut.pt", whole[:len(whole)-40]):                                      "cut off",
		put("zeros.pt", make([]byte, 4096)):                                       "neither a zip archive nor a pickle",
		put("code.pt", []byte("\x80\x02cos\nsystem\n(S'true'\ntR.")):              "",
		put("x.safetensors", whole):                                               "",
		put("y.safetensors", []byte("\xff\xff\xff\xff\xff\xff\xff\x7f{}")):        "",
		put("z.safetensors", []byte("\x08\x00\x00\x00\x00\x00\x00\x00{\"a\":1}")): "",
		filepath.Join(dir, "none.pt"):                                             "no such file",
		dir:                                                                       "a folder",
		pipe:                                                                      "a device, pipe or socket",
		"/dev/null":                                                               "a device, pipe or socket",
		python:                                                                    "TorchScript",
	} {
		var out bytes.Buffer
		err := Show(&out, path, ShowOptions{})
		require.ErrorContains(t, err, want, path)
		require.ErrorContains(t, err, path)
		require.Empty(t, out.String(), "nothing is shown of %s", path)
		require.ErrorContains(t, Convert(path, filepath.Join(dir, "to.pt"), ConvertOptions{}), want, path)
		require.NoFileExists(t, filepath.Join(dir, "to.pt"))
		for _, pair := range [][2]string{{path, good}, {good, path}} {
			_, err := Diff(&out, pair[0], pair[1], DiffOptions{})
			require.ErrorContains(t, err, want, path)
		}
	}
	// A flipped bit of a tensor is told of where the tensors are read.
	bad := put("damaged.pt", damaged)
	var out bytes.Buffer
	require.ErrorContains(t, Show(&out, bad, ShowOptions{Verify: true}), "checksum mismatch")
	require.ErrorContains(t, Convert(bad, filepath.Join(dir, "to.safetensors"), ConvertOptions{}), "checksum mismatch")
	require.NoFileExists(t, filepath.Join(dir, "to.safetensors"))
	_, err = Diff(&out, good, bad, DiffOptions{})
	require.ErrorContains(t, err, "checksum mismatch")

	// In place, which reads and writes one file; and options that fit nothing.
	require.NoError(t, Convert(good, good, ConvertOptions{}))
	differ, err := Diff(&out, good, data+"linear.ckpt", DiffOptions{})
	require.NoError(t, err)
	require.False(t, differ)
	require.ErrorContains(t, Convert(good, filepath.Join(dir, "to.pt"), ConvertOptions{StripPrefix: "modul."}), `no name begins with "modul."`)
	require.ErrorContains(t, Convert(good, filepath.Join(dir, "no", "to.pt"), ConvertOptions{}), "no such file or directory")
	_, err = Diff(&out, good, good, DiffOptions{Tolerance: -1})
	require.ErrorContains(t, err, "tolerance")
	for key, want := range map[string]string{
		"optimizer/param_groups/7":      "none of 2 items",
		"optimizer/param_groups/x":      "none of 2 items",
		"optimizer/param_groups/0/lr/y": "no keys",
		"optimizer/0":                   "the keys are state, param_groups",
	} {
		require.ErrorContains(t, Show(&out, data+"train_adamw.ckpt", ShowOptions{Key: key}), want)
	}
	require.Contains(t, show(t, data+"train_adamw.ckpt", ShowOptions{Key: "optimizer/param_groups/1/betas"}), "0.999")
}

// Values that look alike and are not: neighbours beyond 2^53, sizes, devices; and sets, whose order means nothing.
func TestDiffOfAlikes(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.pt"), filepath.Join(dir, "b.pt")
	testenv.RunPython(t, `
import sys, torch
x = {"seed": 2**60, "ids": torch.tensor([2**60, 1]), "size": torch.Size([1, 2]), "device": torch.device("cuda:0"), "set": {"a", "b", "c"}, "dtype": torch.half,
     "bytes": b"ab", "text": "x" * 300, "huge": 2**80, "flag": True, "same": torch.Size([4]), "zero": 0.0}
y = dict(x, seed=2**60 + 1, ids=torch.tensor([2**60 + 1, 1]), size=torch.Size([1, 3]), device=torch.device("cuda:1"), set={"c", "b", "a"}, dtype=torch.bfloat16,
     bytes=b"ac", text="x" * 299 + "y", huge=2**80 + 1, flag=1, zero=-0.0)
torch.save(x, sys.argv[1])
torch.save(y, sys.argv[2])`, a, b)
	var out bytes.Buffer
	differ, err := Diff(&out, a, b, DiffOptions{})
	require.NoError(t, err)
	require.True(t, differ)
	var names []string
	for line := range strings.Lines(out.String()) {
		name, _, _ := strings.Cut(line, ":")
		name, _, _ = strings.Cut(name, "/")
		names = append(names, name)
	}
	require.Equal(t, []string{"seed", "ids", "size", "device", "dtype", "bytes", "text", "huge", "flag"}, names, out.String())
	require.Contains(t, out.String(), "ids: 1 of 2 elements differ, by up to 1\n")
}

// Two names that a prefix tells apart are not made one.
func TestConvertKeepsNamesApart(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "a.pt"), filepath.Join(dir, "b")
	testenv.RunPython(t, `
import sys, torch
torch.save({"module.w": torch.ones(1), "w": torch.zeros(1)}, sys.argv[1])`, from)
	require.ErrorContains(t, Convert(from, to+".pt", ConvertOptions{StripPrefix: "module."}), `two entries are named w`)
	require.ErrorContains(t, Convert(from, to+".safetensors", ConvertOptions{StripPrefix: "module."}), "w")
	require.NoFileExists(t, to+".pt")
	require.NoFileExists(t, to+".safetensors")
}
