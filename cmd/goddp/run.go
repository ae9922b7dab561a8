package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/launch"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

const groupJobs = "Training jobs"

// runFlag is a flag of run as the help shows it.
type runFlag struct {
	name, short string
	value       string // what stands after it in the help; "": a switch
	text        string
	target      any  // *string or *bool
	noEnv       bool // has no PET_ variable
	optional    string
}

type runGroup struct {
	title string
	flags []runFlag
}

// runOptions are the flags as given.
type runOptions struct {
	nnodes, nproc, role                               string
	standalone                                        bool
	backend, endpoint, id, conf                       string
	nodeRank, masterAddr, masterPort, localAddr       string
	maxRestarts, monitor, signals                     string
	grace, stopGrace                                  string
	logDir, redirects, tee, ranksFilter               string
	outFilter, errFilter, prefix                      string
	startMethod, eventLog, logsSpecs, numa            string
	module, noPython, runPath, virtualRank, dry, loud bool
	localRankArg                                      string

	given func(name string) bool // on the command line or in the environment
	typed func(name string) bool // on the command line
}

func (o *runOptions) groups() []runGroup {
	s := func(name, value, text string, target *string) runFlag {
		return runFlag{name: name, value: value, text: text, target: target}
	}
	b := func(name, text string, target *bool) runFlag { return runFlag{name: name, text: text, target: target} }
	sh := func(f runFlag, short string) runFlag { f.short = short; return f }
	own := func(f runFlag) runFlag { f.noEnv = true; return f }
	arg := own(s("pass-local-rank-arg", "NAME", "put --local_rank=N (or --NAME=N) before the program's arguments, as torch.distributed.launch did", &o.localRankArg))
	arg.optional = "local_rank"
	return []runGroup{
		{"How many workers", []runFlag{
			s("nproc-per-node", "N", "workers on this node: a number, gpu (one a GPU), cpu (one a core), auto (gpu, or else cpu); default 1", &o.nproc),
			s("nnodes", "N|MIN:MAX", "nodes of the job, or from MIN to MAX of them; default 1", &o.nnodes),
		}},
		{"Where the nodes meet", []runFlag{
			b("standalone", "one node: meet on a free port of this machine; what else is given here is not looked at", &o.standalone),
			s("rdzv-backend", "NAME", "static (each node has its number and nothing changes) or c10d (elastic: nodes may come and go); default static", &o.backend),
			s("rdzv-endpoint", "HOST:PORT", "the node that hosts the meeting; port 29400 for c10d if none is given", &o.endpoint),
			s("rdzv-id", "ID", "the job's name, the same on all nodes; default none", &o.id),
			s("rdzv-conf", "K=V,…", "join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, rejoin_timeout, timeout (seconds), is_host", &o.conf),
			s("node-rank", "N", "static: this node's number; node 0 is the host; default 0", &o.nodeRank),
			s("master-addr", "HOST", "static: node 0's name or address; default 127.0.0.1", &o.masterAddr),
			s("master-port", "PORT", "static: node 0's port; default 29500, or a free one for a job of one node", &o.masterPort),
			s("local-addr", "ADDR", "this node's address as the others are to use it", &o.localAddr),
		}},
		{"When something ends", []runFlag{
			s("max-restarts", "N", "how often all workers are started again after a failure or the loss of a node; one count for the job; default 0", &o.maxRestarts),
			own(s("grace", "SECONDS", "between SIGTERM and SIGKILL after another worker failed; default 3", &o.grace)),
			own(s("stop-grace", "SECONDS", "the same after a signal to this launcher, or when nodes come or go: time to save; default 10", &o.stopGrace)),
			s("signals-to-handle", "LIST", "signals that are passed on to the workers; SIGUSR1 and SIGUSR2 ask them to save and leave, without a deadline; default SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", &o.signals),
			s("monitor-interval", "SECONDS", "accepted; a worker's end is seen at once", &o.monitor),
		}},
		{"Output", []runFlag{
			own(s("prefix", "WHEN", "begin lines with [rankN]: auto (when there are several), on, off; default auto. $TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE changes its form", &o.prefix)),
			s("log-dir", "DIR", "keep the workers' files in DIR/ID_random/attempt_N/LOCALRANK: error.json, stdout.log, stderr.log", &o.logDir),
			sh(s("redirects", "STD", "output to files only: 0 none, 1 stdout, 2 stderr, 3 both, for all or as RANK:STD,RANK:STD; default 0", &o.redirects), "r"),
			sh(s("tee", "STD", "output to files and here; like --redirects", &o.tee), "t"),
			s("local-ranks-filter", "RANKS", "show only these local ranks here, as 0,2", &o.ranksFilter),
			s("duplicate-stdout-filters", "WORDS", "copy lines with one of these words from the teed stdout to filtered_stdout.log", &o.outFilter),
			s("duplicate-stderr-filters", "WORDS", "the same for stderr", &o.errFilter),
			own(sh(b("verbose", "say what the launcher does", &o.loud), "v")),
		}},
		{"The program", []runFlag{
			sh(b("module", "PROGRAM is a Python module", &o.module), "m"),
			b("no-python", "run PROGRAM as it is, even if its name ends in .py", &o.noPython),
			arg,
			b("virtual-local-rank", "each worker sees one GPU only, as device 0, and LOCAL_RANK is 0", &o.virtualRank),
			s("role", "NAME", "ROLE_NAME of the workers; default default", &o.role),
			own(b("dry-run", "print each worker's command and variables, and start nothing", &o.dry)),
		}},
		{"Of torchrun, and without effect or refused here", []runFlag{
			s("start-method", "NAME", "spawn, fork or forkserver: accepted, workers are programs of their own", &o.startMethod),
			s("event-log-handler", "NAME", "null; others are Python code", &o.eventLog),
			b("run-path", "refused: there is no Python interpreter in this launcher", &o.runPath),
			own(s("logs-specs", "NAME", "refused: it names a Python class", &o.logsSpecs)),
			own(s("numa-binding", "MODE", "refused: use numactl in front of PROGRAM, or the scheduler's binding", &o.numa)),
		}},
	}
}

