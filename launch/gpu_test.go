package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// fakeGPU is a GPU of the fake driver; mig is nil for a GPU that is not in MIG mode.
type fakeGPU struct {
	uuid string
	mig  []string // UUIDs of instances, "" for an empty place
	lost bool
}

func fakeDevice(uuid, name string) *mock.Device {
	return &mock.Device{
		GetNameFunc:       func() (string, nvml.Return) { return name, nvml.SUCCESS },
		GetUUIDFunc:       func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
		GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) { return nvml.Memory{Total: 141 << 30}, nvml.SUCCESS },
		GetPciInfoFunc: func() (nvml.PciInfo, nvml.Return) {
			var p nvml.PciInfo
			copy(p.BusId[:], "00000000:01:00.0")
			return p, nvml.SUCCESS
		},
		GetCudaComputeCapabilityFunc: func() (int, int, nvml.Return) { return 9, 0, nvml.SUCCESS },
		GetMigModeFunc:               func() (int, int, nvml.Return) { return 0, 0, nvml.ERROR_NOT_SUPPORTED },
	}
}

func fakeNVML(gpus ...fakeGPU) *mock.Interface {
	return &mock.Interface{
		InitFunc:                   func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:               func() nvml.Return { return nvml.SUCCESS },
		ExtensionsFunc:             func() nvml.ExtendedInterface { return nil },
		SystemGetDriverVersionFunc: func() (string, nvml.Return) { return "580.1", nvml.SUCCESS },
		DeviceGetCountFunc:         func() (int, nvml.Return) { return len(gpus), nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(i int) (nvml.Device, nvml.Return) {
			g := gpus[i]
			if g.lost {
				return nil, nvml.ERROR_GPU_IS_LOST
			}
			d := fakeDevice(g.uuid, "NVIDIA H200")
			if g.mig == nil {
				return d, nvml.SUCCESS
			}
			d.GetMigModeFunc = func() (int, int, nvml.Return) { return nvml.DEVICE_MIG_ENABLE, 1, nvml.SUCCESS }
			d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return len(g.mig), nvml.SUCCESS }
			d.GetMigDeviceHandleByIndexFunc = func(p int) (nvml.Device, nvml.Return) {
				if g.mig[p] == "" {
					return nil, nvml.ERROR_NOT_FOUND
				}
				return fakeDevice(g.mig[p], "NVIDIA H200 MIG 1g.18gb"), nvml.SUCCESS
			}
			return d, nvml.SUCCESS
		},
	}
}

func TestVisibleDevices(t *testing.T) {
	four := []fakeGPU{{uuid: "GPU-aa11"}, {uuid: "GPU-aa22"}, {uuid: "GPU-bb33"}, {uuid: "GPU-cc44"}}
	mixed := []fakeGPU{{uuid: "GPU-aa11", mig: []string{"", "MIG-m1", "MIG-m2"}}, {uuid: "GPU-bb22"}}
	onlyMIG := []fakeGPU{{uuid: "GPU-aa11", mig: []string{"MIG-m1", "MIG-m2"}}}
	for _, c := range []struct {
		name, list string
		gpus       []fakeGPU
		want       string // last characters of the UUIDs
		reason     string
		note       string
	}{
		{name: "unset", list: "unset", gpus: four, want: "11 22 33 44"},
		{name: "order", list: "2,0", gpus: four, want: "33 11"},
		{name: "blanks", list: " 1 , 3", gpus: four, want: "22 44"},
		{name: "strtoul", list: "1gpu2,2ampere", gpus: four, want: "22 33"},
		{name: "stops at -1", list: "0,-1,1", gpus: four, want: "11", note: `"-1" is no device number`},
		{name: "stops at one too many", list: "1,4,0", gpus: four, want: "22", note: `"4" is no GPU of this machine`},
		{name: "empty", list: "", gpus: four, reason: `CUDA_VISIBLE_DEVICES="" hides all 4 GPU(s)`},
		{name: "-1", list: "-1", gpus: four, reason: `CUDA_VISIBLE_DEVICES="-1" hides all 4 GPU(s)`},
		{name: "nonsense", list: "all", gpus: four, reason: `CUDA_VISIBLE_DEVICES="all" hides all 4 GPU(s)`, note: `"all" is no device number`},
		{name: "twice", list: "1,1", gpus: four, reason: "names a device twice"},
		{name: "uuid", list: "GPU-bb33,GPU-aa11", gpus: four, want: "33 11"},
		{name: "short uuid", list: "GPU-b,GPU-aa2", gpus: four, want: "33 22"},
		{name: "ambiguous uuid", list: "GPU-cc,GPU-aa", gpus: four, want: "44", note: "not just one"},
		{name: "unknown uuid", list: "GPU-dd", gpus: four, reason: "hides all 4", note: "is no GPU of this machine"},
		{name: "kinds mixed", list: "GPU-cc,1", gpus: four, want: "44", note: "another kind"},
		{name: "same by uuid twice", list: "GPU-cc,GPU-cc44", gpus: four, reason: "names a device twice"},
		{name: "lost", list: "unset", gpus: []fakeGPU{{uuid: "GPU-11"}, {lost: true}, {uuid: "GPU-33"}}, want: "11 33", note: "GPU 1 cannot be used"},
		{name: "whole before MIG", list: "unset", gpus: mixed, want: "22", note: "left out beside whole GPUs"},
		{name: "one MIG", list: "unset", gpus: onlyMIG, want: "m1", note: "of 2 MIG instances"},
		{name: "MIG by name", list: "MIG-m2", gpus: mixed, want: "m2"},
		{name: "MIG by GPU number", list: "0", gpus: mixed, want: "m1"},
		{name: "two MIG", list: "MIG-m1,MIG-m2", gpus: mixed, want: "m1", note: "shows a process only one"},
		{name: "whole and MIG", list: "1,0", gpus: mixed, want: "22", note: "shows a process only one"},
		{name: "unknown MIG", list: "MIG-m9", gpus: mixed, reason: "hides all 2", note: "no MIG instance"},
		{name: "old MIG name", list: "MIG-GPU-aa11/1/0", gpus: []fakeGPU{{uuid: "GPU-aa11", mig: []string{"MIG-m7"}}}, want: "m7"},
		{name: "MIG without instance", list: "unset", gpus: []fakeGPU{{uuid: "GPU-aa", mig: []string{""}}}, reason: "in MIG mode without an instance", note: "nvidia-smi mig"},
		{name: "none", list: "unset", reason: "the driver sees no GPU"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lib := fakeNVML(c.gpus...)
			inv := discover(lib, func(name string) (string, bool) {
				require.Equal(t, "CUDA_VISIBLE_DEVICES", name)
				return c.list, c.list != "unset"
			})
			var got []string
			for _, d := range inv.Devices {
				got = append(got, d.UUID[len(d.UUID)-2:])
				assert.Equal(t, strings.HasPrefix(d.UUID, "MIG-"), d.MIG)
				assert.Equal(t, "00000000:01:00.0", d.PCIBus)
				assert.Equal(t, "9.0", d.Compute)
				assert.EqualValues(t, 141<<30, d.Memory)
			}
			assert.Equal(t, c.want, strings.Join(got, " "))
			assert.Equal(t, len(got), inv.Count())
			assert.Equal(t, c.reason == "", inv.Reason == "")
			assert.Contains(t, inv.Reason, c.reason)
			assert.Equal(t, c.note == "", len(inv.Notes) == 0, "%q", inv.Notes)
			assert.Contains(t, strings.Join(inv.Notes, "\n"), c.note)
			assert.Len(t, lib.ShutdownCalls(), 1)
		})
	}
}

