package ptfile

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint/internal/cptest"
	"github.com/goddp/goddp/checkpoint/internal/zipfile"
	"github.com/goddp/goddp/checkpoint/pickle"
)

// Bounds for one hostile file of at most a few megabytes. Each takes about a second on an idle machine; the bound is for
// what would take hours.
const (
	mostTime   = 3 * time.Minute
	mostMemory = 1 << 30
)

// bounded runs f and fails if it takes too long or too much.
func bounded(t *testing.T, name string, f func()) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	start := time.Now()
	f()
	took := time.Since(start)
	runtime.ReadMemStats(&after)
	require.Less(t, took, mostTime, name)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(mostMemory), name)
}

// readAll reads a file and all of its storages, as Load does.
func readAll(data []byte) error {
	f, err := ReadBytes(data, ReadOptions{})
	if err != nil {
		return err
	}
	for _, s := range f.Storages {
		if s.Bytes > 64<<20 {
			return fmt.Errorf("%w: a storage of %d bytes", ErrFormat, s.Bytes)
		}
		if _, err := s.Data(); err != nil {
			return err
		}
	}
	return nil
}

// archive puts a pickle, and more records, into a zip as torch.save does.
func archive(t *testing.T, pkl []byte, more map[string][]byte) []byte {
	var out bytes.Buffer
	z := zipfile.NewWriter(&out, "x")
	require.NoError(t, z.Bytes("data.pkl", pkl))
	require.NoError(t, z.Bytes("version", []byte("3\n")))
	for name, data := range more {
		require.NoError(t, z.Bytes(name, data))
	}
	require.NoError(t, z.Close())
	return out.Bytes()
}

func pkl(parts ...string) []byte { return []byte("\x80\x02" + strings.Join(parts, "") + ".") }

// Pickles that run code in Python, in every way that pickle offers.
func TestCodeIsNeverRun(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "ran")
	call := "X" + string(binary.LittleEndian.AppendUint32(nil, uint32(len(mark)+6))) + "touch " + mark
	for name, c := range map[string]struct{ pickle, global string }{
		"os.system":       {"cos\nsystem\n(" + call + "tR", "os.system"},
		"posix.system":    {"cposix\nsystem\n(" + call + "tR", "posix.system"},
		"eval":            {"c__builtin__\neval\n(" + call + "tR", "__builtin__.eval"},
		"exec":            {"cbuiltins\nexec\n(" + call + "tR", "builtins.exec"},
		"getattr":         {"c__builtin__\ngetattr\n(" + call + "tR", "__builtin__.getattr"},
		"subprocess":      {"csubprocess\nPopen\n(" + call + "tR", "subprocess.Popen"},
		"newobj":          {"csubprocess\nPopen\n(" + call + "t\x81", "subprocess.Popen"},
		"stack global":    {"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93(" + call + "tR", "os.system"},
		"never called":    {"cos\nsystem\n0N", "os.system"},
		"in a dict":       {"}X\x01\x00\x00\x00acos\nsystem\n(" + call + "tRs", "os.system"},
		"runpy":           {"crunpy\n_run_code\n", "runpy._run_code"},
		"torch.load":      {"ctorch\nload\n(" + call + "tR", "torch.load"},
		"torch dotted":    {"ctorch\nserialization.os.system\n(" + call + "tR", "torch.serialization.os.system"},
		"storage look":    {"ctorch\nEvilStorage\n(" + call + "tR", "torch.EvilStorage"},
		"module class":    {"ctorch.nn.modules.linear\nLinear\n)\x81", "torch.nn.modules.linear.Linear"},
		"numpy":           {"cnumpy.core.multiarray\n_reconstruct\n", "numpy.core.multiarray._reconstruct"},
		"defaultdict":     {"ccollections\ndefaultdict\n", "collections.defaultdict"},
		"import in build": {"ccollections\nOrderedDict\n)R}X\x01\x00\x00\x00acos\nsystem\n(" + call + "tRsb", "os.system"},
	} {
		for _, data := range [][]byte{archive(t, pkl(c.pickle), nil), legacy(pkl(c.pickle))} {
			bounded(t, name, func() {
				err := readAll(data)
				var unsafe *pickle.UnsafeGlobalError
				require.ErrorAs(t, err, &unsafe, name)
				require.ErrorIs(t, err, pickle.ErrUnsafeGlobal)
				require.Equal(t, c.global, unsafe.Globals[0].String(), name)
				require.ErrorContains(t, err, "save plain data again")
			})
		}
	}
	// Instructions that can do more than their neighbours are not there at all.
	for name, p := range map[string]string{
		"INST": "(ios\nsystem\n", "OBJ": "(cos\nsystem\no", "EXT1": "\x82\x01", "EXT2": "\x83\x01\x00", "EXT4": "\x84\x01\x00\x00\x00",
		"NEWOBJ_EX": "))}\x92", "NEXT_BUFFER": "\x97", "PERSID": "Pabc\n", "GET": "g0\n", "FLOAT": "F1.0\n", "INT": "I1\n",
	} {
		require.ErrorIs(t, readAll(archive(t, pkl(p), nil)), errUnsafeOrFormat(name), name)
	}
	// The error names all of them.
	err := readAll(archive(t, pkl("cos\nsystem\n0csubprocess\nPopen\n0cos\nsystem\n0ctorch\nfloat32\n"), nil))
	require.ErrorContains(t, err, "os.system, subprocess.Popen (at byte")
	_, err = os.Stat(mark)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func errUnsafeOrFormat(name string) error {
	if name == "OBJ" {
		return pickle.ErrUnsafeGlobal // refused at the name already
	}
	return pickle.ErrFormat
}

