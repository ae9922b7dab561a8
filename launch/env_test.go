package launch

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func lookupIn(list string) func(string) (string, bool) {
	m := map[string]string{}
	for _, f := range strings.Fields(list) {
		k, v, _ := strings.Cut(f, "=")
		m[k] = v
	}
	return func(k string) (string, bool) { v, ok := m[k]; return v, ok }
}

const (
	four     = "RANK=3 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"
	torchrun = four + " LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_NAME=trainer ROLE_WORLD_SIZE=4 " +
		"TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_MAX_RESTARTS=5 TORCHELASTIC_RUN_ID=job7 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_ERROR_FILE=/tmp/e.json"
	slurm = "SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NODELIST=gpu[07-08,11] SLURM_STEP_TASKS_PER_NODE=2(x3) " +
		"SLURM_JOB_ID=123456 SLURM_STEP_ID=2 SLURM_STEP_NUM_NODES=3 SLURM_RESTART_COUNT=1"
	openmpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)

func TestFromEnv(t *testing.T) {
	for name, c := range map[string]struct {
		vars string
		want Env
	}{
		"torchrun": {torchrun, Env{Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2, GroupRank: 1, GroupWorldSize: 2, RoleName: "trainer", RoleRank: 3,
			RoleWorldSize: 4, MasterAddr: "10.0.0.1", MasterPort: 29500, UseAgentStore: true, RestartCount: 2, MaxRestarts: 5, RunID: "job7",
			ErrorFile: "/tmp/e.json", Source: SourceTorchrun}},
		// What Kubeflow's PyTorchJob sets for a pod: one process a pod.
		"pytorchjob": {four, Env{Rank: 3, WorldSize: 4, LocalRank: 0, LocalWorldSize: 1, GroupRank: 3, RoleName: "default", RoleRank: 3, RoleWorldSize: 4,
			MasterAddr: "10.0.0.1", MasterPort: 29500, Source: SourceTorchrun}},
		"torchrun within slurm": {torchrun + " " + slurm, Env{Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2, GroupRank: 1, GroupWorldSize: 2, RoleName: "trainer",
			RoleRank: 3, RoleWorldSize: 4, MasterAddr: "10.0.0.1", MasterPort: 29500, UseAgentStore: true, RestartCount: 2, MaxRestarts: 5, RunID: "job7",
			ErrorFile: "/tmp/e.json", Source: SourceTorchrun}},
		"slurm": {slurm, Env{Rank: 3, WorldSize: 6, LocalRank: 1, LocalWorldSize: 2, GroupRank: 1, GroupWorldSize: 3, RoleName: "default", RoleRank: 3, RoleWorldSize: 6,
			MasterAddr: "gpu07", MasterPort: 15000 + 123458%15000, RestartCount: 1, RunID: "123456.2", Source: SourceSlurm}},
		"slurm with exports": {slurm + " MASTER_ADDR=head MASTER_PORT=4000 WORLD_SIZE=6", Env{Rank: 3, WorldSize: 6, LocalRank: 1, LocalWorldSize: 2, GroupRank: 1,
			GroupWorldSize: 3, RoleName: "default", RoleRank: 3, RoleWorldSize: 6, MasterAddr: "head", MasterPort: 4000, RestartCount: 1, RunID: "123456.2", Source: SourceSlurm}},
		"mpirun within slurm": {slurm + " " + openmpi + " MASTER_ADDR=head MASTER_PORT=4000", Env{Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2, GroupRank: 1,
			GroupWorldSize: 2, RoleName: "default", RoleRank: 3, RoleWorldSize: 4, MasterAddr: "head", MasterPort: 4000, Source: SourceOpenMPI}},
		"openmpi": {openmpi + " MASTER_ADDR=head MASTER_PORT=4000", Env{Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2, GroupRank: 1, GroupWorldSize: 2, RoleName: "default",
			RoleRank: 3, RoleWorldSize: 4, MasterAddr: "head", MasterPort: 4000, Source: SourceOpenMPI}},
	} {
		t.Run(name, func(t *testing.T) {
			e, ok, err := fromEnv(lookupIn(c.vars))
			require.NoError(t, err)
			assert.True(t, ok)
			assert.Equal(t, c.want, e)
			// What we write we read back the same.
			e.Source, e.ListenFD = SourceTorchrun, 0
			again, ok, err := fromEnv(lookupIn(strings.Join(e.Environ(), " ")))
			require.NoError(t, err)
			assert.True(t, ok)
			assert.Equal(t, e, again)
		})
	}
	for name, vars := range map[string]string{
		"nothing":               "",
		"address only":          "MASTER_ADDR=head MASTER_PORT=29500",
		"batch script":          "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_JOB_ID=5 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NODELIST=a[1-2]",
		"step of a single task": "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_JOB_ID=5 SLURM_STEP_NODELIST=a1",
	} {
		e, ok, err := fromEnv(lookupIn(vars))
		assert.NoError(t, err, name)
		assert.False(t, ok, name)
		assert.Equal(t, Env{Source: SourceNone}, e, name)
	}
}

