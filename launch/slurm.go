package launch

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
)

// Ports for jobs whose launcher names none lie below Linux's range for outgoing connections (32768 and up).
const (
	firstDerivedPort = 15000
	derivedPorts     = 15000
)

// inSlurmStep says whether srun started this process as one of several tasks. A batch script itself has SLURM_PROCID as well, but no step.
func (v *vars) inSlurmStep() bool {
	if !v.has("SLURM_PROCID") || !v.has("SLURM_STEP_NUM_TASKS") {
		return false
	}
	return v.textOr("SLURM_STEP_NUM_TASKS", "") != "1"
}

// slurm builds an Env from what srun gives a task. Master: the first host of the step's node list, where rank 0 runs under
// Slurm's usual distributions; port: derived from the job and step number, the same on all tasks. MASTER_ADDR and MASTER_PORT win.
func (v *vars) slurm() Env {
	e := Env{
		Source:    SourceSlurm,
		Rank:      v.number("SLURM_PROCID"),
		WorldSize: v.number("SLURM_STEP_NUM_TASKS"),
		LocalRank: v.numberOr("SLURM_LOCALID", 0),
		GroupRank: v.numberOr("SLURM_NODEID", 0),
		RunID:     v.textOr("SLURM_JOB_ID", v.textOr("SLURM_JOBID", "")),
	}
	if v.has("WORLD_SIZE") {
		if w := v.number("WORLD_SIZE"); w != e.WorldSize {
			v.fail("WORLD_SIZE=%d, but this Slurm step has SLURM_STEP_NUM_TASKS=%d: unset WORLD_SIZE, or start that many tasks", w, e.WorldSize)
		}
	}
	e.RestartCount = v.numberOr("SLURM_RESTART_COUNT", 0)

	nodes := v.hosts("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
	e.GroupWorldSize = v.numberOr("SLURM_STEP_NUM_NODES", len(nodes))
	e.LocalWorldSize = v.tasksOnNode(e.GroupRank, e.LocalRank)

	e.MasterAddr = v.textOr("MASTER_ADDR", "")
	if e.MasterAddr == "" {
		switch {
		case len(nodes) > 0:
			e.MasterAddr = nodes[0]
		case e.LocalWorldSize == e.WorldSize:
			e.MasterAddr = "127.0.0.1"
		default:
			v.fail("neither SLURM_STEP_NODELIST nor MASTER_ADDR is set: the ranks cannot find rank 0")
		}
	}
	if e.MasterPort = v.numberOr("MASTER_PORT", 0); !v.has("MASTER_PORT") {
		job := v.numberOr("SLURM_JOB_ID", v.numberOr("SLURM_JOBID", 0))
		step := v.textOr("SLURM_STEP_ID", v.textOr("SLURM_STEPID", "0"))
		if s, err := strconv.Atoi(step); err == nil {
			job += s
		}
		e.MasterPort = firstDerivedPort + job%derivedPorts
	}
	if step := v.textOr("SLURM_STEP_ID", v.textOr("SLURM_STEPID", "")); step != "" {
		e.RunID += "." + step
	}
	v.common(&e)
	return e
}

func (v *vars) hosts(names ...string) []string {
	for _, name := range names {
		if list := v.textOr(name, ""); list != "" {
			nodes, err := ExpandNodeList(list)
			if err != nil {
				v.fail("%s=%q: %v", name, list, err)
			}
			return nodes
		}
	}
	return nil
}

// tasksOnNode reads "2(x3),1": two tasks on each of the first three nodes, one on the fourth.
func (v *vars) tasksOnNode(node, localRank int) int {
	for _, name := range []string{"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"} {
		list := v.textOr(name, "")
		if list == "" {
			continue
		}
		left := node
		for part := range strings.SplitSeq(list, ",") {
			count, times := part, 1
			if c, x, ok := strings.Cut(part, "(x"); ok {
				count = c
				t, err := strconv.Atoi(strings.TrimSuffix(x, ")"))
				if err != nil || t < 1 || !strings.HasSuffix(x, ")") {
					v.fail("%s=%q is not a list such as 2(x3),1", name, list)
					return localRank + 1
				}
				times = t
			}
			n, err := strconv.Atoi(count)
			if err != nil || n < 1 {
				v.fail("%s=%q is not a list such as 2(x3),1", name, list)
				return localRank + 1
			}
			if left < times {
				return n
			}
			left -= times
		}
		v.fail("%s=%q has no entry for SLURM_NODEID=%d", name, list, node)
		return localRank + 1
	}
	return v.numberOr("SLURM_NTASKS_PER_NODE", localRank+1)
}

// maxNodes bounds a node list; the largest machines have some 160,000 nodes.
const maxNodes = 1 << 18

// ExpandNodeList expands Slurm's short form of host names: node[01-03,7],login gives node01, node02, node03, node7, login.
// Several brackets in one name multiply, the last one running fastest.
func ExpandNodeList(list string) ([]string, error) {
	var out []string
	for _, name := range splitOutsideBrackets(list) {
		names, err := expandName(name)
		if err != nil {
			return nil, err
		}
		if out = append(out, names...); len(out) > maxNodes {
			return nil, fmt.Errorf("more than %d hosts", maxNodes)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no host name in %q", list)
	}
	return out, nil
}

func splitOutsideBrackets(s string) []string {
	var parts []string
	depth, from := 0, 0
	for i := range len(s) {
		switch s[i] {
		case '[':
			depth++
		case ']':
			depth--
		case ',':
			if depth == 0 {
				parts, from = append(parts, s[from:i]), i+1
			}
		}
	}
	return append(parts, s[from:])
}

func expandName(name string) ([]string, error) {
	name = strings.TrimSpace(name)
	open := strings.IndexByte(name, '[')
	if open < 0 {
		if name == "" || strings.ContainsRune(name, ']') {
			return nil, fmt.Errorf("bad host name %q", name)
		}
		return []string{name}, nil
	}
	inside, rest, ok := strings.Cut(name[open+1:], "]")
	if !ok || strings.ContainsAny(inside, "[") || strings.ContainsRune(name[:open], ']') {
		return nil, fmt.Errorf("unbalanced brackets in %q", name)
	}
	tails := []string{""}
	if rest != "" {
		var err error
		if tails, err = expandName(rest); err != nil {
			return nil, err
		}
	}
	var out []string
	for part := range strings.SplitSeq(inside, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		from, err1 := strconv.ParseUint(lo, 10, 31)
		to, err2 := strconv.ParseUint(hi, 10, 31)
		if err1 != nil || err2 != nil || from > to {
			return nil, fmt.Errorf("bad range %q in %q", part, name)
		}
		if (to-from+1)*uint64(len(tails))+uint64(len(out)) > maxNodes {
			return nil, fmt.Errorf("more than %d hosts in %q", maxNodes, name)
		}
		for i := from; i <= to; i++ {
			for _, tail := range tails {
				out = append(out, fmt.Sprintf("%s%0*d%s", name[:open], len(lo), i, tail))
			}
		}
	}
	return out, nil
}

// openMPI builds an Env from mpirun's variables. mpirun tells a rank no host names, so a job on several nodes
// needs MASTER_ADDR; on one node it is the loopback address. Without MASTER_PORT the port is derived from the job's name.
func (v *vars) openMPI() Env {
	e := Env{
		Source:         SourceOpenMPI,
		Rank:           v.mpi("OMPI_COMM_WORLD_RANK"),
		WorldSize:      v.mpi("OMPI_COMM_WORLD_SIZE"),
		LocalRank:      v.mpi("OMPI_COMM_WORLD_LOCAL_RANK"),
		LocalWorldSize: v.mpi("OMPI_COMM_WORLD_LOCAL_SIZE"),
	}
	if v.has("WORLD_SIZE") {
		if w := v.number("WORLD_SIZE"); w != e.WorldSize {
			v.fail("WORLD_SIZE=%d, but OMPI_COMM_WORLD_SIZE=%d: unset WORLD_SIZE", w, e.WorldSize)
		}
	}
	if e.LocalWorldSize > 0 {
		// Exact when every node has as many ranks and they are placed node by node, mpirun's default.
		e.GroupRank = (e.Rank - e.LocalRank) / e.LocalWorldSize
		e.GroupWorldSize = (e.WorldSize + e.LocalWorldSize - 1) / e.LocalWorldSize
	}
	job := v.textOr("PMIX_NAMESPACE", v.textOr("OMPI_MCA_ess_base_jobid", ""))
	e.RunID = job
	e.MasterAddr = v.textOr("MASTER_ADDR", "")
	if e.MasterAddr == "" {
		if e.LocalWorldSize != e.WorldSize {
			v.fail("OMPI_COMM_WORLD_LOCAL_SIZE=%d of OMPI_COMM_WORLD_SIZE=%d: on several nodes give rank 0's host: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
				e.LocalWorldSize, e.WorldSize)
		}
		e.MasterAddr = "127.0.0.1"
	}
	e.MasterPort = 29500
	switch {
	case v.has("MASTER_PORT"):
		e.MasterPort = v.number("MASTER_PORT")
	case job != "":
		h := fnv.New32a()
		h.Write([]byte(job))
		e.MasterPort = firstDerivedPort + int(h.Sum32()%derivedPorts)
	}
	v.common(&e)
	return e
}

func (v *vars) mpi(name string) int {
	if !v.has(name) {
		v.fail("%s is not set, though other OMPI_COMM_WORLD_ variables are", name)
		return 0
	}
	return v.number(name)
}
