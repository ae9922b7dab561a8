package libtorch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Tree is a libtorch on disk.
type Tree struct {
	Torch    string   // the folder that holds include/ and lib/
	Version  string   // as its headers say
	Includes []string // where the CUDA flavour finds CUDA's and NCCL's headers
	LibDirs  []string // where the linker finds what libtorch itself needs
	id       string   // tells trees apart that give other object files
}

// Include are the folders of libtorch's own headers.
func (t Tree) Include() []string {
	return []string{filepath.Join(t.Torch, "include"), filepath.Join(t.Torch, "include", "torch", "csrc", "api", "include")}
}

// Lib is the folder of libtorch's libraries.
func (t Tree) Lib() string { return filepath.Join(t.Torch, "lib") }

// treeDir is where the fetched tree of a flavour lies.
func (s *setup) treeDir() string {
	return filepath.Join(s.cfg.Cache, "libtorch", Version+"-"+string(s.flavor))
}

// tree makes sure of libtorch.
func (s *setup) tree(ctx context.Context) (Tree, error) {
	if s.cfg.Libtorch != "" {
		return s.existing(ctx, s.cfg.Libtorch)
	}
	dir := s.treeDir()
	if err := s.ensure(ctx, dir, "libtorch", "libtorch "+Version, s.fetchTree); err != nil {
		return Tree{}, err
	}
	t := Tree{Torch: filepath.Join(dir, "torch"), Version: Version, id: wheelID}
	if s.flavor == CUDA {
		t.Includes = cudaIncludes(filepath.Join(dir, "nvidia"))
	}
	t.LibDirs = nvidiaLibs(dir)
	return t, nil
}

// ensure makes dir by fill, unless it is there and whole. Others that want it wait for the lock.
func (s *setup) ensure(ctx context.Context, dir, lock, what string, fill func(ctx context.Context, tmp string) (content, error)) error {
	err := whole(ctx, dir, s.cfg.Verify)
	if err == nil {
		return nil
	}
	if s.lookOnly {
		return missing(what, err)
	}
	unlock, lerr := s.lock(ctx, lock, what)
	if lerr != nil {
		return lerr
	}
	defer unlock()
	if err = whole(ctx, dir, s.cfg.Verify); err == nil { // another process made it meanwhile
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if _, there := os.Lstat(dir); there == nil {
		s.ui.say("%s is not whole (%v): making it anew", what, err)
	}
	s.worked.Store(true)
	return s.make(ctx, dir, func(tmp string) (content, error) { return fill(ctx, tmp) })
}

func missing(what string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", what, ErrNotSetUp)
	}
	return fmt.Errorf("%s: %w (%w)", what, ErrNotSetUp, err)
}

// fetchTree fills tmp with the wheels' content.
func (s *setup) fetchTree(ctx context.Context, tmp string) (content, error) {
	list := s.cfg.seams.wheels(s.flavor)
	need := treeBytes[s.flavor]
	for _, w := range list {
		if info, err := os.Stat(filepath.Join(s.cfg.Cache, "downloads", w.file)); err != nil || info.Size() != w.size {
			need += w.size
		}
	}
	if err := s.needSpace(fmt.Sprintf("libtorch %s (%s)", Version, s.flavor), need); err != nil {
		return content{}, err
	}
	var paths []string
	for _, w := range list {
		path, err := s.fetch(ctx, w)
		if err != nil {
			return content{}, err
		}
		paths = append(paths, path)
	}
	s.ui.say("unpacking libtorch %s", Version)
	sums := map[string]string{}
	var wrote atomic.Int64
	start := time.Now()
	for _, path := range paths {
		part, err := unpack(ctx, path, tmp, func(name string) bool { return keep(s.flavor, name) }, func(n int64) {
			s.ui.amount("unpacking", wrote.Add(n), treeBytes[s.flavor], start)
		})
		if err != nil {
			return content{}, err
		}
		for name, sum := range part {
			sums[name] = sum
		}
	}
	s.ui.still()
	if err := checkTree(filepath.Join(tmp, "torch"), s.flavor); err != nil {
		return content{}, err
	}
	return content{sums: sums, spent: paths}, nil
}

