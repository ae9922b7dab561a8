package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goddp/goddp/launch"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// aMachine is a machine made up of files.
func aMachine(t *testing.T, files map[string]string, env map[string]string) *machine {
	root := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o644))
	}
	return &machine{
		root: root, getenv: func(name string) string { return env[name] }, cores: 16, host: "node1",
		statfs: func(string) (uint64, error) { return 64 * mib, nil },
		limit: func(r int) (uint64, error) {
			if r == unix.RLIMIT_NOFILE {
				return 1024, nil
			}
			return 64 << 10, nil
		},
		lookup: func(string) ([]net.IP, error) { return []net.IP{net.IPv4(10, 0, 0, 1)}, nil },
		addrs: func() ([]net.Interface, error) {
			return []net.Interface{{Name: "eth0", Flags: net.FlagUp}, {Name: "down0"}}, nil
		},
	}
}

func find(t *testing.T, r *report, name string) finding {
	t.Helper()
	for _, f := range r.Findings {
		if f.Name == name {
			return f
		}
	}
	t.Fatalf("no finding %q in %+v", name, r.Findings)
	return finding{}
}

func TestDoctorInASmallContainer(t *testing.T) {
	m := aMachine(t, map[string]string{
		".dockerenv": "", "proc/meminfo": "MemTotal:       33554432 kB\n", "proc/sys/kernel/osrelease": "6.1.0\n",
		"sys/fs/cgroup/cpu.max": "250000 100000\n", "sys/fs/cgroup/memory.max": "1073741824\n", "dev/infiniband/uverbs0": "", "dev/shm/x": "",
	}, map[string]string{"OMP_NUM_THREADS": "4"})
	r := &report{}
	m.examine(r)
	assert.Contains(t, find(t, r, "system").Value, "in Docker")
	for name, want := range map[string][2]string{
		"cores":      {"16, of which the container may use 2.5; OMP_NUM_THREADS 4", "may use 2.5"},
		"memory":     {"32.0 GiB, limit of the container 1.0 GiB", "raise the limit"},
		"/dev/shm":   {"64 MiB", "--shm-size=1g"},
		"memlock":    {"64 KiB", "memlock=-1"},
		"open files": {"1024", "ulimit -n"},
	} {
		f := find(t, r, name)
		assert.Equal(t, warn, f.Level, name)
		assert.Equal(t, want[0], f.Value, name)
		assert.Contains(t, f.Advice, want[1], name)
	}
	var out bytes.Buffer
	r.print(&out)
	assert.Contains(t, out.String(), "  WARN /dev/shm       64 MiB\n")
	assert.Contains(t, out.String(), "What to change\n")
	for _, s := range symptoms {
		assert.Contains(t, out.String(), s.name)
	}
	assert.Less(t, strings.Count(out.String(), "\n"), 66, "one page")
}

func TestDoctorOnAGoodMachine(t *testing.T) {
	m := aMachine(t, map[string]string{"proc/meminfo": "MemTotal: 33554432 kB\n", "sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"}, nil)
	m.statfs = func(string) (uint64, error) { return 16 * gib, nil }
	m.limit = func(int) (uint64, error) { return unix.RLIM_INFINITY, nil }
	r := &report{}
	m.examine(r)
	m.examineNetwork(r)
	assert.Equal(t, good, r.worst(), "%+v", r.Findings)
	assert.Contains(t, find(t, r, "system").Value, "no container")
	assert.Equal(t, "unlimited", find(t, r, "memlock").Value)
	assert.Equal(t, "node1 is 10.0.0.1", find(t, r, "host name").Value)
	assert.NotContains(t, find(t, r, "interfaces").Value, "down0")

	m.statfs = func(string) (uint64, error) { return 0, errors.New("none") }
	r = &report{}
	m.examine(r)
	assert.Equal(t, warn, find(t, r, "/dev/shm").Level)
}

func TestDoctorOnTheNetwork(t *testing.T) {
	m := aMachine(t, nil, map[string]string{"GLOO_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO"})
	m.lookup = func(string) ([]net.IP, error) { return []net.IP{net.IPv4(127, 0, 1, 1)}, nil }
	r := &report{}
	m.examineNetwork(r)
	assert.Contains(t, find(t, r, "host name").Value, "other nodes cannot reach")
	assert.Equal(t, bad, find(t, r, "GLOO_SOCKET_IFNAME").Level)
	assert.Equal(t, note, find(t, r, "NCCL_DEBUG").Level)
	m.getenv = func(string) string { return "" }
	m.lookup = func(string) ([]net.IP, error) { return nil, errors.New("no such host") }
	r = &report{}
	m.examineNetwork(r)
	assert.Equal(t, warn, find(t, r, "host name").Level)
	assert.Contains(t, find(t, r, "host name").Advice, "GLOO_SOCKET_IFNAME")
}

func TestDoctorOnGPUs(t *testing.T) {
	h200 := launch.GPU{Name: "NVIDIA H200", UUID: "GPU-1", Memory: 141 * gib, PCIBus: "0:1", Compute: "9.0"}
	r := &report{}
	examineGPUs(r, launch.Inventory{Devices: []launch.GPU{h200}, All: []launch.GPU{h200}, Driver: "550.54", Notes: []string{"odd"}})
	assert.Equal(t, "NVIDIA H200, 141 GiB, compute 9.0, 0:1, GPU-1", find(t, r, "cuda:0").Value)
	assert.Equal(t, bad, find(t, r, "driver").Level)
	assert.Contains(t, find(t, r, "driver").Advice, "580")
	r = &report{}
	examineGPUs(r, launch.Inventory{All: []launch.GPU{h200}, Driver: "580.1", Reason: "hidden"})
	assert.Equal(t, warn, find(t, r, "devices").Level)
	assert.Equal(t, good, find(t, r, "driver").Level)
	r = &report{}
	examineGPUs(r, launch.Inventory{Reason: "NVML library not found"})
	assert.Equal(t, good, r.worst())
}

// The whole command, with the self-test where libtorch is set up.
func TestDoctorCommand(t *testing.T) {
	trainer(t) // skips without libtorch
	res := goddp(t, "doctor", "--json")
	var all []finding
	require.NoError(t, json.Unmarshal([]byte(res.out), &all), res.out+res.err)
	gloo := find(t, &report{all}, "gloo")
	assert.Equal(t, good, gloo.Level, "%+v", gloo)
	assert.Regexp(t, `^2 ranks: meet in \d+ ms; all-reduce of 4 bytes \d+ µs, of 64 MiB [\d.]+ GB/s`, gloo.Value)

	res = goddp(t, "doctor", "--no-selftest")
	assert.Contains(t, res.out, "not run (--no-selftest)")
	res = goddpEnv(t, []string{"GODDP_CACHE=" + t.TempDir()}, "doctor")
	assert.Equal(t, exitError, res.code)
	assert.Contains(t, res.out, "goddp setup")
	res = goddpEnv(t, []string{"RANK=1"}, "doctor", "--no-selftest")
	assert.Equal(t, exitError, res.code)
	assert.Contains(t, res.out, "WORLD_SIZE is not set")
	res = goddp(t, "doctor", "x")
	assert.Equal(t, exitUsage, res.code)
}