// legacy puts a pickle into the old format.
func legacy(value []byte) []byte {
	magic := "\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
	return []byte(magic + "\x80\x02M\xe9\x03." + "\x80\x02}." + string(value) + "\x80\x02].")
}

func tensorPickle(storage, numel, offset, shape, stride string) []byte {
	return pkl("ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00", storage,
		"X\x03\x00\x00\x00cpu", numel, "tQ", offset, shape, stride, "\x89ccollections\nOrderedDict\n)RtR")
}

func TestWrongTensors(t *testing.T) {
	data := map[string][]byte{"data/0": make([]byte, 16)} // four floats
	big := "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"
	require.NoError(t, readAll(archive(t, tensorPickle("0", "K\x04", "K\x00", "K\x04\x85", "K\x01\x85"), data)), "the pattern itself is right")
	for name, p := range map[string][]byte{
		"storage too large":   tensorPickle("0", "K\x05", "K\x00", "K\x04\x85", "K\x01\x85"),
		"storage too small":   tensorPickle("0", "K\x02", "K\x00", "K\x02\x85", "K\x01\x85"),
		"storage huge":        tensorPickle("0", big, "K\x00", "K\x04\x85", "K\x01\x85"),
		"storage negative":    tensorPickle("0", "J\xff\xff\xff\xff", "K\x00", "K\x04\x85", "K\x01\x85"),
		"storage missing":     tensorPickle("1", "K\x04", "K\x00", "K\x04\x85", "K\x01\x85"),
		"storage escapes":     tensorPickle("/", "K\x04", "K\x00", "K\x04\x85", "K\x01\x85"),
		"view too long":       tensorPickle("0", "K\x04", "K\x00", "K\x05\x85", "K\x01\x85"),
		"view too far":        tensorPickle("0", "K\x04", "K\x01", "K\x04\x85", "K\x01\x85"),
		"stride too far":      tensorPickle("0", "K\x04", "K\x00", "K\x03\x85", "K\x02\x85"),
		"offset negative":     tensorPickle("0", "K\x04", "J\xff\xff\xff\xff", "K\x04\x85", "K\x01\x85"),
		"offset huge":         tensorPickle("0", "K\x04", big, "K\x01\x85", "K\x01\x85"),
		"size negative":       tensorPickle("0", "K\x04", "K\x00", "J\xff\xff\xff\xff\x85", "K\x01\x85"),
		"stride negative":     tensorPickle("0", "K\x04", "K\x03", "K\x02\x85", "J\xff\xff\xff\xff\x85"),
		"size overflows":      tensorPickle("0", "K\x04", "K\x00", big+big+"\x86", "K\x00K\x00\x86"),
		"extent overflows":    tensorPickle("0", "K\x04", "K\x00", "K\x03K\x03\x86", big+big+"\x86"),
		"more sizes":          tensorPickle("0", "K\x04", "K\x00", "K\x02K\x02\x86", "K\x01\x85"),
		"size not a tuple":    tensorPickle("0", "K\x04", "K\x00", "N", "K\x01\x85"),
		"size not a number":   tensorPickle("0", "K\x04", "K\x00", "N\x85", "K\x01\x85"),
		"too many dimensions": tensorPickle("0", "K\x04", "K\x00", "("+strings.Repeat("K\x01", 65)+"t", "("+strings.Repeat("K\x01", 65)+"t"),
	} {
		bounded(t, name, func() { require.ErrorIs(t, readAll(archive(t, p, data)), ErrFormat, name) })
	}
	for name, p := range map[string]string{
		"persid not a tuple": "NQ", "persid module": "(X\x06\x00\x00\x00moduleNNNNtQ", "no arguments": "ctorch._utils\n_rebuild_tensor_v2\n)R",
		"call of a number": "K\x01)R", "build of a number": "K\x01}b", "parameter of nothing": "ctorch._utils\n_rebuild_parameter\n(N\x88NtR",
		"old tensor": "ctorch\nTensor\n)R",
	} {
		bounded(t, name, func() {
			err := readAll(archive(t, pkl(p), data))
			require.True(t, errors.Is(err, ErrFormat) || errors.Is(err, pickle.ErrFormat), "%s: %v", name, err)
		})
	}
}