// existing checks a libtorch that the user has: an unpacked libtorch archive, or the torch folder of a Python.
func (s *setup) existing(ctx context.Context, dir string) (Tree, error) {
	var torch string
	for _, sub := range []string{".", "torch", "libtorch"} {
		if _, err := os.Stat(filepath.Join(dir, sub, "lib", "libtorch_cpu.so")); err == nil {
			torch = filepath.Join(dir, sub)
			break
		}
	}
	if torch == "" {
		return Tree{}, fmt.Errorf("$%s=%s holds no lib/libtorch_cpu.so: set it to an unpacked libtorch, or to the torch folder of a Python's "+
			"site-packages, or unset it to have libtorch fetched", EnvLibtorch, dir)
	}
	version, err := headerVersion(torch)
	if err != nil {
		return Tree{}, fmt.Errorf("$%s=%s: %w", EnvLibtorch, dir, err)
	}
	if version != Version && !s.cfg.AnyVersion {
		return Tree{}, fmt.Errorf("$%s=%s is libtorch %s, and this goddp is made for %s: set %s to a libtorch %s, unset it to have one fetched, "+
			"or set %s=1 to try this one all the same", EnvLibtorch, dir, version, Version, EnvLibtorch, Version, EnvAnyVersion)
	}
	if err := checkTree(torch, s.flavor); err != nil {
		return Tree{}, fmt.Errorf("$%s=%s: %w", EnvLibtorch, dir, err)
	}
	info, err := os.Stat(filepath.Join(torch, "lib", "libtorch_cpu.so"))
	if err != nil {
		return Tree{}, err
	}
	t := Tree{Torch: torch, Version: version, LibDirs: nvidiaLibs(filepath.Dir(torch)),
		id: fmt.Sprintf("%s %s %d %d", torch, version, info.Size(), info.ModTime().UnixNano())}
	if wheelHeaders(torch) {
		t.id = wheelID
	}
	if s.flavor == CUDA {
		if t.Includes, err = s.cudaHeaders(ctx, torch); err != nil {
			return Tree{}, err
		}
	}
	return t, nil
}

// checkTree looks for what the build needs.
func checkTree(torch string, f Flavor) error {
	need := []string{"lib/libtorch_cpu.so", "lib/libc10.so", "include/ATen/ATen.h", "include/torch/csrc/api/include/torch/torch.h",
		"include/torch/csrc/distributed/c10d/TCPStore.hpp", "include/torch/csrc/distributed/c10d/reducer.hpp"}
	if f == CUDA {
		need = append(need, "lib/libtorch_cuda.so", "lib/libc10_cuda.so")
	}
	for _, name := range need {
		if _, err := os.Stat(filepath.Join(torch, name)); err != nil {
			if strings.Contains(name, "cuda") {
				return fmt.Errorf("%s is missing: this libtorch is built without CUDA; use --flavor cpu, or another libtorch", name)
			}
			return fmt.Errorf("%s is missing: not a whole libtorch", name)
		}
	}
	return nil
}

var versionLine = regexp.MustCompile(`(?m)^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) (\d+)`)

// headerVersion is the version in libtorch's headers, which archives and Python packages have alike.
func headerVersion(torch string) (string, error) {
	var text []byte
	var err error
	for _, name := range []string{"include/torch/headeronly/version.h", "include/torch/csrc/api/include/torch/version.h"} {
		if text, err = os.ReadFile(filepath.Join(torch, name)); err == nil && versionLine.Match(text) {
			break
		}
	}
	part := map[string]string{}
	for _, m := range versionLine.FindAllSubmatch(text, -1) {
		part[string(m[1])] = string(m[2])
	}
	if len(part) != 3 {
		return "", fmt.Errorf("its headers do not tell its version (%w)", err)
	}
	return part["MAJOR"] + "." + part["MINOR"] + "." + part["PATCH"], nil
}

