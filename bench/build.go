package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
)

// imageSizes is the file in docs that says how large the container images are: their names and bytes, as
// {"images": [{"name": "CPU image", "bytes": 1, "python_bytes": 1}]}. What builds the images writes it.
const imageSizes = "image-sizes.json"

var builds = benchmark{
	name: "build", title: "Building",
	run: runBuilds,
}

func runBuilds(ctx context.Context, h *harness) ([]record.Table, error) {
	times := record.Table{First: "build", Sides: []string{"Go"}}
	sizes := record.Table{First: "size", Sides: []string{"Go", "Python"}}
	plan := h.plan(5, 2)
	plan.Warmup = 0
	// A file of the program's that is nowhere but in an overlay, so that nothing in the clone changes.
	changed, overlay := filepath.Join(h.tmp, "changed.go"), filepath.Join(h.tmp, "overlay.json")
	added := filepath.Join(h.root, "cmd", "multigpu", "zz_changed.go")
	text, err := json.Marshal(map[string]any{"Replace": map[string]string{added: changed}})
	if err != nil {
		return nil, err
	}
	change := func() error {
		return os.WriteFile(changed, fmt.Appendf(nil, "package main\n\nvar _ = %d\n", time.Now().UnixNano()), 0o666)
	}
	if err := errors.Join(os.WriteFile(overlay, text, 0o666), change()); err != nil {
		return nil, err
	}
	out := filepath.Join(h.tmp, "built")
	build := func(cache string, flags ...string) (float64, error) {
		args := slices.Concat([]string{"build", "-overlay", overlay, "-o", out}, flags, []string{"./cmd/multigpu"})
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = h.root
		if cache != "" {
			cmd.Env = append(os.Environ(), "GOCACHE="+cache)
		}
		begin := time.Now()
		if text, err := cmd.CombinedOutput(); err != nil {
			return 0, fmt.Errorf("go build: %w\n%s", err, text)
		}
		return time.Since(begin).Seconds(), nil
	}
	row := func(name string, rounds int, once func(round int) (float64, error)) error {
		var all []float64
		for round := range rounds {
			v, err := once(round)
			if err != nil {
				return err
			}
			all = append(all, v)
			plan.Say("%s: %.1f s", name, v)
		}
		values := []pair.Summary{pair.Summarize(all)}
		times.Rows = append(times.Rows, record.Row{Name: name, Unit: record.Seconds, Values: values})
		return nil
	}
	if _, err := build(""); err != nil { // what is to be warm
		return nil, err
	}
	if !h.options.quick { // it takes minutes
		err = row("cold", 1, func(int) (float64, error) {
			cache := filepath.Join(h.tmp, "gocache")
			seconds, err := build(cache)
			return seconds, errors.Join(err, os.RemoveAll(cache))
		})
	}
	err = errors.Join(err, row("warm", plan.Rounds, func(round int) (float64, error) {
		if err := change(); err != nil {
			return 0, err
		}
		return build("")
	}), row("unchanged", plan.Rounds, func(int) (float64, error) { return build("") }))
	if err != nil {
		return nil, err
	}
	for _, s := range []struct {
		name  string
		flags []string
	}{{"binary of multigpu", nil}, {"binary of multigpu, stripped (`-ldflags=-s`)", []string{"-ldflags=-s"}}} {
		if _, err := build("", s.flags...); err != nil {
			return nil, err
		}
		info, err := os.Stat(out)
		if err != nil {
			return nil, err
		}
		sizes.Rows = append(sizes.Rows, record.One(s.name, record.Bytes, float64(info.Size())))
	}
	images, err := h.imageRows()
	sizes.Rows = append(sizes.Rows, images...)
	return []record.Table{times, sizes}, err
}

// imageRows are the sizes of container images, as far as they are known.
func (h *harness) imageRows() ([]record.Row, error) {
	text, err := os.ReadFile(filepath.Join(h.root, "docs", imageSizes))
	if errors.Is(err, fs.ErrNotExist) {
		return []record.Row{{Name: "container image", Unit: record.Bytes, Note: "not measured: no docs/" + imageSizes}}, nil
	}
	if err != nil {
		return nil, err
	}
	var file struct {
		Images []struct {
			Name        string  `json:"name"`
			Bytes       float64 `json:"bytes"`
			PythonBytes float64 `json:"python_bytes"`
		} `json:"images"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, fmt.Errorf("docs/%s: %w", imageSizes, err)
	}
	var rows []record.Row
	for _, i := range file.Images {
		row := record.One(i.Name, record.Bytes, i.Bytes)
		if i.PythonBytes > 0 {
			row.Values = append(row.Values, pair.Summarize([]float64{i.PythonBytes}))
		}
		rows = append(rows, row)
	}
	return rows, nil
}