func TestFromEnvNamesWhatIsWrong(t *testing.T) {
	swap := func(vars, old, new string) string {
		require.Contains(t, vars, old)
		return strings.Replace(vars, old, new, 1)
	}
	for vars, want := range map[string]string{
		"RANK=1":                                        "WORLD_SIZE is not set, but RANK=1 is",
		"RANK=1 WORLD_SIZE=2 MASTER_PORT=29500":         "MASTER_ADDR is not set",
		"RANK=1 WORLD_SIZE=2 MASTER_ADDR=head":          "MASTER_PORT is not set",
		"WORLD_SIZE=2":                                  "RANK is not set, but WORLD_SIZE=2 is",
		"LOCAL_RANK=0":                                  "RANK is not set, but LOCAL_RANK=0 is",
		swap(four, "RANK=3", "RANK=x"):                  `RANK="x" is not a number`,
		swap(four, "RANK=3", "RANK=-1"):                 `RANK="-1" is not a number of 0 or more`,
		swap(four, "RANK=3", "RANK=4"):                  "RANK=4 is outside WORLD_SIZE=4",
		swap(four, "WORLD_SIZE=4", "WORLD_SIZE=0"):      "WORLD_SIZE=0: a job has at least one rank",
		swap(four, "29500", "99999"):                    "MASTER_PORT=99999 is not a port",
		four + " LOCAL_RANK=2 LOCAL_WORLD_SIZE=2":       "LOCAL_RANK=2 is outside LOCAL_WORLD_SIZE=2",
		four + " LOCAL_RANK=0 LOCAL_WORLD_SIZE=8":       "LOCAL_WORLD_SIZE=8 does not fit WORLD_SIZE=4",
		four + " TORCHELASTIC_RESTART_COUNT=soon":       `TORCHELASTIC_RESTART_COUNT="soon"`,
		swap(slurm, "gpu[07-08,11]", "gpu[08-07]"):      `SLURM_STEP_NODELIST="gpu[08-07]": bad range "08-07"`,
		swap(slurm, "2(x3)", "2(y3)"):                   `SLURM_STEP_TASKS_PER_NODE="2(y3)"`,
		swap(slurm, "2(x3)", "2"):                       "has no entry for SLURM_NODEID=1",
		swap(slurm, "SLURM_PROCID=3", "SLURM_PROCID=6"): "SLURM_PROCID=6 is outside SLURM_STEP_NUM_TASKS=6",
		slurm + " WORLD_SIZE=8":                         "WORLD_SIZE=8, but this Slurm step has SLURM_STEP_NUM_TASKS=6",
		openmpi:                                         "mpirun -x MASTER_ADDR=HOST",
		"OMPI_COMM_WORLD_RANK=0":                        "OMPI_COMM_WORLD_SIZE is not set",
		swap(openmpi, "WORLD_RANK=3", "WORLD_RANK=9") + " MASTER_ADDR=a MASTER_PORT=1":              "OMPI_COMM_WORLD_RANK=9 is outside OMPI_COMM_WORLD_SIZE=4",
		swap(openmpi, "LOCAL_SIZE=2", "LOCAL_SIZE=4") + " MASTER_ADDR=a MASTER_PORT=1 WORLD_SIZE=5": "WORLD_SIZE=5, but OMPI_COMM_WORLD_SIZE=4",
	} {
		_, ok, err := fromEnv(lookupIn(vars))
		assert.False(t, ok, vars)
		assert.ErrorIs(t, err, ErrEnv, vars)
		assert.ErrorContains(t, err, want, vars)
	}
}