func TestNoNVML(t *testing.T) {
	for ret, reason := range map[nvml.Return]string{
		nvml.ERROR_LIBRARY_NOT_FOUND:       "no GPU: NVML library not found",
		nvml.ERROR_DRIVER_NOT_LOADED:       "no GPU: NVIDIA's driver is not loaded",
		nvml.ERROR_LIB_RM_VERSION_MISMATCH: "no GPU: NVIDIA's driver and NVML library are of different versions: restart the machine after the update",
		nvml.ERROR_UNKNOWN:                 "no GPU: NVML does not start: ERROR_UNKNOWN",
	} {
		inv := discover(&mock.Interface{InitFunc: func() nvml.Return { return ret }}, os.LookupEnv)
		assert.Zero(t, inv.Count())
		assert.Equal(t, reason, inv.String())
	}
}

type noMIGSymbols struct{ nvml.ExtendedInterface }

func (noMIGSymbols) LookupSymbol(string) error { return errors.New("no such symbol") }

func TestOldDriverWithoutMIG(t *testing.T) {
	lib := fakeNVML(fakeGPU{uuid: "GPU-aa", mig: []string{"MIG-1"}})
	lib.ExtensionsFunc = func() nvml.ExtendedInterface { return noMIGSymbols{} }
	inv := discover(lib, func(string) (string, bool) { return "", false })
	require.Equal(t, 1, inv.Count())
	assert.False(t, inv.Devices[0].MIG)
}

// The real NVML, or its absence: whatever this machine has, it must agree with the driver's own list in /proc.
func TestGPUsOfThisMachine(t *testing.T) {
	t.Setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15")
	inv := GPUs()
	t.Logf("%v; driver %q; %q", inv, inv.Driver, inv.Notes)
	listed, err := filepath.Glob("/proc/driver/nvidia/gpus/*")
	require.NoError(t, err)
	if len(listed) == 0 {
		assert.Zero(t, len(inv.All))
		assert.Zero(t, inv.Count())
		assert.NotEmpty(t, inv.Reason)
		return
	}
	assert.LessOrEqual(t, len(inv.All), len(listed)) // a container may be shown only some
	assert.NotEmpty(t, inv.All)
	for _, g := range inv.All {
		assert.NotEmpty(t, g.Name)
		assert.True(t, strings.HasPrefix(g.UUID, "GPU-"), g.UUID)
	}
}

func TestNProcPerNode(t *testing.T) {
	with := func(n int) func() Inventory {
		return func() Inventory {
			inv := Inventory{Devices: make([]GPU, n)}
			for i := range inv.Devices {
				inv.Devices[i].Name = "NVIDIA H200"
			}
			if n == 0 {
				inv.Reason = "NVML library not found"
			}
			return inv
		}
	}
	cpus := runtime.NumCPU()
	for _, c := range []struct {
		s    string
		gpus int
		want int
		text string
	}{
		{"3", 0, 3, "3 ranks"},
		{"auto", 4, 4, "one rank a GPU: 4 × NVIDIA H200"},
		{"gpu", 2, 2, "2 × NVIDIA H200"},
		{"auto", 0, cpus, fmt.Sprintf("one rank a CPU core (%d): no GPU: NVML library not found", cpus)},
		{"cpu", 4, cpus, "CPU core"},
		{"gpu", 0, 0, "no GPU: NVML library not found"},
		{"0", 0, 0, `"0"`},
		{"-2", 0, 0, `"-2"`},
		{"two", 0, 0, `"two"`},
		{"", 0, 0, `""`},
	} {
		n, why, err := nprocPerNode(c.s, with(c.gpus))
		assert.Equal(t, c.want, n, c.s)
		if c.want == 0 {
			assert.ErrorContains(t, err, c.text)
		} else {
			require.NoError(t, err)
			assert.Contains(t, why, c.text)
		}
	}
}
