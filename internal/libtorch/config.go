package libtorch

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/goddp/goddp/csrc"
)

// Version is the one release of libtorch that this module is written and tested for.
const Version = "2.11.0"

// The environment variables that set-up reads.
const (
	EnvCache      = "GODDP_CACHE"                   // another cache folder
	EnvLibtorch   = "LIBTORCH"                      // an existing libtorch to use
	EnvAnyVersion = "LIBTORCH_BYPASS_VERSION_CHECK" // 1: take $LIBTORCH whatever its version
	EnvFlavor     = "FLAVOR"                        // cpu, cuda or auto
	EnvCXX        = "CXX"                           // another C++ compiler than g++
)

// Flavor says which libraries of libtorch are used.
type Flavor string

// The flavours. Auto, also the empty one, is CUDA on a machine with an NVIDIA GPU and CPU elsewhere.
const (
	Auto Flavor = "auto"
	CPU  Flavor = "cpu"
	CUDA Flavor = "cuda"
)

// ParseFlavor reads a flavour's name.
func ParseFlavor(s string) (Flavor, error) {
	switch f := Flavor(strings.ToLower(s)); f {
	case "":
		return Auto, nil
	case Auto, CPU, CUDA:
		return f, nil
	}
	return "", fmt.Errorf("unknown flavor %q: use cpu, cuda or auto", s)
}

// Config says what to set up. Its zero value is the usual: libtorch from the package index, the flavour that fits the
// machine, the default cache, no output.
type Config struct {
	Cache      string    // the cache folder; "" is CacheDir()
	Flavor     Flavor    // "" is Auto
	Libtorch   string    // an existing libtorch tree; "" fetches one
	AnyVersion bool      // take Libtorch whatever its version
	CXX        string    // the C++ compiler; "" is g++
	Sources    fs.FS     // the tree that holds tdp/*.cpp; nil is csrc.Files()
	Verify     bool      // hash every file of the trees that are there, rather than comparing sizes
	Quiet      bool      // say nothing when there is nothing to do
	Out        io.Writer // progress; nil is nowhere

	seams seams
}

// seams are what tests replace.
type seams struct {
	python string               // a Python with pip; "" is python3
	wheels func(Flavor) []wheel // what the tree is made of
	gotch  gotchSource          // where the prepared gotch comes from
	gpu    func() (found bool, why string)
	free   func(dir string) (int64, error) // bytes free
	jobs   int                             // C++ compilers at a time
}

// FromEnv is the configuration that the environment asks for.
func FromEnv() (Config, error) {
	flavor, err := ParseFlavor(os.Getenv(EnvFlavor))
	if err != nil {
		return Config{}, fmt.Errorf("$%s: %w", EnvFlavor, err)
	}
	return Config{
		Cache:      os.Getenv(EnvCache),
		Flavor:     flavor,
		Libtorch:   os.Getenv(EnvLibtorch),
		AnyVersion: isTrue(os.Getenv(EnvAnyVersion)),
		CXX:        os.Getenv(EnvCXX),
	}, nil
}

func isTrue(s string) bool { return s != "" && s != "0" && s != "false" }

// CacheDir is where set-up keeps what it makes: $GODDP_CACHE, or goddp in the user's cache folder.
func CacheDir() (string, error) {
	if d := os.Getenv(EnvCache); d != "" {
		return d, nil
	}
	d, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder (%w): set %s to one", err, EnvCache)
	}
	return filepath.Join(d, "goddp"), nil
}

// resolve fills in what was left open.
func (c Config) resolve() (Config, error) {
	if c.Cache == "" {
		d, err := CacheDir()
		if err != nil {
			return c, err
		}
		c.Cache = d
	}
	abs, err := filepath.Abs(c.Cache)
	if err != nil {
		return c, err
	}
	c.Cache = abs
	if c.Libtorch != "" {
		if c.Libtorch, err = filepath.Abs(c.Libtorch); err != nil {
			return c, err
		}
	}
	// These end up in linker flags, where cgo and the linker give such characters a meaning.
	for _, p := range []string{c.Cache, c.Libtorch} {
		if i := strings.IndexFunc(p, unsafeInFlags); i >= 0 {
			return c, fmt.Errorf("the path %s holds %q, which linker flags of Go cannot: set %s (or %s) to another place",
				p, p[i:i+1], EnvCache, EnvLibtorch)
		}
	}
	if c.Sources == nil {
		c.Sources = csrc.Files()
	}
	if c.Out == nil {
		c.Out = io.Discard
	}
	s := &c.seams
	if s.python == "" {
		s.python = "python3"
	}
	if s.wheels == nil {
		s.wheels = wheelsOf
	}
	if s.gotch == nil {
		s.gotch = moduleGotch{}
	}
	if s.gpu == nil {
		s.gpu = findGPU
	}
	if s.free == nil {
		s.free = freeBytes
	}
	if s.jobs == 0 {
		s.jobs = compilers()
	}
	return c, nil
}

func unsafeInFlags(r rune) bool {
	switch {
	case r >= 0x80, r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
		return false
	}
	return !strings.ContainsRune("/ +-._~=:", r)
}

// supported says whether libtorch's builds run on this machine at all.
func supported() error {
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return fmt.Errorf("%s/%s is not supported: libtorch %s is set up on linux/amd64 only", runtime.GOOS, runtime.GOARCH, Version)
	}
	if _, err := os.Stat("/lib64/ld-linux-x86-64.so.2"); err != nil {
		return fmt.Errorf("this system has no glibc (%w): libtorch needs glibc 2.28 or newer, as Debian 10, Ubuntu 20.04 and later have", err)
	}
	return nil
}
