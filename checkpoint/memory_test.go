package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/internal/tdp"
)

// Whatever the size of a file, saving and loading take no more memory beside the tensors than fits in 16 MiB: 192 MiB
// are saved, loaded, mapped and brought to a device (host memory stands for it) in fresh processes, and the peak of
// resident memory is read from the system.
func TestMemoryBesideTheTensors(t *testing.T) {
	const tensors, each, most = 6, 32 << 20, 16 << 20
	if path := os.Getenv("GODDP_TEST_MEMORY"); path != "" {
		beside(t, path, os.Getenv("GODDP_TEST_MEMORY_DO"), tensors, each)
		return
	}
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Skipf("the peak of resident memory cannot be set back here: %v", err)
	}
	path := filepath.Join(t.TempDir(), "x.pt")
	for _, do := range []string{"save", "load", "mmap", "upload", "read"} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestMemoryBesideTheTensors$", "-test.v")
		cmd.Env = append(os.Environ(), "GODDP_TEST_MEMORY="+path, "GODDP_TEST_MEMORY_DO="+do)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		_, text, ok := strings.Cut(string(out), "beside: ")
		require.True(t, ok, string(out))
		number, _, _ := strings.Cut(text, "\n")
		bytes, err := strconv.Atoi(number)
		require.NoError(t, err)
		require.Less(t, bytes, most, do)
		t.Logf("%s: %.1f MiB beside the tensors", do, float64(bytes)/(1<<20))
	}
}

// beside does one thing and prints its peak of memory beyond what was there and what it made.
func beside(t *testing.T, path, do string, tensors, each int) {
	d := NewDict()
	for i := range tensors {
		if do != "save" {
			break
		}
		x := zeros(t, gotch.Uint8, int64(each))
		b, err := tdp.HostBytes(x)
		require.NoError(t, err)
		for k := range b {
			b[k] = byte(k % (7 + i))
		}
		d.Set(strconv.Itoa(i), x)
	}
	// The first tensor of a process costs libtorch's start.
	require.NoError(t, Save(path+".tiny", NewDict().Set("x", zeros(t, gotch.Uint8, 1))))
	_, err := Load(path+".tiny", LoadOptions{Mmap: true})
	require.NoError(t, err)

	made := 0
	var f *ptfile.File
	var dst []*ts.Tensor
	if do == "upload" {
		f, err = ptfile.Open(path, ptfile.ReadOptions{})
		require.NoError(t, err)
		defer f.Close()
		for range tensors {
			dst = append(dst, zeros(t, gotch.Uint8, int64(each)))
		}
	}
	runtime.GC()
	debug.FreeOSMemory()
	before := resident(t, "VmRSS")
	require.NoError(t, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0))
	var v any
	switch do {
	case "save":
		err = Save(path, d)
	case "load":
		v, err = Load(path, LoadOptions{})
		made = tensors * each
	case "mmap": // what of the mapping stays resident counts
		v, err = Load(path, LoadOptions{Mmap: true})
	case "read":
		var r *os.File
		if r, err = os.Open(path); err == nil {
			info, _ := r.Stat()
			v, err = Read(r, info.Size(), LoadOptions{})
			r.Close()
		}
		made = tensors * each
	case "upload":
		l := &loader{f: &File{File: f}}
		var wg sync.WaitGroup
		errs := make([]error, loadWorkers)
		for w := range loadWorkers {
			wg.Go(func() {
				for i := w; i < tensors; i += loadWorkers {
					errs[w] = errors.Join(errs[w], l.upload(f.Storages[i], dst[i]))
				}
			})
		}
		wg.Wait()
		err = errors.Join(errs...)
	}
	peak := resident(t, "VmHWM")
	require.NoError(t, err)
	runtime.KeepAlive(v)
	runtime.KeepAlive(d)
	runtime.KeepAlive(dst)
	fmt.Printf("beside: %d\n", peak-before-made)
}

func resident(t *testing.T, field string) int {
	text, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			var kb int
			_, err := fmt.Sscan(rest, &kb)
			require.NoError(t, err)
			return kb << 10
		}
	}
	t.Fatalf("no %s in /proc/self/status", field)
	return 0
}

// A pipe in a checkpoint's place is refused; opening it would wait for its other end.
func TestPipeIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.pt")
	require.NoError(t, syscall.Mkfifo(path, 0o666))
	_, err := Load(path, LoadOptions{})
	require.ErrorContains(t, err, "not a regular file")
	_, _, err = LoadSafetensors(path, LoadOptions{})
	require.ErrorContains(t, err, "not a regular file")
}
