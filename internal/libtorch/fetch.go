package libtorch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// fetch gives the path of a wheel in the cache, with the pinned content. What an earlier run fetched is kept; what is
// damaged is fetched again. The caller holds the lock "libtorch".
func (s *setup) fetch(ctx context.Context, w wheel) (string, error) {
	dir := filepath.Join(s.cfg.Cache, "downloads")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := os.RemoveAll(filepath.Join(dir, tmpMark+w.name)); err != nil { // a killed run's
		return "", err
	}
	path := filepath.Join(dir, w.file)
	if _, err := os.Stat(path); err == nil {
		sum, err := hashFile(ctx, path)
		if err != nil {
			return "", err
		}
		if sum == w.sha256 {
			return path, nil
		}
		s.ui.say("%s is damaged (its sha256 is not the pinned one): fetching it again", path)
		if err := os.Remove(path); err != nil {
			return "", err
		}
	}
	s.ui.say("fetching %s %s (%.1f MB) with pip", w.name, w.version, float64(w.size)/1e6)
	const tries = 3
	for try := 1; ; try++ {
		err := s.pipDownload(ctx, w, path)
		if err == nil {
			return path, nil
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		if try == tries || !worthRetrying(err) {
			return "", s.pipHint(w, err)
		}
		s.ui.say("fetching %s failed, trying again (%d of %d): %s", w.name, try+1, tries, lastLine(err))
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-time.After(time.Duration(try) * time.Second):
		}
	}
}

var errWheelContent = errors.New("not the pinned content")

// pipDownload has pip fetch one wheel and moves it to path when its content is right.
func (s *setup) pipDownload(ctx context.Context, w wheel, path string) error {
	tmp := filepath.Join(filepath.Dir(path), tmpMark+w.name) // one at a time, under the lock
	defer os.RemoveAll(tmp)
	unpack, dest := filepath.Join(tmp, "pip"), filepath.Join(tmp, "dest")
	for _, d := range []string{unpack, dest} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	pins := filepath.Join(tmp, "requirements.txt")
	if err := os.WriteFile(pins, []byte(w.name+"=="+w.version+" --hash=sha256:"+w.sha256+"\n"), 0o644); err != nil {
		return err
	}
	argv := []string{s.cfg.seams.python, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:",
		"--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"}
	for _, p := range platforms {
		argv = append(argv, "--platform", p)
	}
	argv = append(argv, "--dest", dest, "--requirement", pins)

	watching, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { // pip draws no bar into a pipe; the file it grows tells the same
		defer close(done)
		start := time.Now()
		for {
			select {
			case <-watching.Done():
				return
			case <-time.After(200 * time.Millisecond):
				s.ui.amount(w.name, sizeBelow(tmp), w.size, start)
			}
		}
	}()
	_, err := program{env: append(pipEnv(), "TMPDIR="+unpack)}.all(ctx, argv...)
	stop()
	<-done
	s.ui.still()
	if err != nil {
		return err
	}
	got, err := filepath.Glob(filepath.Join(dest, "*.whl"))
	if err != nil || len(got) != 1 {
		return fmt.Errorf("pip downloaded %d files in place of %s (%w)", len(got), w.file, err)
	}
	sum, err := hashFile(ctx, got[0])
	if err != nil {
		return err
	}
	if sum != w.sha256 {
		return fmt.Errorf("%s: sha256 %s in place of %s: %w", filepath.Base(got[0]), sum, w.sha256, errWheelContent)
	}
	return os.Rename(got[0], path)
}

// pipEnv keeps pip from asking, and from drawing.
func pipEnv() []string {
	return []string{"PIP_NO_INPUT=1", "PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_PROGRESS_BAR=off", "PIP_REQUIRE_VIRTUALENV=0"}
}

// worthRetrying leaves out failures that a second try meets as well.
func worthRetrying(err error) bool {
	text := err.Error()
	for _, final := range []string{"No module named pip", "No matching distribution", "No space left on device", "no such option"} {
		if strings.Contains(text, final) {
			return false
		}
	}
	return !errors.Is(err, exec.ErrNotFound)
}

// pipHint says what to do about a failed download.
func (s *setup) pipHint(w wheel, err error) error {
	text, hint := err.Error(), ""
	switch {
	case errors.Is(err, exec.ErrNotFound):
		hint = "python3 is not installed: `apt-get install python3-pip python3-venv` (it is used for pip only)"
	case strings.Contains(text, "No module named pip"):
		hint = "python3 has no pip: `apt-get install python3-pip python3-venv`"
	case strings.Contains(text, "No matching distribution"):
		hint = fmt.Sprintf("the package index that pip is configured for (`pip config list`) does not have %s: configure one that has, "+
			"or set %s to an existing libtorch %s", w.file, EnvLibtorch, Version)
	case strings.Contains(text, "DO NOT MATCH THE HASHES"), errors.Is(err, errWheelContent):
		hint = fmt.Sprintf("the package index gave another file than %s as it was published (sha256 %s): a mirror that repackages? "+
			"Configure pip for another index, or set %s to an existing libtorch %s", w.file, w.sha256, EnvLibtorch, Version)
	default:
		hint = "see pip's message below; what is fetched already is kept, so run this again when the cause is gone"
	}
	return s.explain(fmt.Errorf("fetching %s %s: %s\n%w", w.name, w.version, hint, err))
}

func lastLine(err error) string {
	text := strings.TrimSpace(err.Error())
	return text[strings.LastIndexByte(text, '\n')+1:]
}
