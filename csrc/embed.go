// Package csrc carries the C++ sources of the C ABI, so that `goddp setup` can compile them wherever it runs: in a
// clone, from the read-only module cache, or as an installed binary.
//
// It is plain Go and needs neither cgo nor libtorch.
package csrc

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"sync"
)

//go:embed tdp
var files embed.FS

// Files holds the sources, under tdp/.
func Files() fs.FS { return files }

// Key names this state of the sources. What is compiled from them carries the same key (tdp_source_key), so a
// program can tell that it was linked with a library of other sources.
func Key() string { return embeddedKey() }

var embeddedKey = sync.OnceValue(func() string {
	key, err := KeyOf(files)
	if err != nil {
		panic(err) // an embedded file system does not fail
	}
	return key
})

// KeyOf is Key for another tree that holds a tdp folder, for instance the csrc folder of another version.
func KeyOf(tree fs.FS) (string, error) {
	h := sha256.New()
	err := fs.WalkDir(tree, "tdp", func(name string, d fs.DirEntry, err error) error { // in lexical order
		if err != nil || d.IsDir() || !IsSource(name) {
			return err
		}
		text, err := fs.ReadFile(tree, name)
		if err == nil {
			fmt.Fprintf(h, "%s %d\n", name, len(text))
			h.Write(text)
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("hash the C++ sources: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// IsSource tells C++ sources and headers from what an editor leaves beside them.
func IsSource(name string) bool {
	switch path.Ext(name) {
	case ".cpp", ".h":
		return true
	}
	return false
}