func TestHostilePickles(t *testing.T) {
	const n = 200_000
	for name, p := range map[string][]byte{
		"empty":                  {},
		"only protocol":          []byte("\x80\x02"),
		"no value":               pkl(""),
		"two values":             pkl("NN"),
		"protocol 9":             []byte("\x80\x09N."),
		"protocol 0":             []byte("I1\n."),
		"mark left":              pkl("(N"),
		"no mark":                pkl("Nt"),
		"pop of nothing":         pkl("0N"),
		"memo missing":           pkl("h\x07"),
		"memo far":               pkl("j\xff\xff\xff\xff"),
		"put of nothing":         pkl("q\x00N"),
		"string too long":        pkl("X\xff\xff\xff\x7fabc"),
		"string of 2^63":         pkl("\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc"),
		"bytes of 2^63":          pkl("\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc"),
		"integer too long":       pkl("\x8b\xff\xff\xff\x7f\x01"),
		"odd items":              pkl("}(Nu"),
		"unhashable key":         pkl("}]Ns"),
		"tensor as key":          pkl("}}Ns"),
		"append to a dict":       pkl("}Na"),
		"set in a list":          pkl("]NNs"),
		"not UTF-8":              pkl("X\x01\x00\x00\x00\xff"),
		"endless name":           pkl("c" + strings.Repeat("a", 1<<20)),
		"data after the end":     append(pkl("N"), 'N'),
		"deep list":              pkl(strings.Repeat("]", n) + strings.Repeat("a", n-1)),
		"deep tuple":             pkl("N" + strings.Repeat("\x85", n)),
		"deep dict":              pkl(strings.Repeat("}N", n) + "N" + strings.Repeat("s", n)),
		"deep marks":             pkl(strings.Repeat("(", n) + strings.Repeat("t", n)),
		"deep tuple key":         pkl("}N" + strings.Repeat("\x85", n) + "Ns"),
		"list in itself":         pkl("]q\x00h\x00a"),
		"dict in itself":         pkl("}q\x00Nh\x00s"),
		"ordered dict in itself": pkl("ccollections\nOrderedDict\n)Rq\x00}Nh\x00sb"),
		"tuple in itself":        pkl("]q\x00h\x00\x85q\x01ah\x01"),
		"set in a set":           pkl("\x8f(\x8f\x90"),
		// Each level doubles: 2^60 items when walked without care.
		"laughing lists":  pkl("]q\x00" + doubling(60, "]q%c(h%ch%ce")),
		"laughing tuples": pkl(")q\x00" + doubling(60, "(h%ch%ctq%c")),
		"laughing key":    pkl("}K\x01\x85q\x00" + doubling(60, "(h%ch%ctq%c") + "Ns"),
		"many lists":      pkl(strings.Repeat("]", 9<<20)),
		"many marks":      pkl(strings.Repeat("(", 9<<20)),
		"many memos":      pkl("N" + strings.Repeat("r\xff\xff\xff\x7f", 100_000)),
	} {
		for form, data := range map[string][]byte{"zip": archive(t, p, nil), "legacy": legacy(p)} {
			bounded(t, name, func() {
				err := readAll(data)
				if strings.HasPrefix(name, "laughing lists") || strings.HasPrefix(name, "laughing tuples") || name == "many memos" {
					// Legal in Python, and harmless where nobody walks it without remembering where he was.
					return
				}
				if name == "data after the end" && form == "legacy" || name == "empty" && form == "zip" {
					require.Error(t, err)
					return
				}
				require.True(t, errors.Is(err, pickle.ErrFormat) || errors.Is(err, pickle.ErrLimit) || errors.Is(err, ErrFormat), "%s in %s: %v", name, form, err)
			})
		}
	}
}