func petName(flag string) string { return "PET_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }

func runHelp() string {
	var s strings.Builder
	s.WriteString(`PROGRAM is a binary, a script, a Python file (NAME.py), or a Go package (./cmd/train, train.go, or an import path), which is
built once. Flags after PROGRAM are the program's. Workers find their place in the variables that torchrun sets (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT, …), so programs made for torchrun run unchanged. The exit status is that of the worker that failed first
(128 plus the number for a signal), or 75 when workers saved their state and are to be started again.

  goddp run --nproc-per-node 4 ./cmd/multigpu 10 2
  goddp run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node gpu ./train     # on each node, with its number
  goddp run --nnodes 2:8 --rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id job7 --max-restarts 3 --nproc-per-node gpu ./train

All flags of torchrun; underscores work too (--nproc_per_node). A flag's default may stand in a variable: PET_NPROC_PER_NODE=4.
`)
	for _, g := range (&runOptions{}).groups() {
		fmt.Fprintf(&s, "\n%s:\n", g.title)
		for _, f := range g.flags {
			name := "    --" + f.name
			if f.short != "" {
				name = "-" + f.short + ", --" + f.name
			}
			switch {
			case f.optional != "":
				name += "[=" + f.value + "]"
			case f.value != "":
				name += " " + f.value
			}
			text := wrap(f.text, 78)
			if len(name) > 32 {
				fmt.Fprintf(&s, "  %s\n  %-32s  %s\n", name, "", text[0])
			} else {
				fmt.Fprintf(&s, "  %-32s  %s\n", name, text[0])
			}
			for _, line := range text[1:] {
				fmt.Fprintf(&s, "  %-32s  %s\n", "", line)
			}
		}
	}
	return strings.TrimRight(s.String(), "\n")
}

// wrap breaks a text into lines.
func wrap(text string, width int) []string {
	lines := []string{""}
	for word := range strings.FieldsSeq(text) {
		last := &lines[len(lines)-1]
		switch {
		case *last == "":
			*last = word
		case len(*last)+1+len(word) > width:
			lines = append(lines, word)
		default:
			*last += " " + word
		}
	}
	return lines
}

var runCommand = &command{
	name:    "run",
	group:   groupJobs,
	args:    " PROGRAM [ARGUMENTS]",
	summary: "Start a training job's workers on this node, as torchrun does",
	help:    runHelp(),
	flags: func(f *pflag.FlagSet) func(context.Context, []string, stdio) error {
		o := &runOptions{}
		o.addTo(f)
		return func(ctx context.Context, args []string, std stdio) error {
			if err := o.fromEnv(f, os.LookupEnv); err != nil {
				return err
			}
			return o.run(ctx, args, std)
		}
	},
}

func (o *runOptions) addTo(f *pflag.FlagSet) {
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-"))
	})
	for _, g := range o.groups() {
		for _, r := range g.flags {
			switch t := r.target.(type) {
			case *string:
				f.StringVarP(t, r.name, r.short, "", r.text)
			case *bool:
				f.BoolVarP(t, r.name, r.short, false, r.text)
			}
			flag := f.Lookup(r.name)
			flag.Hidden = true // the help has them, in groups
			flag.NoOptDefVal = firstOf(r.optional, flag.NoOptDefVal)
		}
	}
}

