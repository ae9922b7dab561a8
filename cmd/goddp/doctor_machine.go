package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/goddp/goddp/launch"
	"golang.org/x/sys/unix"
)

// machine is what doctor reads of a machine; tests make their own.
type machine struct {
	root   string // of the file system, "/" but in tests
	getenv func(string) string
	statfs func(path string) (size uint64, err error)
	limit  func(resource int) (uint64, error)
	lookup func(host string) ([]net.IP, error)
	cores  int
	host   string
	addrs  func() ([]net.Interface, error)
}

func thisMachine() *machine {
	host, _ := os.Hostname()
	return &machine{
		root: "/", getenv: os.Getenv, cores: runtime.NumCPU(), host: host, lookup: net.LookupIP, addrs: net.Interfaces,
		statfs: func(path string) (uint64, error) {
			var s unix.Statfs_t
			err := unix.Statfs(path, &s)
			return s.Blocks * uint64(s.Bsize), err
		},
		limit: func(resource int) (uint64, error) {
			var r unix.Rlimit
			err := unix.Getrlimit(resource, &r)
			return r.Cur, err
		},
	}
}

func (m *machine) read(path string) string {
	data, err := os.ReadFile(filepath.Join(m.root, path))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func (m *machine) exists(path string) bool {
	_, err := os.Stat(filepath.Join(m.root, path))
	return err == nil
}

// container says in what kind of container this is, or "".
func (m *machine) container() string {
	switch {
	case m.getenv("APPTAINER_CONTAINER") != "" || m.getenv("SINGULARITY_CONTAINER") != "":
		return "Apptainer/Singularity"
	case m.getenv("KUBERNETES_SERVICE_HOST") != "":
		return "Kubernetes"
	case m.exists(".dockerenv"):
		return "Docker"
	case m.exists("run/.containerenv"):
		return "Podman"
	}
	return ""
}

const (
	mib = 1 << 20
	gib = 1 << 30
)

func size(n uint64) string {
	switch {
	case n == unix.RLIM_INFINITY:
		return "unlimited"
	case n >= gib:
		return fmt.Sprintf("%.1f GiB", float64(n)/gib)
	case n >= mib:
		return fmt.Sprintf("%.0f MiB", float64(n)/mib)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

// examine looks at the machine itself.
func (m *machine) examine(r *report) {
	const s = "Machine"
	kind := m.container()
	where := "no container"
	if kind != "" {
		where = "in " + kind
	}
	r.add(s, "system", good, fmt.Sprintf("%s %s, Linux %s, %s", runtime.GOOS, runtime.GOARCH, m.read("proc/sys/kernel/osrelease"), where), "")

	cores, quota := fmt.Sprint(m.cores), m.cpuQuota()
	l, advice := good, ""
	if quota > 0 && quota < float64(m.cores) {
		cores += fmt.Sprintf(", of which the container may use %.1f", quota)
		l, advice = warn, fmt.Sprintf("programs see %d cores and may use %.1f: start ranks, threads and loader workers for the latter (OMP_NUM_THREADS, --nproc-per-node)", m.cores, quota)
	}
	omp := m.getenv("OMP_NUM_THREADS")
	if omp == "" {
		omp = "not set (launchers set 1 for each of several ranks)"
	}
	r.add(s, "cores", l, cores+"; OMP_NUM_THREADS "+omp, advice)

	if total := m.memTotal(); total > 0 {
		text, l, advice := size(total), good, ""
		if limit := m.memLimit(); limit > 0 && limit < total {
			text += ", limit of the container " + size(limit)
			if limit < 2*gib {
				l, advice = warn, "each rank takes about 200 MiB before it has a model; raise the limit (docker run --memory, resources.limits.memory)"
			}
		}
		r.add(s, "memory", l, text, advice)
	}

	if n, err := m.statfs(filepath.Join(m.root, "dev/shm")); err == nil {
		l, advice := good, ""
		if n < gib {
			l = warn
			advice = "NCCL and loaders with shared memory need room: docker run --shm-size=1g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"
		}
		r.add(s, "/dev/shm", l, size(n), advice)
	} else {
		r.add(s, "/dev/shm", warn, "missing", "mount a tmpfs there: NCCL needs it between GPUs of one machine")
	}
	if n, err := m.limit(unix.RLIMIT_MEMLOCK); err == nil {
		l, advice := good, ""
		if n != unix.RLIM_INFINITY && m.exists("dev/infiniband") {
			l, advice = warn, "InfiniBand registers memory: docker run --ulimit memlock=-1, or memlock unlimited in /etc/security/limits.conf and in Slurm's unit"
		}
		r.add(s, "memlock", l, size(n), advice)
	}
	if n, err := m.limit(unix.RLIMIT_NOFILE); err == nil {
		l, advice := good, ""
		if n < 4096 {
			l, advice = warn, "many ranks and loaders open many files and sockets: ulimit -n 65536"
		}
		r.add(s, "open files", l, strconv.FormatUint(n, 10), advice)
	}
}

// cpuQuota is the container's share of the cores; 0: all.
func (m *machine) cpuQuota() float64 {
	if f := strings.Fields(m.read("sys/fs/cgroup/cpu.max")); len(f) == 2 {
		return ratio(f[0], f[1])
	}
	return ratio(m.read("sys/fs/cgroup/cpu/cpu.cfs_quota_us"), m.read("sys/fs/cgroup/cpu/cpu.cfs_period_us"))
}

func ratio(a, b string) float64 {
	x, err1 := strconv.ParseFloat(a, 64)
	y, err2 := strconv.ParseFloat(b, 64)
	if err1 != nil || err2 != nil || x <= 0 || y <= 0 {
		return 0
	}
	return x / y
}

func (m *machine) memTotal() uint64 {
	for line := range strings.Lines(m.read("proc/meminfo")) {
		var kb uint64
		if _, err := fmt.Sscanf(line, "MemTotal: %d kB", &kb); err == nil {
			return kb << 10
		}
	}
	return 0
}

func (m *machine) memLimit() uint64 {
	for _, f := range []string{"sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		if n, err := strconv.ParseUint(m.read(f), 10, 64); err == nil {
			return n
		}
	}
	return 0
}

// examineNetwork looks at what Gloo and NCCL will use.
func (m *machine) examineNetwork(r *report) {
	const s = "Network"
	ips, err := m.lookup(m.host)
	var texts []string
	loop := len(ips) > 0
	for _, ip := range ips {
		texts = append(texts, ip.String())
		loop = loop && ip.IsLoopback()
	}
	chosen := m.getenv("GLOO_SOCKET_IFNAME")
	switch {
	case err != nil || len(ips) == 0:
		r.add(s, "host name", warnUnless(chosen != ""), m.host+" has no address", "Gloo looks for the address of the host name: add it to /etc/hosts, or name an interface by GLOO_SOCKET_IFNAME")
	case loop:
		r.add(s, "host name", warnUnless(chosen != ""), m.host+" is "+strings.Join(texts, ", ")+", which other nodes cannot reach",
			"enough for one machine; on several nodes name the interface: GLOO_SOCKET_IFNAME=eth0 (and NCCL_SOCKET_IFNAME)")
	default:
		r.add(s, "host name", good, m.host+" is "+strings.Join(texts, ", "), "")
	}
	all, _ := m.addrs()
	var names []string
	has := map[string]bool{}
	for _, i := range all {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		has[i.Name] = true
		text := i.Name
		if addrs, err := i.Addrs(); err == nil && len(addrs) > 0 {
			text += " " + addrs[0].String()
		}
		names = append(names, text)
	}
	r.add(s, "interfaces", good, strings.Join(names, "; "), "")
	for _, v := range []string{"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} {
		value := m.getenv(v)
		if value == "" {
			continue
		}
		l, advice := good, ""
		for name := range strings.SplitSeq(value, ",") {
			if plain := strings.TrimLeft(name, "=^"); plain == name && !has[name] && v == "GLOO_SOCKET_IFNAME" {
				l, advice = bad, "there is no interface "+name+" that is up"
			}
		}
		r.add(s, v, l, value, advice)
	}
	for _, v := range []string{"NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"} {
		if value := m.getenv(v); value != "" {
			r.add(s, v, note, value, "")
		}
	}
	switch env, ok, err := launch.FromEnv(); {
	case err != nil:
		r.add(s, "launcher", bad, err.Error(), "unset or complete these variables")
	case ok:
		r.add(s, "launcher", note, "this process is a rank: "+env.String(), "")
	default:
		r.add(s, "launcher", good, "none: programs started here spawn their own ranks", "")
	}
}

func warnUnless(ok bool) level {
	if ok {
		return good
	}
	return warn
}
