package record

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// ThisMachine describes the machine, of which cores are used.
func ThisMachine(cores []int) (Machine, error) {
	m := Machine{Cores: cores}
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(cpu)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			m.CPU = strings.TrimSpace(value)
			break
		}
	}
	var info unix.Sysinfo_t
	var name unix.Utsname
	if err := errors.Join(unix.Sysinfo(&info), unix.Uname(&name)); err != nil {
		return m, err
	}
	m.Memory = float64(info.Totalram) * float64(info.Unit)
	m.System = "Linux " + unix.ByteSliceToString(name.Release[:])
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return m, err
	}
	if fields := strings.Fields(string(load)); len(fields) >= 3 {
		m.Load = strings.Join(fields[:3], " ")
	}
	return m, nil
}

// Busy watches for a while and gives the part of all cores that was in use.
func Busy(d time.Duration) (float64, error) {
	idle0, all0, err := ticks()
	if err != nil {
		return 0, err
	}
	time.Sleep(d)
	idle1, all1, err := ticks()
	if err != nil || all1 == all0 {
		return 0, err
	}
	return 1 - (idle1-idle0)/(all1-all0), nil
}

func ticks() (idle, all float64, err error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0, err
	}
	first, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(first)[1:] {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("/proc/stat: %w", err)
		}
		if i < 8 { // the guests' time after it is counted already
			all += n
		}
		if i == 3 || i == 4 { // idle, and waiting for a disk
			idle += n
		}
	}
	return idle, all, nil
}

// Commit is the state of the sources in the folder: its commit, and whether files have changed since. Files that the
// record itself is written to do not count.
func Commit(dir string) (commit string, dirty bool) {
	git := func(args ...string) (string, error) {
		out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).Output()
		return strings.TrimSpace(string(out)), err
	}
	commit, err := git("rev-parse", "--short=12", "HEAD")
	if err != nil {
		return "unknown", false
	}
	changed, err := git("status", "--porcelain", "--", ".", ":(exclude)docs/"+jsonName, ":(exclude)docs/"+pageName)
	return commit, err == nil && changed != ""
}