func firstOf(all ...string) string {
	for _, s := range all {
		if s != "" {
			return s
		}
	}
	return ""
}

// fromEnv takes the defaults of flags from PET_ variables, as torchrun does.
func (o *runOptions) fromEnv(f *pflag.FlagSet, lookup func(string) (string, bool)) error {
	given := map[string]bool{}
	for _, g := range o.groups() {
		for _, r := range g.flags {
			given[r.name] = f.Changed(r.name)
			value, ok := lookup(petName(r.name))
			if given[r.name] || r.noEnv || !ok || value == "" {
				continue
			}
			given[r.name] = true
			switch t := r.target.(type) {
			case *string:
				*t = value
			case *bool:
				on, err := strconv.ParseBool(value)
				if err != nil {
					return usagef("%s=%q: give 1 or 0", petName(r.name), value)
				}
				*t = on
			}
		}
	}
	o.given, o.typed = func(name string) bool { return given[name] }, f.Changed
	return nil
}

func (o *runOptions) run(ctx context.Context, args []string, std stdio) error {
	e, err := o.elastic()
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return usagef("no PROGRAM")
	}
	if o.dry {
		e.Command = o.withLocalRank(args)
		return o.dryRun(e, std)
	}
	command, cleanup, err := o.program(ctx, args, std)
	if err != nil {
		return err
	}
	defer cleanup()
	e.Command = command
	e.Stdout, e.Stderr = std.out, std.err
	level := slog.LevelWarn
	if o.loud {
		level = slog.LevelDebug
	}
	e.Logger = slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: level}))

	// Signals are the launcher's, which passes them on; the context of main would end with the first one.
	err = e.Run(context.WithoutCancel(ctx))
	var job *launch.JobError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &job) && len(job.Failures) > 0:
		job.WriteReport(std.err)
	default:
		fmt.Fprintf(std.err, "goddp run: %v\n", err)
	}
	return statusError(launch.ExitCode(err))
}

