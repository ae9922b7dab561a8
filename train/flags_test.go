package train

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/torchddp"
)

func TestFlagsRefuse(t *testing.T) {
	for line, text := range map[string]string{
		"--epochs 0":             "--epochs must be positive, got 0",
		"--log-every -1":         "--log-every must be positive",
		"--accumulate 0":         "--accumulate must be positive, got 0",
		"--clip nan":             "--clip must not be negative",
		"--patience -1":          "--patience must not be negative",
		"--snapshot-every 0":     "--snapshot-every must be positive",
		"--resume":               "--resume needs --snapshot",
		"--json --all-ranks":     "exclude each other",
		"--progress dots":        `--progress must be auto, bar, lines or off, got "dots"`,
		"--epochs 3 --clip 0.5":  "",
		"--snapshot d --resume":  "",
		"--progress off --json":  "",
		"--metrics-addr :0":      "",
		"--tensorboard t --amp":  "",
		"--csv f --report r":     "",
		"--all-ranks --patience": "flag needs an argument",
	} {
		var f Flags
		flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.Bind(flags)
		err := flags.Parse(strings.Fields(line))
		if err == nil {
			err = f.Check()
		}
		if text == "" {
			require.NoError(t, err, line)
		} else {
			require.ErrorContains(t, err, text, line)
		}
	}
}

// locked is a buffer that ranks share.
type locked struct {
	sync.Mutex
	bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Buffer.Write(p)
}

// run trains two ranks with a command line, and gives what they print.
func runFlags(t *testing.T, line string) (string, []error) {
	t.Helper()
	var out locked
	errs := ranks(t, 2, setup{samples: 32, evals: 6}.each(func(r *rank) error {
		f := Flags{Epochs: 2, LogEvery: 2}
		flags := pflag.NewFlagSet("x", pflag.ContinueOnError)
		f.Bind(flags)
		if err := flags.Parse(strings.Fields(line)); err != nil {
			return err
		}
		o, err := f.Options(r.pg, &out)
		if err != nil {
			return err
		}
		return r.train(context.Background(), o)
	}))
	return out.String(), errs
}

func TestFlagsMakeReports(t *testing.T) {
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	out, errs := runFlags(t, "--progress lines --stragglers --tensorboard "+in("tb")+" --csv "+in("a.csv")+" --report "+in("r.html")+
		" --metrics-addr 127.0.0.1:0 --snapshot "+in("s"))
	require.Equal(t, []error{nil, nil}, errs)
	require.Contains(t, out, "loss")
	require.Contains(t, out, in("s/ckpt-00000008.pt"))
	events, err := filepath.Glob(in("tb/*"))
	require.NoError(t, err)
	require.NotEmpty(t, events)
	for _, name := range []string{"a.csv", "r.html"} {
		text, err := os.ReadFile(in(name))
		require.NoError(t, err)
		require.Contains(t, string(text), "accuracy")
	}

	out, errs = runFlags(t, "--json")
	require.Equal(t, []error{nil, nil}, errs)
	kinds := map[any]int{}
	for line := range strings.Lines(out) {
		var v map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &v), line)
		kinds[v["record"]]++
	}
	require.Equal(t, map[any]int{"run": 1, "step": 4, "epoch": 2}, kinds)

	out, errs = runFlags(t, "--all-ranks")
	require.Equal(t, []error{nil, nil}, errs)
	own := map[string]int{}
	for line := range strings.Lines(out) {
		own[line[:9]]++
	}
	require.Len(t, own, 2)
	require.Positive(t, own["[rank 0] "])
	require.Equal(t, own["[rank 0] "], own["[rank 1] "])

	out, errs = runFlags(t, "--progress off")
	require.Equal(t, []error{nil, nil}, errs)
	require.Empty(t, out)
}

func TestFlagsThatCannotBe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	for _, err := range ranks(t, 1, setup{}.each(func(r *rank) error {
		f := Flags{MetricsAddr: l.Addr().String()}
		f.Bind(pflag.NewFlagSet("x", pflag.ContinueOnError))
		_, err := f.Options(r.pg, &bytes.Buffer{})
		return err
	})) {
		require.ErrorContains(t, err, "--metrics-addr: ")
	}
	group(t, 1, func(pg *torchddp.ProcessGroup) error {
		f := Flags{AMP: true}
		f.Bind(pflag.NewFlagSet("x", pflag.ContinueOnError))
		o, err := f.Options(pg, &bytes.Buffer{})
		require.NotNil(t, o.Autocast)
		require.Nil(t, o.Scaler, "bfloat16 needs none")
		return err
	})
}
