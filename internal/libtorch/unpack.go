package libtorch

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/csv"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// unpack writes the files of a wheel that keep wants below dir, each held against the hash in the wheel's RECORD, and
// returns their hashes by path.
func unpack(ctx context.Context, wheel, dir string, keep func(name string) bool, wrote func(bytes int64)) (map[string]string, error) {
	r, err := zip.OpenReader(wheel)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", wheel, err)
	}
	defer r.Close()
	record, err := readRecord(&r.Reader)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", wheel, err)
	}
	var mu sync.Mutex
	sums := map[string]string{}
	group, ctx := newGroup(ctx, min(runtime.GOMAXPROCS(0), 8))
	for _, f := range r.File {
		if !keep(f.Name) || strings.HasSuffix(f.Name, "/") {
			continue
		}
		if !filepath.IsLocal(f.Name) {
			return nil, errors.Join(fmt.Errorf("%s: it holds a path outside of itself, %q", wheel, f.Name), group.wait())
		}
		group.do(func() error {
			sum, err := unpackFile(ctx, f, filepath.Join(dir, f.Name), wrote)
			if err != nil {
				return fmt.Errorf("%s: %s: %w", wheel, f.Name, err)
			}
			want, listed := record[f.Name]
			switch {
			case strings.HasSuffix(f.Name, ".dist-info/RECORD"): // it cannot hold its own hash
			case !listed:
				return fmt.Errorf("%s: %s is not in its RECORD", wheel, f.Name)
			case want != sum:
				return fmt.Errorf("%s: %s: sha256 %s in place of %s, as its RECORD has it", wheel, f.Name, sum, want)
			}
			mu.Lock()
			sums[f.Name] = sum
			mu.Unlock()
			return nil
		})
	}
	return sums, group.wait()
}

func unpackFile(ctx context.Context, f *zip.File, path string, wrote func(int64)) (sum string, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	in, err := f.Open()
	if err != nil {
		return "", err
	}
	defer in.Close()
	mode := os.FileMode(0o644)
	if f.Mode()&0o111 != 0 {
		mode = 0o755
	}
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(out, h, counter(wrote)), &untilDone{ctx, in})
	if err = errors.Join(err, out.Close()); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

type counter func(int64)

func (c counter) Write(p []byte) (int, error) { c(int64(len(p))); return len(p), nil }

// readRecord reads the RECORD of a wheel: the hash of each file, in hex.
func readRecord(r *zip.Reader) (map[string]string, error) {
	for _, f := range r.File {
		if !strings.HasSuffix(f.Name, ".dist-info/RECORD") || strings.Count(f.Name, "/") != 1 {
			continue
		}
		in, err := f.Open()
		if err != nil {
			return nil, err
		}
		defer in.Close()
		lines := csv.NewReader(in)
		lines.FieldsPerRecord = 3
		out := map[string]string{}
		for {
			line, err := lines.Read()
			if errors.Is(err, io.EOF) {
				return out, nil
			}
			if err != nil {
				return nil, fmt.Errorf("RECORD: %w", err)
			}
			alg, sum, _ := strings.Cut(line[1], "=")
			if alg != "sha256" {
				continue
			}
			raw, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(sum, "="))
			if err != nil {
				return nil, fmt.Errorf("RECORD: %s: %w", line[0], err)
			}
			out[line[0]] = hex.EncodeToString(raw)
		}
	}
	return nil, errors.New("it has no RECORD: not a wheel")
}