func doubling(levels int, pattern string) string {
	var b strings.Builder
	for i := range levels {
		old, fresh := byte(i), byte(i+1)
		if strings.HasPrefix(pattern, "]") {
			b.WriteString("]q" + string([]byte{fresh}) + "(h" + string([]byte{old}) + "h" + string([]byte{old}) + "e")
		} else {
			b.WriteString("(h" + string([]byte{old}) + "h" + string([]byte{old}) + "tq" + string([]byte{fresh}))
		}
	}
	// Only the last one stays on the stack.
	return b.String() + "0" + strings.Repeat("0", levels-1) + "h" + string([]byte{byte(levels)}) + "\x86"
}

func TestHostileZips(t *testing.T) {
	good := archive(t, pkl("N"), map[string][]byte{"data/0": make([]byte, 100)})
	require.NoError(t, readAll(good))
	le := binary.LittleEndian
	dir := int(le.Uint32(good[len(good)-6:]))
	edit := func(f func(b []byte)) []byte {
		b := bytes.Clone(good)
		f(b)
		return b
	}
	std := func(f func(z *zip.Writer)) []byte {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		f(z)
		require.NoError(t, z.Close())
		return b.Bytes()
	}
	put := func(z *zip.Writer, name string, data []byte) {
		w, err := z.Create(name)
		require.NoError(t, err)
		_, err = w.Write(data)
		require.NoError(t, err)
	}
	zeros := bomb(t)
	second := dir + 46 + len("x/data.pkl") // directory entry of x/version
	for name, data := range map[string][]byte{
		"not a file":  []byte("PK\x03\x04"),
		"empty":       {},
		"text":        []byte(strings.Repeat("hello world", 100)),
		"no records":  std(func(z *zip.Writer) {}),
		"no folder":   std(func(z *zip.Writer) { put(z, "data.pkl", pkl("N")) }),
		"two folders": std(func(z *zip.Writer) { put(z, "a/data.pkl", pkl("N")); put(z, "b/version", []byte("3\n")) }),
		"no version":  std(func(z *zip.Writer) { put(z, "a/data.pkl", pkl("N")) }),
		"no pickle":   std(func(z *zip.Writer) { put(z, "a/version", []byte("3\n")) }),
		"name twice": std(func(z *zip.Writer) {
			put(z, "a/version", nil)
			put(z, "a/version", nil)
			put(z, "a/data.pkl", pkl("N"))
		}),
		"byte order": std(func(z *zip.Writer) {
			put(z, "a/version", nil)
			put(z, "a/byteorder", []byte("middle"))
			put(z, "a/data.pkl", pkl("N"))
		}),
		"long byte order": std(func(z *zip.Writer) {
			put(z, "a/version", nil)
			put(z, "a/byteorder", make([]byte, 1<<20))
			put(z, "a/data.pkl", pkl("N"))
		}),
		"record outside":     edit(func(b []byte) { le.PutUint32(b[second+42:], 0x7fffffff) }),
		"record too long":    edit(func(b []byte) { le.PutUint32(b[second+20:], 0x7fffffff); le.PutUint32(b[second+24:], 0x7fffffff) }),
		"two sizes":          edit(func(b []byte) { le.PutUint32(b[second+24:], 1) }),
		"records overlap":    edit(func(b []byte) { le.PutUint32(b[second+42:], 0) }),
		"encrypted":          edit(func(b []byte) { b[second+8] |= 1 }),
		"method":             edit(func(b []byte) { b[second+10] = 99 }),
		"not a local header": edit(func(b []byte) { le.PutUint32(b[second+42:], 1) }),
		"directory offset":   edit(func(b []byte) { le.PutUint32(b[len(b)-6:], 0xfffffff0) }),
		"zip64 size":         edit(func(b []byte) { le.PutUint64(b[len(b)-98+40:], 1<<60); copy(b[len(b)-10:], "\xff\xff\xff\xff") }),
		"zip64 count": edit(func(b []byte) {
			le.PutUint64(b[len(b)-98+32:], 1<<60)
			le.PutUint64(b[len(b)-98+24:], 1<<60)
			copy(b[len(b)-14:], "\xff\xff\xff\xff")
		}),
		"flipped bit": edit(func(b []byte) { b[64] ^= 1 }),
		"TorchScript": std(func(z *zip.Writer) {
			put(z, "a/version", nil)
			put(z, "a/constants.pkl", pkl("N"))
			put(z, "a/data.pkl", pkl("N"))
		}),
		"garbage pickle": std(func(z *zip.Writer) { put(z, "a/version", nil); put(z, "a/data.pkl", bytes.Repeat([]byte{0x80}, 1<<16)) }),
		"bomb as pickle": std(func(z *zip.Writer) {
			put(z, "a/version", nil)
			put(z, "a/data.pkl", append([]byte("\x80\x02"), bytes.Repeat([]byte("]"), 65<<20)...))
		}),
		"bomb as tensor": zeros,
		"bomb in a bomb": std(func(z *zip.Writer) {
			put(z, "a/version", zeros)
			put(z, "a/byteorder", make([]byte, 1<<26))
			put(z, "a/data.pkl", pkl("N"))
		}),
	} {
		bounded(t, name, func() {
			err := readAll(data)
			require.Error(t, err, name)
			ours := errors.Is(err, ErrFormat) || errors.Is(err, zipfile.ErrFormat) || errors.Is(err, zipfile.ErrChecksum) || errors.Is(err, ErrTorchScript) ||
				errors.Is(err, pickle.ErrFormat) || errors.Is(err, pickle.ErrLimit) || errors.Is(err, zip.ErrFormat)
			require.True(t, ours, "%s: %v", name, err)
		})
	}
	// A packed file that means well is read, as torch.load reads it.
	f, err := ReadBytes(std(func(z *zip.Writer) {
		put(z, "a/version", []byte("3\n"))
		put(z, "a/data.pkl", tensorPickle("0", "K\x04", "K\x00", "K\x04\x85", "K\x01\x85"))
		put(z, "a/data/0", make([]byte, 16))
	}), ReadOptions{})
	require.NoError(t, err)
	data, err := f.Storages[0].Data()
	require.NoError(t, err)
	require.Equal(t, make([]byte, 16), data)
}

