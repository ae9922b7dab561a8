package report

import (
	"io"
	"log/slog"
	"os"
)

// Logger writes slog's text lines to w, each with this process's rank and host, so that the logs of many ranks can be
// read as one. For rank 0 of a run with a progress bar, w is the [Console], which keeps the bar below the lines.
func Logger(w io.Writer, rank int, options *slog.HandlerOptions) *slog.Logger {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return slog.New(slog.NewTextHandler(w, options)).With("rank", rank, "host", host)
}
