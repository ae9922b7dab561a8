package checkpoint

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/sugarme/gotch"
)

// ErrDevice: a checkpoint wants a device that this process does not have.
var ErrDevice = errors.New("device not available")

// MapLocation says where storages go: it gets the place that a storage was saved from ("cpu", "cuda:0") and gives the
// place to load it to. "" keeps the place.
type MapLocation func(location string) (string, error)

// MapTo loads everything onto one device, as map_location=device.
func MapTo(dev gotch.Device) MapLocation {
	to := locationOf(dev)
	return func(string) (string, error) { return to, nil }
}

// MapDevices moves what was saved from one device to another and keeps the rest, as a map_location dict:
// MapDevices(map[string]string{"cuda:0": "cuda:1"}).
func MapDevices(m map[string]string) MapLocation {
	return func(location string) (string, error) { return m[location], nil }
}

func locationOf(dev gotch.Device) string {
	if dev.IsCuda() {
		return "cuda:" + strconv.Itoa(dev.Value)
	}
	return "cpu"
}

// resolve finds the device of a storage, and makes sure that it is there.
func (m MapLocation) resolve(location string) (gotch.Device, error) {
	to := location
	if m != nil {
		mapped, err := m(location)
		if err != nil {
			return gotch.CPU, fmt.Errorf("map_location of %q: %w", location, err)
		}
		if mapped != "" {
			to = mapped
		}
	}
	if to == "cpu" {
		return gotch.CPU, nil
	}
	kind, index, indexed := strings.Cut(to, ":")
	if kind != "cuda" {
		return gotch.CPU, fmt.Errorf("%w: a storage %s; only cpu and cuda can be loaded to. Load with MapTo(gotch.CPU)",
			ErrDevice, fromTo(location, to))
	}
	n := 0
	if indexed {
		var err error
		if n, err = strconv.Atoi(index); err != nil || n < 0 {
			return gotch.CPU, fmt.Errorf("%w: %q is not the name of a device", ErrDevice, to)
		}
	}
	switch have := deviceCount(); {
	case have == 0:
		return gotch.CPU, fmt.Errorf("%w: a storage %s, but this process has no CUDA device. Load with MapTo(gotch.CPU)",
			ErrDevice, fromTo(location, to))
	case n >= have:
		return gotch.CPU, fmt.Errorf("%w: a storage %s, but this process has only %d CUDA devices. "+
			"Load with MapDevices or MapTo the device of this rank", ErrDevice, fromTo(location, to), have)
	}
	return gotch.CudaBuilder(uint(n)), nil
}

func fromTo(location, to string) string {
	if location == to {
		return "belongs on " + to
	}
	return fmt.Sprintf("from %s is mapped to %s", location, to)
}