// elastic makes sense of the flags.
func (o *runOptions) elastic() (launch.Elastic, error) {
	var e launch.Elastic
	bad := func(flag, value, what string) (launch.Elastic, error) {
		return e, usagef("--%s %q: %s", flag, value, what)
	}
	var err error
	// Refused, each with its reason.
	switch {
	case o.runPath:
		return e, usagef("--run-path: there is no Python interpreter in this launcher; give the script as PROGRAM")
	case o.logsSpecs != "":
		return bad("logs-specs", o.logsSpecs, "it names a Python class, and this launcher is not Python; see --log-dir, --redirects and --tee")
	case o.numa != "":
		return bad("numa-binding", o.numa, "not done by this launcher; put numactl in front of PROGRAM, or use the scheduler's binding (srun --cpu-bind)")
	case o.eventLog != "" && o.eventLog != "null":
		return bad("event-log-handler", o.eventLog, "handlers are Python code, and this launcher is not Python; null is the only one")
	case o.module && o.noPython:
		return e, usagef("--module and --no-python exclude each other")
	}
	switch o.startMethod {
	case "", "spawn", "fork", "forkserver":
	default:
		return bad("start-method", o.startMethod, "give spawn, fork or forkserver (none has an effect: workers are programs of their own)")
	}
	if o.monitor != "" {
		if v, err := strconv.ParseFloat(o.monitor, 64); err != nil || v <= 0 {
			return bad("monitor-interval", o.monitor, "give seconds, more than 0")
		}
	}

	if e.MinNodes, e.MaxNodes, err = parseNodes(firstOf(o.nnodes, "1")); err != nil {
		return bad("nnodes", o.nnodes, err.Error())
	}
	nproc := firstOf(o.nproc, "1")
	if nproc == "xpu" {
		return bad("nproc-per-node", nproc, "Intel GPUs are not supported; give a number, gpu, cpu or auto")
	}
	if e.Workers, _, err = launch.NProcPerNode(nproc); err != nil {
		if nproc == "gpu" {
			return e, fmt.Errorf("--nproc-per-node gpu: %w", err)
		}
		return bad("nproc-per-node", nproc, "give a number of 1 or more, gpu, cpu or auto")
	}
	e.Role, e.LocalAddr, e.RunID = o.role, o.localAddr, firstOf(o.id, "none")
	if e.MaxRestarts, err = natural(o.maxRestarts); err != nil {
		return bad("max-restarts", o.maxRestarts, err.Error())
	}
	if e.NodeRank, err = natural(o.nodeRank); err != nil {
		return bad("node-rank", o.nodeRank, err.Error())
	}
	if e.Grace, err = seconds(o.grace); err != nil {
		return bad("grace", o.grace, err.Error())
	}
	if e.StopGrace, err = seconds(o.stopGrace); err != nil {
		return bad("stop-grace", o.stopGrace, err.Error())
	}
	if err := o.meeting(&e); err != nil {
		return e, err
	}

	if o.signals != "" {
		for name := range strings.SplitSeq(o.signals, ",") {
			s := unix.SignalNum(strings.TrimSpace(name))
			if s == 0 || s == unix.SIGKILL || s == unix.SIGSTOP {
				return bad("signals-to-handle", o.signals, fmt.Sprintf("%q is no signal that can be handled", name))
			}
			e.Signals = append(e.Signals, s)
		}
	}
	e.LogDir, e.VirtualLocalRank = o.logDir, o.virtualRank
	if e.RedirectAll, e.Redirects, err = parseStd(o.redirects); err != nil {
		return bad("redirects", o.redirects, err.Error())
	}
	if e.TeeAll, e.Tee, err = parseStd(o.tee); err != nil {
		return bad("tee", o.tee, err.Error())
	}
	if o.ranksFilter != "" {
		for text := range strings.SplitSeq(o.ranksFilter, ",") {
			r, err := natural(strings.TrimSpace(text))
			if err != nil || text == "" {
				return bad("local-ranks-filter", o.ranksFilter, "give local ranks with commas between, such as 0,1,2")
			}
			e.ShowRanks = append(e.ShowRanks, r)
		}
	}
	e.OutFilter, e.ErrFilter = words(o.outFilter), words(o.errFilter)
	switch o.prefix {
	case "", "auto":
	case "on":
		e.Prefix = launch.PrefixOn
	case "off":
		e.Prefix = launch.PrefixOff
	default:
		return bad("prefix", o.prefix, "give auto, on or off")
	}
	e.PrefixTemplate = os.Getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
	return e, nil
}

