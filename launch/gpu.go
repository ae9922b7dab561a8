package launch

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// GPU is one CUDA device, a whole GPU or a MIG instance of one.
type GPU struct {
	Index   int    // the number NVML (and nvidia-smi) gives the GPU, or the one that a MIG instance is on
	Name    string // such as "NVIDIA H200"
	UUID    string // "GPU-…", or "MIG-…"
	MIG     bool
	Memory  uint64 // bytes
	PCIBus  string
	Compute string // compute capability, such as "9.0"
}

// Inventory is what GPUs there are, found through NVML without creating a CUDA context. A process that only counts GPUs so holds no memory on them
// and can still start ranks.
type Inventory struct {
	// Devices are the devices that CUDA shows this process, in CUDA's order: cuda:0 is the first. CUDA_VISIBLE_DEVICES is heeded.
	Devices []GPU
	// All are the whole GPUs of this machine, or container, in NVML's order, and MIG the instances made on them.
	All, MIG []GPU
	Driver   string // version
	// Reason says why Devices is empty, for a line such as "no GPU: NVML library not found".
	Reason string
	// Notes are oddities worth a line: entries that CUDA does not heed, instances it does not show.
	Notes []string
}

// Count is the number of devices this process can use.
func (inv Inventory) Count() int { return len(inv.Devices) }

// String is one line: how many of what, or why none.
func (inv Inventory) String() string {
	if len(inv.Devices) == 0 {
		return "no GPU: " + inv.Reason
	}
	var kinds []string
	count := map[string]int{}
	for _, d := range inv.Devices {
		if count[d.Name]++; count[d.Name] == 1 {
			kinds = append(kinds, d.Name)
		}
	}
	for i, k := range kinds {
		kinds[i] = fmt.Sprintf("%d × %s", count[k], k)
	}
	return strings.Join(kinds, ", ")
}

// GPUs looks for GPUs. A machine without any, or without NVIDIA's driver, is no error: see Reason.
func GPUs() Inventory {
	return discover(nvml.New(), os.LookupEnv)
}

func discover(lib nvml.Interface, lookup func(string) (string, bool)) (inv Inventory) {
	if ret := lib.Init(); ret != nvml.SUCCESS {
		inv.Reason = initReason(ret)
		return inv
	}
	defer lib.Shutdown()
	if v, ret := lib.SystemGetDriverVersion(); ret == nvml.SUCCESS {
		inv.Driver = v
	}
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		inv.Reason = "NVML cannot count GPUs: " + ret.Error()
		return inv
	}
	// Old drivers lack the call, and NVML's wrapper would end the process on a missing symbol.
	canMIG := true
	if ext := lib.Extensions(); ext != nil {
		canMIG = ext.LookupSymbol("nvmlDeviceGetMigMode") == nil
	}
	instances := map[int][]GPU{} // by GPU
	split := map[int]bool{}      // GPUs in MIG mode
	for i := range n {
		dev, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			// A GPU that fell off the bus keeps its number, and CUDA does not show it.
			inv.Notes = append(inv.Notes, fmt.Sprintf("GPU %d cannot be used: %s", i, ret.Error()))
			continue
		}
		gpu := describe(dev, i)
		inv.All = append(inv.All, gpu)
		if !canMIG {
			continue
		}
		if mode, _, ret := dev.GetMigMode(); ret != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
			continue
		}
		split[i] = true
		places, ret := dev.GetMaxMigDeviceCount()
		if ret != nvml.SUCCESS {
			continue
		}
		for p := range places {
			part, ret := dev.GetMigDeviceHandleByIndex(p)
			if ret != nvml.SUCCESS {
				continue // an empty place
			}
			mig := describe(part, i)
			mig.MIG, mig.PCIBus, mig.Compute = true, gpu.PCIBus, gpu.Compute
			instances[i] = append(instances[i], mig)
			inv.MIG = append(inv.MIG, mig)
		}
		if len(instances[i]) == 0 {
			inv.Notes = append(inv.Notes, fmt.Sprintf("GPU %d is in MIG mode but has no instance: create one (nvidia-smi mig -cgi … -C) or turn MIG off", i))
		}
	}
	list, isSet := lookup("CUDA_VISIBLE_DEVICES")
	inv.choose(list, isSet, split, instances)
	if len(inv.Devices) == 0 && inv.Reason == "" {
		switch {
		case len(inv.All) == 0:
			inv.Reason = "the driver sees no GPU"
		case isSet:
			inv.Reason = fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q hides all %d GPU(s)", list, len(inv.All))
		default:
			inv.Reason = fmt.Sprintf("%d GPU(s) are in MIG mode without an instance", len(inv.All))
		}
	}
	return inv
}

