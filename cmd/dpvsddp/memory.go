package main

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/goddp/goddp/launch"
	"github.com/sugarme/gotch"
)

// memory watches how much a process takes on its devices: of the machine's memory where they are the CPU, as the growth
// of the largest resident size, or else of each GPU's.
type memory struct {
	gpus   []string // UUIDs; empty: the CPU
	before []uint64
}

// watchMemory is called before the model is made.
func watchMemory(devices []gotch.Device) (m *memory, err error) {
	m = &memory{}
	if !devices[0].IsCuda() {
		bytes, err := resident("VmRSS")
		m.before = []uint64{bytes}
		return m, err
	}
	visible := launch.GPUs().Devices
	for _, d := range devices {
		if d.Value >= len(visible) {
			return nil, fmt.Errorf("there is no GPU %d: %d are visible", d.Value, len(visible))
		}
		m.gpus = append(m.gpus, visible[d.Value].UUID)
	}
	m.before, err = m.used()
	return m, err
}

// peak is called after the last step. libtorch keeps memory of a GPU that it once had.
func (m *memory) peak() (bytes []uint64, err error) {
	if len(m.gpus) > 0 {
		bytes, err = m.used()
	} else {
		var most uint64
		most, err = resident("VmHWM")
		bytes = []uint64{most}
	}
	for i := range bytes {
		bytes[i] -= min(bytes[i], m.before[i])
	}
	return bytes, err
}

func (m *memory) used() (list []uint64, err error) {
	if ret := nvml.Init(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("NVML: %s", nvml.ErrorString(ret))
	}
	defer nvml.Shutdown()
	for _, uuid := range m.gpus {
		dev, ret := nvml.DeviceGetHandleByUUID(uuid)
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("NVML: GPU %s: %s", uuid, nvml.ErrorString(ret))
		}
		info, ret := dev.GetMemoryInfo()
		if ret != nvml.SUCCESS {
			return nil, fmt.Errorf("NVML: memory of GPU %s: %s", uuid, nvml.ErrorString(ret))
		}
		list = append(list, info.Used)
	}
	return list, nil
}

// resident reads a line of this process's status, in bytes.
func resident(name string) (uint64, error) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if text, ok := strings.CutPrefix(lines.Text(), name+":"); ok {
			kb, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(text, "kB")), 10, 64)
			return kb * 1024, err
		}
	}
	return 0, fmt.Errorf("/proc/self/status has no %s", name)
}