// meeting takes what concerns the rendezvous.
func (o *runOptions) meeting(e *launch.Elastic) error {
	switch {
	case o.standalone && e.MaxNodes > 1:
		return usagef("--standalone is for one node, and --nnodes is %s", o.nnodes)
	case o.standalone:
		// One node, a free port, and a name that no other job has.
		e.RunID = fmt.Sprintf("standalone-%d-%d", os.Getpid(), time.Now().UnixNano())
		return o.rendezvousConf(e)
	}
	backend := firstOf(o.backend, "static")
	switch backend {
	case "static":
		e.Static = true
		addr, port := firstOf(o.masterAddr, "127.0.0.1"), firstOf(o.masterPort, strconv.Itoa(launch.DefaultMasterPort))
		if n, err := natural(port); err != nil || n > 65535 {
			return usagef("--master-port %q is no port", o.masterPort)
		}
		if strings.Count(addr, ":") > 1 && !strings.HasPrefix(addr, "[") {
			addr = "[" + addr + "]"
		}
		e.Endpoint = addr + ":" + port
		if o.endpoint != "" {
			e.Endpoint = o.endpoint
		}
		if e.MinNodes != e.MaxNodes {
			return usagef("--nnodes %s: a varying number of nodes needs --rdzv-backend c10d", o.nnodes)
		}
		if e.NodeRank >= e.MaxNodes {
			return usagef("--node-rank %d, but there are %d nodes: they are numbered from 0", e.NodeRank, e.MaxNodes)
		}
		if e.MaxNodes == 1 && o.endpoint == "" && !o.given("master-port") {
			// One node needs no port that others know: two jobs on a machine do not meet.
			e.Endpoint = addr + ":0"
		}
		if e.MaxNodes > 1 && o.endpoint == "" && !o.given("master-addr") {
			return usagef("--nnodes %s needs --master-addr, the address of node 0, or --rdzv-endpoint", o.nnodes)
		}
	case "c10d":
		for _, name := range []string{"node-rank", "master-addr", "master-port"} {
			if name == "node-rank" && o.endpoint != "" {
				continue // batch scripts give it always; c10d numbers the nodes itself
			}
			if o.typed(name) { // operators set the variables always
				return usagef("--%s is for --rdzv-backend static; for c10d give --rdzv-endpoint", name)
			}
		}
		e.Endpoint = o.endpoint
		if e.Endpoint == "" && e.MaxNodes > 1 {
			return usagef("--rdzv-backend c10d with --nnodes %s needs --rdzv-endpoint HOST:PORT", o.nnodes)
		}
	case "etcd", "etcd-v2":
		return usagef("--rdzv-backend %s: no etcd is spoken here, and none is needed: c10d does the same with a store in the host's launcher", backend)
	default:
		return usagef("--rdzv-backend %q: give static or c10d", backend)
	}
	return o.rendezvousConf(e)
}

func (o *runOptions) rendezvousConf(e *launch.Elastic) error {
	if o.conf == "" {
		return nil
	}
	for pair := range strings.SplitSeq(o.conf, ",") {
		key, value, ok := strings.Cut(pair, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		if !ok || value == "" {
			return usagef("--rdzv-conf %q: %q is not KEY=VALUE", o.conf, pair)
		}
		var err error
		switch key {
		case "join_timeout", "timeout":
			e.JoinTimeout, err = seconds(value)
		case "last_call_timeout":
			e.LastCall, err = seconds(value)
		case "keep_alive_interval":
			e.KeepAlive, err = seconds(value)
		case "keep_alive_max_attempt":
			e.KeepAliveTry, err = natural(value)
		case "rejoin_timeout":
			e.RejoinTimeout, err = seconds(value)
		case "is_host":
			var is bool
			switch strings.ToLower(value) {
			case "1", "true", "t", "yes", "y":
				is = true
			case "0", "false", "f", "no", "n":
			default:
				err = errors.New("give true or false")
			}
			e.Host = &is
		case "read_timeout", "close_timeout", "heartbeat_timeout", "rank":
			// Of torchrun's own ways; there is nothing here that they would change.
		case "store_type":
			if value != "tcp" {
				return usagef("--rdzv-conf store_type=%s: only tcp: nodes meet over the network", value)
			}
		default:
			return usagef("--rdzv-conf: unknown key %q: there are join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, rejoin_timeout, timeout and is_host", key)
		}
		if err != nil {
			return usagef("--rdzv-conf %s=%s: %v", key, value, err)
		}
	}
	return nil
}

func parseNodes(s string) (low, high int, err error) {
	first, last, ranged := strings.Cut(s, ":")
	if !ranged {
		last = first
	}
	low, err1 := strconv.Atoi(first)
	high, err2 := strconv.Atoi(last)
	if err1 != nil || err2 != nil || low < 1 || high < low {
		return 0, 0, errors.New("give a number of 1 or more, or MIN:MAX")
	}
	return low, high, nil
}

func natural(s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return 0, errors.New("give a number of 0 or more")
	}
	return n, nil
}

