package torchddp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
)

// Backends by name.
const (
	Gloo = "gloo"
	NCCL = "nccl"
)

// Timeouts of collectives where nothing else is said. They are PyTorch's.
const (
	DefaultTimeout     = 30 * time.Minute
	DefaultNCCLTimeout = 10 * time.Minute
)

// InitOptions say how a rank joins its job. The zero value takes all from the environment, as torchrun, Slurm through
// package launch, or launch.Spawn set it.
type InitOptions struct {
	// Backend is "gloo", "nccl", or one a device type as "cpu:gloo,cuda:nccl". "" picks by Device: nccl for a GPU,
	// gloo for the CPU.
	Backend string
	// Device is where this rank's tensors lie. The zero value is the CPU, or with NCCL the GPU of LOCAL_RANK.
	Device gotch.Device
	// InitMethod is "env://" (the default), "tcp://HOST:PORT?rank=R&world_size=N" or "file:///PATH?rank=R&world_size=N".
	InitMethod string
	// Store is used instead of InitMethod. Rank and WorldSize are needed with it.
	Store *Store
	// Rank and WorldSize are used where InitMethod does not tell; they are unset while WorldSize is 0.
	Rank, WorldSize int
	// Timeout bounds every collective; 0 is DefaultTimeout or DefaultNCCLTimeout.
	Timeout time.Duration
	// ConnectTimeout bounds the way to the store and the first meeting of the ranks; 0 is DefaultStoreTimeout, or
	// Timeout if that is less.
	ConnectTimeout time.Duration
	// GlooInterfaces are the network interfaces Gloo uses; empty is GLOO_SOCKET_IFNAME's list, or else the address of
	// this machine's host name (of the loopback, when the master is on it).
	GlooInterfaces []string
	// GlooThreads are the threads that run Gloo's operations; 0 is c10d's choice, two an interface.
	GlooThreads int
	// NCCL are options of the NCCL backend.
	NCCL NCCLOptions
	// Debug is how much the groups check. The zero value takes TORCH_DISTRIBUTED_DEBUG.
	Debug DebugLevel
	// ListenFD is a bound socket that rank 0 serves the store on; 0 is GODDP_LISTEN_FD's, which launch.Spawn sets.
	ListenFD int
}

// ListenFDEnv names the variable that hands rank 0 the bound socket of the master port.
const ListenFDEnv = "GODDP_LISTEN_FD"

// DebugLevel is how much c10d checks and tells, PyTorch's TORCH_DISTRIBUTED_DEBUG.
type DebugLevel int

// The debug levels. With DebugDetail every collective is compared across ranks before it runs, so that one that differs
// in kind or shape is an [ErrDesync] which shows both, and not a hang; that costs two more collectives each.
const (
	DebugFromEnv DebugLevel = iota
	DebugOff
	DebugInfo
	DebugDetail
)

func (d DebugLevel) resolve(getenv func(string) string) (DebugLevel, error) {
	if d != DebugFromEnv {
		return d, nil
	}
	switch text := getenv("TORCH_DISTRIBUTED_DEBUG"); text {
	case "", "OFF":
		return DebugOff, nil
	case "INFO":
		return DebugInfo, nil
	case "DETAIL":
		return DebugDetail, nil
	default:
		return DebugOff, valueErrorf("The value of TORCH_DISTRIBUTED_DEBUG must be one of OFF, INFO, or DETAIL, got %q", text)
	}
}

// rendezvous is where and as whom a rank joins.
type rendezvous struct {
	scheme          string
	host, path      string
	port            int
	rank, worldSize int
}

func rendezvousError(method, format string, args ...any) error {
	return valueErrorf("Error initializing torch.distributed using %s rendezvous: "+format, append([]any{method}, args...)...)
}

func parseInt(method, name, text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, rendezvousError(method, "%s must be an integer, got %q", name, text)
	}
	return n, nil
}