// cudaIncludes are the header folders below an nvidia folder.
func cudaIncludes(nvidia string) []string {
	var out []string
	for _, sub := range []string{"cu13/include", "cu13/include/cccl", "nccl/include"} {
		out = append(out, filepath.Join(nvidia, sub))
	}
	return out
}

// nvidiaLibs are the folders with NVIDIA's libraries beside a torch folder, those that libtorch's own run path names.
func nvidiaLibs(root string) []string {
	found, _ := filepath.Glob(filepath.Join(root, "nvidia", "*", "lib"))
	return found
}

// cudaHeaders finds or fetches CUDA's and NCCL's headers for a libtorch of the user's: a Python's torch brings the
// libraries, and most, but not all, of the headers. Only the wheels with what is missing are fetched.
func (s *setup) cudaHeaders(ctx context.Context, torch string) ([]string, error) {
	includes := cudaIncludes(filepath.Join(filepath.Dir(torch), "nvidia"))
	var lacking []string
	for _, of := range []struct{ header, wheel string }{
		{"cuda_runtime_api.h", "nvidia-cuda-runtime"}, {"crt/host_defines.h", "nvidia-cuda-crt"},
		{"cuda/std/detail/__config", "nvidia-cuda-cccl"}, {"nccl.h", "nvidia-nccl-cu13"},
	} {
		if !slices.ContainsFunc(includes, func(d string) bool { _, err := os.Stat(filepath.Join(d, of.header)); return err == nil }) {
			lacking = append(lacking, of.wheel)
		}
	}
	if len(lacking) == 0 {
		return includes, nil
	}
	dir := filepath.Join(s.cfg.Cache, "libtorch", "cuda-headers-13.0-"+key(lacking...))
	err := s.ensure(ctx, dir, "libtorch", "the headers of CUDA", func(ctx context.Context, tmp string) (content, error) {
		sums, spent := map[string]string{}, []string(nil)
		for _, w := range s.cfg.seams.wheels(CUDA) {
			if !slices.Contains(lacking, w.name) {
				continue
			}
			path, err := s.fetch(ctx, w)
			if err != nil {
				return content{}, err
			}
			part, err := unpack(ctx, path, tmp, func(name string) bool { return strings.Contains(name, "/include/") }, func(int64) {})
			if err != nil {
				return content{}, err
			}
			maps.Copy(sums, part)
			spent = append(spent, path)
		}
		return content{sums, spent, false}, nil
	})
	return append(includes, cudaIncludes(filepath.Join(dir, "nvidia"))...), err
}

// The trees that hold the headers of the pinned wheel of torch: object files serve them all.
const (
	wheelID = "wheel " + Version
	// wheelHeaderSum is the hash of the lines about include/ in that wheel's list of files, sorted.
	wheelHeaderSum = "3076bffb7a6e1edcb92730c5dddaae1554218f099a408067f7e9923d9dbab3f8"
)

// wheelHeaders says whether the headers of a Python's torch are, by that Python's list of files, those of the wheel.
func wheelHeaders(torch string) bool {
	text, err := os.ReadFile(filepath.Join(filepath.Dir(torch), "torch-"+Version+".dist-info", "RECORD"))
	return err == nil && headerSum(string(text)) == wheelHeaderSum
}

func headerSum(record string) string {
	var lines []string
	for line := range strings.Lines(record) {
		if strings.HasPrefix(line, "torch/include/") {
			lines = append(lines, strings.TrimRight(line, "\r\n"))
		}
	}
	slices.Sort(lines)
	h := sha256.New()
	for _, l := range lines {
		fmt.Fprintln(h, l)
	}
	return hex.EncodeToString(h.Sum(nil))
}