func initReason(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return "NVML library not found"
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return "NVIDIA's driver is not loaded"
	case nvml.ERROR_NO_PERMISSION:
		return "no permission to talk to NVIDIA's driver"
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "NVIDIA's driver and NVML library are of different versions: restart the machine after the update"
	}
	return "NVML does not start: " + ret.Error()
}

// describe asks a device for what it is; what it does not tell stays empty.
func describe(dev nvml.Device, index int) GPU {
	g := GPU{Index: index}
	if s, ret := dev.GetName(); ret == nvml.SUCCESS {
		g.Name = s
	}
	if s, ret := dev.GetUUID(); ret == nvml.SUCCESS {
		g.UUID = s
	}
	if m, ret := dev.GetMemoryInfo(); ret == nvml.SUCCESS {
		g.Memory = m.Total
	}
	if p, ret := dev.GetPciInfo(); ret == nvml.SUCCESS {
		g.PCIBus = string(bytes.TrimRight(p.BusId[:], "\x00"))
	}
	if major, minor, ret := dev.GetCudaComputeCapability(); ret == nvml.SUCCESS {
		g.Compute = fmt.Sprintf("%d.%d", major, minor)
	}
	return g
}

// choose fills Devices by CUDA's rules: the list is heeded up to the first entry that names no device, a device named
// twice hides all, and a process is shown at most one MIG instance.
func (inv *Inventory) choose(list string, isSet bool, split map[int]bool, instances map[int][]GPU) {
	whole := func(i int) (GPU, bool) {
		at := slices.IndexFunc(inv.All, func(g GPU) bool { return g.Index == i })
		if at < 0 {
			return GPU{}, false
		}
		if !split[i] {
			return inv.All[at], true
		}
		if len(instances[i]) == 0 {
			return GPU{}, false
		}
		return instances[i][0], true
	}
	if !isSet {
		for _, g := range inv.All {
			if !split[g.Index] {
				inv.Devices = append(inv.Devices, g)
			}
		}
		switch {
		case len(inv.Devices) == 0 && len(inv.MIG) > 0:
			inv.Devices = inv.MIG[:1:1]
			if len(inv.MIG) > 1 {
				inv.Notes = append(inv.Notes, fmt.Sprintf("of %d MIG instances CUDA shows a process only one; name one by CUDA_VISIBLE_DEVICES=MIG-…", len(inv.MIG)))
			}
		case len(inv.MIG) > 0:
			inv.Notes = append(inv.Notes, "MIG instances are left out beside whole GPUs")
		}
		return
	}

	stop := func(entry, why string) {
		inv.Notes = append(inv.Notes, fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q: entry %q %s; it and what follows is not heeded", list, entry, why))
	}
	entries := strings.Split(list, ",")
	// The first entry decides whether the list is of numbers or of names.
	first := strings.TrimSpace(entries[0])
	named := ""
	for _, p := range []string{"GPU-", "MIG-"} {
		if strings.HasPrefix(first, p) {
			named = p
		}
	}
	for at, entry := range entries {
		entry = strings.TrimSpace(entry)
		var gpu GPU
		var ok bool
		switch {
		case named == "":
			i := leadingNumber(entry)
			if i < 0 {
				if at > 0 || entry != "" && entry != "-1" && !strings.EqualFold(entry, "NoDevFiles") {
					stop(entry, "is no device number")
				}
				return
			}
			if gpu, ok = whole(i); !ok {
				stop(entry, "is no GPU of this machine")
				return
			}
		case !strings.HasPrefix(entry, named):
			stop(entry, "is of another kind than the first")
			return
		case named == "MIG-":
			if gpu, ok = unique(inv.MIG, entry); !ok {
				gpu, ok = inv.oldMIGName(entry, instances)
			}
			if !ok {
				stop(entry, "is no MIG instance of this machine")
				return
			}
		default:
			g, found := unique(inv.All, entry)
			if found {
				gpu, ok = whole(g.Index)
			}
			if !ok {
				stop(entry, "is no GPU of this machine, or not just one")
				return
			}
		}
		if slices.ContainsFunc(inv.Devices, func(g GPU) bool { return g == gpu }) {
			inv.Devices = nil
			inv.Reason = fmt.Sprintf("CUDA_VISIBLE_DEVICES=%q names a device twice, so CUDA shows none", list)
			return
		}
		if gpu.MIG && len(inv.Devices) > 0 || len(inv.Devices) > 0 && inv.Devices[0].MIG {
			stop(entry, "comes beside a MIG instance, and CUDA shows a process only one")
			return
		}
		inv.Devices = append(inv.Devices, gpu)
	}
}

// leadingNumber reads "2", "2gpu" or "+2" as 2, as CUDA does; -1: no number.
func leadingNumber(s string) int {
	s = strings.TrimPrefix(s, "+")
	end := 0
	for end < len(s) && s[end] >= '0' && s[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(s[:end])
	if err != nil {
		return -1
	}
	return n
}

// unique finds the one device whose UUID begins so.
func unique(all []GPU, prefix string) (GPU, bool) {
	var found []GPU
	for _, g := range all {
		if g.UUID != "" && strings.HasPrefix(g.UUID, prefix) {
			found = append(found, g)
		}
	}
	if len(found) != 1 {
		return GPU{}, false
	}
	return found[0], true
}

// oldMIGName understands the names of drivers before R470, MIG-GPU-<uuid>/<gpu instance>/<compute instance>, as far as the UUIDs that NVML gives have that form
// or the GPU has a single instance.
func (inv *Inventory) oldMIGName(entry string, instances map[int][]GPU) (GPU, bool) {
	uuid, _, ok := strings.Cut(strings.TrimPrefix(entry, "MIG-"), "/")
	if !ok || !strings.HasPrefix(uuid, "GPU-") {
		return GPU{}, false
	}
	g, ok := unique(inv.All, uuid)
	if !ok || len(instances[g.Index]) != 1 {
		return GPU{}, false
	}
	return instances[g.Index][0], true
}

// NProcPerNode reads torchrun's --nproc-per-node: a number, "gpu", "cpu", or "auto", which is one rank a GPU, or a CPU core where there is no GPU. why is
// a line that says what decided.
func NProcPerNode(s string) (n int, why string, err error) {
	return nprocPerNode(s, GPUs)
}

func nprocPerNode(s string, gpus func() Inventory) (n int, why string, err error) {
	switch s {
	case "auto", "gpu":
		inv := gpus()
		if n := inv.Count(); n > 0 {
			return n, fmt.Sprintf("one rank a GPU: %v", inv), nil
		}
		if s == "gpu" {
			return 0, "", fmt.Errorf("launch: --nproc-per-node gpu, but there is %v", inv)
		}
		n := runtime.NumCPU()
		return n, fmt.Sprintf("one rank a CPU core (%d): %v", n, inv), nil
	case "cpu":
		n := runtime.NumCPU()
		return n, fmt.Sprintf("one rank a CPU core: %d", n), nil
	}
	n, err = strconv.Atoi(s)
	if err != nil || n < 1 {
		return 0, "", fmt.Errorf("launch: --nproc-per-node %q: give a number of 1 or more, auto, gpu or cpu", s)
	}
	return n, fmt.Sprintf("%d ranks as asked", n), nil
}