// resolve works out the rendezvous from options and environment, in Python's order of precedence.
func (o InitOptions) resolve(getenv func(string) string) (rendezvous, error) {
	r := rendezvous{rank: o.Rank, worldSize: o.WorldSize}
	if o.Store != nil {
		if o.InitMethod != "" {
			return r, valueErrorf("cannot specify both InitMethod and Store")
		}
		r.scheme = "store"
		if o.WorldSize <= 0 {
			return r, valueErrorf("WorldSize must be positive when a Store is given, got %d", o.WorldSize)
		}
		return r, r.checkRank()
	}
	text := orDefault(o.InitMethod, "env://")
	u, err := url.Parse(text)
	if err != nil {
		return r, valueErrorf("InitMethod %q is no URL: %v", text, err)
	}
	r.scheme = u.Scheme
	method := u.Scheme + "://"
	query := u.Query()
	get := func(key, env string, dst *int) error {
		var err error
		switch {
		case query.Has(key):
			*dst, err = parseInt(method, key, query.Get(key))
		case o.WorldSize != 0:
		case env != "":
			if getenv(env) == "" {
				return rendezvousError(method, "environment variable %s expected, but not set", env)
			}
			*dst, err = parseInt(method, env, getenv(env))
		default:
			return rendezvousError(method, "%s parameter missing", strings.ReplaceAll(key, "_", " "))
		}
		return err
	}
	env := func(name string) string {
		if u.Scheme == "env" {
			return name
		}
		return ""
	}
	switch u.Scheme {
	case "env", "tcp", "file":
	default:
		return r, valueErrorf("no rendezvous handler for %s:// (known: env://, tcp://HOST:PORT, file:///PATH)", u.Scheme)
	}
	if err := errors.Join(get("rank", env("RANK"), &r.rank), get("world_size", env("WORLD_SIZE"), &r.worldSize)); err != nil {
		return r, err
	}
	switch u.Scheme {
	case "env":
		port := getenv("MASTER_PORT")
		if r.host = getenv("MASTER_ADDR"); r.host == "" {
			return r, rendezvousError(method, "environment variable MASTER_ADDR expected, but not set")
		}
		if port == "" {
			return r, rendezvousError(method, "environment variable MASTER_PORT expected, but not set")
		}
		if r.port, err = parseInt(method, "MASTER_PORT", port); err != nil {
			return r, err
		}
	case "tcp":
		if r.host = u.Hostname(); u.Port() == "" {
			return r, rendezvousError(method, "port number missing")
		}
		if r.port, err = parseInt(method, "port", u.Port()); err != nil {
			return r, err
		}
	case "file":
		if r.path = u.Host + u.Path; r.path == "" {
			return r, rendezvousError(method, "path missing")
		}
	}
	return r, r.checkRank()
}

func (r rendezvous) checkRank() error {
	if r.worldSize <= 0 {
		return valueErrorf("world size must be at least 1, got %d", r.worldSize)
	}
	if r.rank < 0 || r.rank >= r.worldSize {
		return valueErrorf("rank must lie between 0 and %d (world size %d), got %d", r.worldSize-1, r.worldSize, r.rank)
	}
	return nil
}

// deviceBackend is one entry of a backend description.
type deviceBackend struct {
	dev     tdp.DeviceType
	backend tdp.Backend
}

var (
	backendNumbers = map[string]tdp.Backend{Gloo: tdp.Gloo, NCCL: tdp.NCCL}
	deviceNumbers  = map[string]tdp.DeviceType{"cpu": tdp.CPU, "cuda": tdp.CUDA}
)