func seconds(s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || v <= 0 || v > 1e8 {
		return 0, errors.New("give seconds, more than 0")
	}
	return time.Duration(v * float64(time.Second)), nil
}

// parseStd reads 3, or 0:1,1:2.
func parseStd(s string) (all launch.Std, byRank map[int]launch.Std, err error) {
	const form = "give 0, 1, 2 or 3, or RANK:STD,RANK:STD"
	one := func(s string) (launch.Std, error) {
		if len(s) != 1 || s[0] < '0' || s[0] > '3' {
			return 0, errors.New(form)
		}
		return launch.Std(s[0] - '0'), nil
	}
	if s == "" {
		return 0, nil, nil
	}
	if !strings.Contains(s, ":") {
		all, err = one(s)
		return all, nil, err
	}
	byRank = map[int]launch.Std{}
	for pair := range strings.SplitSeq(s, ",") {
		rank, std, _ := strings.Cut(pair, ":")
		r, err := natural(rank)
		if err != nil || rank == "" {
			return 0, nil, errors.New(form)
		}
		if byRank[r], err = one(std); err != nil {
			return 0, nil, err
		}
	}
	return 0, byRank, nil
}

// words splits a list at commas; a double comma stands for one in a word.
func words(s string) []string {
	if s == "" {
		return nil
	}
	const comma = "\x00"
	list := strings.Split(strings.ReplaceAll(s, ",,", comma), ",")
	for i := range list {
		list[i] = strings.ReplaceAll(list[i], comma, ",")
	}
	return list
}

// withLocalRank puts the argument for the local rank before the program's own. Of `python -u train.py` the program is train.py.
func (o *runOptions) withLocalRank(command []string) []string {
	if o.localRankArg == "" {
		return command
	}
	at := 1
	if strings.HasPrefix(filepath.Base(command[0]), "python") {
		for at < len(command) && strings.HasPrefix(command[at], "-") {
			if command[at] == "-m" {
				at++
				break
			}
			at++
		}
		at = min(at+1, len(command))
	}
	arg := "--" + strings.TrimLeft(o.localRankArg, "-") + "=${local_rank}"
	return append(append(append([]string{}, command[:at]...), arg), command[at:]...)
}

// program finds what is to be run, and builds it if it is a Go package.
func (o *runOptions) program(ctx context.Context, args []string, std stdio) (command []string, cleanup func(), err error) {
	cleanup = func() {}
	name := args[0]
	isPython := o.module || strings.HasSuffix(name, ".py") && !o.noPython
	switch {
	case isPython:
		python := os.Getenv("PYTHON_EXEC")
		if python == "" {
			for _, try := range []string{"python3", "python"} {
				if python, err = exec.LookPath(try); err == nil {
					break
				}
			}
		}
		if python == "" {
			return nil, cleanup, fmt.Errorf("%s needs Python, and neither python3 nor python is in PATH; PYTHON_EXEC names another one", name)
		}
		command = []string{python, "-u"}
		if o.module {
			command = append(command, "-m")
		} else if _, err := os.Stat(name); err != nil {
			return nil, cleanup, err
		}
		command = append(command, args...)
	default:
		pkg, isPackage := goPackage(name)
		if !isPackage {
			path, err := exec.LookPath(name)
			if err != nil {
				return nil, cleanup, fmt.Errorf("cannot run %s: %w", name, err)
			}
			if !strings.Contains(path, "/") {
				path = "./" + path
			}
			command = append([]string{path}, args[1:]...)
			break
		}
		path, remove, err := build(ctx, pkg, std)
		if err != nil {
			return nil, cleanup, err
		}
		cleanup = remove
		command = append([]string{path}, args[1:]...)
	}
	return o.withLocalRank(command), cleanup, nil
}