// Every task of a step must come to the same master and world, and to its own rank.
func TestSlurmTasksAgree(t *testing.T) {
	seen := map[int]bool{}
	rank := 0
	for node, tasks := range []int{3, 3, 1} {
		for local := range tasks {
			e, ok, err := fromEnv(lookupIn(fmt.Sprintf("SLURM_PROCID=%d SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=%d SLURM_NODEID=%d "+
				"SLURM_JOB_NODELIST=n[1,3-4] SLURM_TASKS_PER_NODE=3(x2),1 SLURM_JOB_ID=99999999 SLURM_STEP_ID=0", rank, local, node)))
			require.NoError(t, err)
			require.True(t, ok)
			assert.Equal(t, tasks, e.LocalWorldSize)
			assert.Equal(t, "n1", e.MasterAddr)
			assert.Equal(t, 15000+99999999%15000, e.MasterPort)
			assert.Equal(t, 7, e.WorldSize)
			seen[e.Rank] = true
			rank++
		}
	}
	assert.Len(t, seen, 7)
}

func TestOpenMPIOnOneNodeNeedsNoAddress(t *testing.T) {
	const vars = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-h-77@1 "
	a, ok, err := fromEnv(lookupIn(vars + "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0"))
	require.NoError(t, err)
	require.True(t, ok)
	b, _, err := fromEnv(lookupIn(vars + "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_RANK=1"))
	require.NoError(t, err)
	assert.Equal(t, "127.0.0.1", a.MasterAddr)
	assert.Equal(t, a.MasterPort, b.MasterPort)
	assert.Equal(t, 1, b.Rank)
	c, _, err := fromEnv(lookupIn(strings.Replace(vars, "77", "78", 1) + "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0"))
	require.NoError(t, err)
	assert.NotEqual(t, a.MasterPort, c.MasterPort, "two jobs on one machine")
}

func TestExpandNodeList(t *testing.T) {
	for list, want := range map[string]string{
		"node1":                "node1",
		"node[01-03,7]":        "node01 node02 node03 node7",
		"node[01-03,7],login":  "node01 node02 node03 node7 login",
		"a[9-11],b[099-101]":   "a9 a10 a11 b099 b100 b101",
		"r[1-2]c[0-1]":         "r1c0 r1c1 r2c0 r2c1",
		"gpu-[1,3]-ib.cluster": "gpu-1-ib.cluster gpu-3-ib.cluster",
		"h1, h2":               "h1 h2",
	} {
		got, err := ExpandNodeList(list)
		require.NoError(t, err, list)
		assert.Equal(t, want, strings.Join(got, " "))
	}
	for _, bad := range []string{"", ",", "a[", "a]", "a[1-2", "a[2-1]", "a[x]", "a[]", "a[1-]", "a[[1]]", "a[1]]", "a[1,]", "a[0-999999999]", "a[1-1000][1-1000]", "a[-1]"} {
		got, err := ExpandNodeList(bad)
		assert.Error(t, err, "%q gave %v", bad, got)
	}
}

func TestGPUOfRank(t *testing.T) {
	for _, c := range []struct {
		e       Env
		visible int
		want    int
		err     string
	}{
		{Env{LocalRank: 2, Source: SourceTorchrun}, 4, 2, ""},
		{Env{LocalRank: 2, Source: SourceSlurm}, 4, 2, ""},
		{Env{LocalRank: 2, Source: SourceSlurm}, 1, 0, ""},
		{Env{LocalRank: 1, Source: SourceSpawn}, 1, 0, "local rank 1, but only 1 GPU(s)"},
		{Env{LocalRank: 2, Source: SourceSlurm}, 2, 0, "only 2 GPU(s)"},
		{Env{}, 0, 0, "none is visible"},
	} {
		got, err := c.e.GPU(c.visible)
		if c.err != "" {
			assert.ErrorContains(t, err, c.err)
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, c.want, got)
	}
}

func FuzzExpandNodeList(f *testing.F) {
	f.Add("node[01-03,7],login")
	f.Add("r[1-2]c[0-1]")
	f.Fuzz(func(t *testing.T, s string) {
		names, err := ExpandNodeList(s)
		if err == nil && (len(names) == 0 || len(names) > maxNodes) {
			t.Fatalf("%d names", len(names))
		}
	})
}
