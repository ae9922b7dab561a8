package vision

import (
	"context"
	"strings"

	"github.com/goddp/goddp/data/download"
)

type fetcher func(ctx context.Context, r download.Request) error

// get fetches a published file.
func (o Options) get(ctx context.Context, mirror string, f resource, path string) error {
	if o.Mirror != "" {
		mirror = o.Mirror
	}
	r := download.Request{URL: strings.TrimSuffix(mirror, "/") + "/" + f.name, Path: path, MD5: f.md5, Size: f.size}
	if o.Progress != nil {
		r.Progress = func(done, total int64) { o.Progress(f.name, done, total) }
	}
	if o.fetch != nil {
		return o.fetch(ctx, r)
	}
	return download.File(ctx, r)
}