// goPackage says whether a name is a Go package: a folder with Go files, a Go file, or an import path that is no program.
func goPackage(name string) (string, bool) {
	if strings.HasSuffix(name, ".go") {
		return name, true
	}
	if info, err := os.Stat(name); err == nil {
		if !info.IsDir() {
			return "", false
		}
		files, _ := filepath.Glob(filepath.Join(name, "*.go"))
		if len(files) == 0 {
			return "", false
		}
		if !filepath.IsAbs(name) && !strings.HasPrefix(name, ".") {
			name = "./" + name
		}
		return name, true
	}
	first, _, nested := strings.Cut(name, "/")
	return name, nested && strings.Contains(first, ".") && !strings.HasPrefix(name, ".") && !strings.HasPrefix(name, "/")
}

// build builds a Go package into a folder that remove removes; Go's cache makes the next time quick.
func build(ctx context.Context, pkg string, std stdio) (path string, remove func(), err error) {
	dir, err := os.MkdirTemp("", "goddp-build-*")
	if err != nil {
		return "", nil, err
	}
	remove = func() { os.RemoveAll(dir) }
	name := strings.TrimSuffix(filepath.Base(pkg), ".go")
	if abs, err := filepath.Abs(pkg); err == nil && strings.HasPrefix(pkg, ".") {
		name = filepath.Base(abs)
	}
	path = filepath.Join(dir, name)
	args := []string{"build", "-o", path, pkg}
	where := ""
	if filepath.IsAbs(pkg) && !strings.HasSuffix(pkg, ".go") {
		where, args[3] = pkg, "." // in the package's own module
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = where
	cmd.Stdout, cmd.Stderr = std.err, std.err
	if err := cmd.Run(); err != nil {
		remove()
		return "", nil, fmt.Errorf("cannot build %s: go %s: %w", pkg, strings.Join(args, " "), err)
	}
	return path, remove, nil
}

// dryRun prints what would be run. Ranks of several nodes are known only once they have met.
func (o *runOptions) dryRun(e launch.Elastic, std stdio) error {
	fmt.Fprintf(std.out, "# %d worker(s) on this node, %d to %d node(s), endpoint %s, id %s, %d restart(s), %d core(s)\n",
		e.Workers, e.MinNodes, e.MaxNodes, firstOf(e.Endpoint, "a free local port"), e.RunID, e.MaxRestarts, runtime.NumCPU())
	for i := range e.Workers {
		env := launch.Env{LocalRank: i, LocalWorldSize: e.Workers, GroupWorldSize: e.MinNodes, WorldSize: e.MinNodes * e.Workers,
			Rank: e.NodeRank*e.Workers + i, GroupRank: e.NodeRank, RoleName: firstOf(e.Role, "default"), RoleRank: e.NodeRank*e.Workers + i,
			RoleWorldSize: e.MinNodes * e.Workers, UseAgentStore: true, MaxRestarts: e.MaxRestarts, RunID: e.RunID}
		var line []string
		for _, v := range env.Environ() {
			if name, value, _ := strings.Cut(v, "="); value != "" && name != "MASTER_PORT" {
				line = append(line, v)
			}
		}
		for _, a := range e.Command {
			line = append(line, strings.ReplaceAll(a, "${local_rank}", strconv.Itoa(i)))
		}
		fmt.Fprintln(std.out, strings.Join(line, " "))
	}
	return nil
}