// bomb is a tensor of 256 MiB of zeros, packed into 256 KiB.
func bomb(t *testing.T) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, data := range map[string][]byte{"a/version": nil, "a/data.pkl": tensorPickle("0", "J\x00\x00\x00\x04", "K\x00", "K\x04\x85", "K\x01\x85")} {
		w, err := z.Create(name)
		require.NoError(t, err)
		_, err = w.Write(data)
		require.NoError(t, err)
	}
	w, err := z.Create("a/data/0")
	require.NoError(t, err)
	zeros := make([]byte, 1<<20)
	for range 256 {
		_, err = w.Write(zeros)
		require.NoError(t, err)
	}
	require.NoError(t, z.Close())
	return b.Bytes()
}

// A file cut off after any number of bytes is an error, and so is any single flipped bit that is not in padding or in
// what is not used.
func TestTruncationAtEveryByte(t *testing.T) {
	for _, path := range cptest.Committed(t) {
		name := filepath.Base(path)
		if name != "linear.ckpt" && name != "legacy.ckpt" && name != "views.ckpt" {
			continue
		}
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, readAll(data))
		bounded(t, name, func() {
			for n := range data {
				require.Error(t, readAll(data[:n]), "%s cut off at byte %d of %d", name, n, len(data))
			}
		})
	}
}

// PyTorch does not look at the CRCs: a flipped bit in a tensor loads silently there.
func TestEveryFlippedPayloadBitIsNoticed(t *testing.T) {
	for _, path := range cptest.Committed(t) {
		if filepath.Base(path) != "linear.ckpt" {
			continue
		}
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		z, err := zipfile.NewReader(bytes.NewReader(data), int64(len(data)))
		require.NoError(t, err)
		for _, rec := range z.Records {
			if rec.Name != "data.pkl" && !strings.HasPrefix(rec.Name, "data/") {
				continue
			}
			for i := rec.Offset; i < rec.Offset+rec.Size; i++ {
				data[i] ^= 0x10
				require.ErrorIs(t, readAll(data), zipfile.ErrChecksum, "byte %d of %s", i-rec.Offset, rec.Name)
				data[i] ^= 0x10
			}
		}
	}
}

func TestPartialReadErrorsAreReported(t *testing.T) {
	boom := errors.New("disk on fire")
	data, err := os.ReadFile(cptest.Committed(t)[0])
	require.NoError(t, err)
	_, err = Read(failing{bytes.NewReader(data), boom}, int64(len(data)), ReadOptions{})
	require.ErrorIs(t, err, boom)
}

type failing struct {
	r   io.ReaderAt
	err error
}

func (f failing) ReadAt(b []byte, off int64) (int, error) {
	if off < 200 && off > 4 {
		return 0, f.err
	}
	return f.r.ReadAt(b, off)
}