// parseBackend reads "gloo", "nccl" or "cpu:gloo,cuda:nccl" and gives what each device type uses.
func parseBackend(text string) ([]deviceBackend, error) {
	known := func(name string) (tdp.Backend, error) {
		b, ok := backendNumbers[name]
		if !ok {
			return 0, valueErrorf("unknown backend %q (known: gloo, nccl, or one a device type as cpu:gloo,cuda:nccl)", name)
		}
		return b, nil
	}
	text = strings.ToLower(text)
	if !strings.Contains(text, ":") {
		b, err := known(text)
		if err != nil {
			return nil, err
		}
		if b == tdp.NCCL {
			return []deviceBackend{{tdp.CUDA, b}}, nil
		}
		return []deviceBackend{{tdp.CPU, b}, {tdp.CUDA, b}}, nil
	}
	var list []deviceBackend
	seen := map[tdp.DeviceType]bool{}
	for pair := range strings.SplitSeq(text, ",") {
		device, name, ok := strings.Cut(pair, ":")
		if !ok {
			return nil, valueErrorf("the backend %q needs pairs of DEVICE:BACKEND separated by commas", text)
		}
		dev, ok := deviceNumbers[device]
		if !ok {
			return nil, valueErrorf("unknown device type %q in the backend %q (known: cpu, cuda)", device, text)
		}
		if seen[dev] {
			return nil, valueErrorf("the backend %q names the device type %s twice", text, device)
		}
		seen[dev] = true
		b, err := known(name)
		if err != nil {
			return nil, err
		}
		if b == tdp.NCCL && dev == tdp.CPU {
			return nil, valueErrorf("NCCL cannot serve CPU tensors: use cpu:gloo")
		}
		list = append(list, deviceBackend{dev, b})
	}
	return list, nil
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// splitList cuts a comma-separated list and drops empty entries.
func splitList(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
}

// InitProcessGroup joins the job: it meets the other ranks at the store and connects the backend. Every rank of the
// job calls it. Destroy the group at the end.
//
// The context bounds the meeting: when it ends, InitProcessGroup returns at once.
func InitProcessGroup(ctx context.Context, o InitOptions) (*ProcessGroup, error) {
	rdzv, err := o.resolve(os.Getenv)
	if err != nil {
		return nil, err
	}
	fail := func(what string, err error) (*ProcessGroup, error) {
		return nil, &RankError{Rank: rdzv.rank, Op: what, Err: err}
	}
	backendText := o.Backend
	if backendText == "" {
		backendText = Gloo
		if o.Device.Name == "CUDA" {
			backendText = NCCL
		}
	}
	backends, err := parseBackend(backendText)
	if err != nil {
		return nil, err
	}
	usesNCCL := slices.ContainsFunc(backends, func(b deviceBackend) bool { return b.backend == tdp.NCCL })
	timeout := o.Timeout
	if timeout < 0 {
		return nil, valueErrorf("timeout must not be negative, got %v", timeout)
	}
	if timeout == 0 {
		timeout = defaultTimeout(backendText)
	}
	debug, err := o.Debug.resolve(os.Getenv)
	if err != nil {
		return nil, err
	}
	if err := tdp.SetDebugLevel(int(debug - DebugOff)); err != nil {
		return nil, err
	}
	if o.Device.Name == "" {
		o.Device = gotch.CPU
		if usesNCCL {
			local, _ := strconv.Atoi(os.Getenv("LOCAL_RANK"))
			o.Device = gotch.CudaBuilder(uint(max(local, 0)))
		}
	}
	if usesNCCL {
		o.NCCL.prepare()
	}
	connect := orDefault(o.ConnectTimeout, min(DefaultStoreTimeout, timeout))
	hosts, interfaces := []string(nil), o.GlooInterfaces
	if len(interfaces) == 0 {
		interfaces = splitList(os.Getenv("GLOO_SOCKET_IFNAME"))
	}
	if len(interfaces) == 0 && (rdzv.scheme == "env" || rdzv.scheme == "tcp") && isLoopback(rdzv.host) {
		hosts = []string{"127.0.0.1"}
	}

	pg := &ProcessGroup{
		rank: rdzv.rank, size: rdzv.worldSize, ranks: seq(rdzv.worldSize), device: o.Device, timeout: timeout,
		backend: backendText, backends: backends, name: "0", desc: "default_pg", rebuild: o,
	}
	pg.job = &job{
		world: pg, groups: []*ProcessGroup{pg}, count: 1, local: map[string]int{}, connect: connect, debug: debug, nccl: o.NCCL,
		gloo: tdp.GlooOptions{Interfaces: interfaces, Hostnames: hosts, Threads: o.GlooThreads},
	}
	// From here on a failure has to undo what was made.
	ok := false
	defer func() {
		if !ok {
			pg.release()
		}
	}()

	base := o.Store
	if base == nil {
		if base, err = openStore(ctx, rdzv, o, connect); err != nil {
			return fail("init_process_group", err)
		}
		pg.owned = append(pg.owned, base)
		pg.base = base
		// Python's prefixes, so that Go and Python ranks meet at the same keys.
		if base, err = base.Prefix("default_pg"); err != nil {
			return fail("init_process_group", err)
		}
		pg.owned = append(pg.owned, base)
	}
	pg.groupStore = base
	if err := pg.join(ctx, base); err != nil {
		if errors.Is(err, ErrCancelled) {
			ok = true // the call still runs: what it uses stays until the process ends
		}
		return fail("init_process_group", explainConnect(err, rdzv.worldSize, backendText))
	}
	if os.Getenv("TORCH_DIST_INIT_BARRIER") == "1" {
		if err := pg.storeBarrier(ctx, pg.groupStore, pg.size, connect); err != nil {
			return fail("the barrier after init_process_group", err)
		}
	}
	pg.job.answers = answerRequests(pg)
	ok = true
	return pg, nil
}

// defaultTimeout is PyTorch's for a backend: the short one only for NCCL alone.
func defaultTimeout(backend string) time.Duration {
	if strings.ToLower(backend) == NCCL {
		return DefaultNCCLTimeout
	}
	return DefaultTimeout
}

// join meets the group's ranks at the store's keys under the group's name, and connects.
func (p *ProcessGroup) join(ctx context.Context, base *Store) error {
	store, err := base.Prefix(p.name + "/")
	if err != nil {
		return err
	}
	p.store = store
	p.owned = append(p.owned, store)
	if err := store.SetTimeout(p.job.connect); err != nil {
		return err
	}
	// Said before the backend meets its peers: whoever has met us knows that we are a Go rank, see check.go.
	if err := store.Set(memberKey(p.rank), []byte("go")); err != nil {
		return err
	}
	_, err = cancellable(ctx, "connecting to the other ranks", func() (struct{}, error) {
		return struct{}{}, p.connect(p.job.connect)
	}, func(struct{}) {})
	if err != nil {
		return err
	}
	// Python gives the store the group's timeout as well.
	return store.SetTimeout(p.timeout)
}

func explainConnect(err error, size int, backend string) error {
	if errors.Is(err, ErrTimeout) {
		return fmt.Errorf("not all %d ranks came (is every rank started, and can they reach one another? GLOO_SOCKET_IFNAME picks the network interface): %w", size, err)
	}
	return fmt.Errorf("backend %s: %w", backend, err)
}

// openStore gives the store that env://, tcp:// or file:// name.
func openStore(ctx context.Context, r rendezvous, o InitOptions, connect time.Duration) (*Store, error) {
	if r.scheme == "file" {
		return NewFileStore(r.path, r.worldSize)
	}
	// Under torchrun the agent serves the store and every rank is a client.
	serve := r.rank == 0 && os.Getenv("TORCHELASTIC_USE_AGENT_STORE") != "True"
	fd := 0
	if serve {
		fd = o.ListenFD
		if fd == 0 && r.scheme == "env" {
			fd, _ = strconv.Atoi(os.Getenv(ListenFDEnv))
			// The socket serves one store: a second group of this process must not take its number again.
			_ = os.Unsetenv(ListenFDEnv)
		}
	}
	return NewTCPStore(ctx, TCPStoreOptions{
		Host: r.host, Port: r.port, Serve: serve, WorldSize: r.worldSize, Timeout: connect, MultiTenant: serve && fd == 0, ListenFD: fd,
	})
}

// IsNCCLAvailable tells whether this program was built with NCCL, as torch.distributed.is_nccl_available does.
func IsNCCLAvailable() bool { return tdp.BuiltWithCUDA() }
