package checkpoint

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/internal/tdp"
)

// kill -9 at random moments during saving leaves a loadable file every time: the old one or the new one. The number
// of moments is GODDP_KILLS, 20 without it; `GODDP_KILLS=500 go test -run TestKillDuringSave ./checkpoint`.
func TestKillDuringSave(t *testing.T) {
	if dir := os.Getenv("GODDP_TEST_KILL"); dir != "" {
		saveForEver(t, dir)
		return
	}
	kills := 20
	if s := os.Getenv("GODDP_KILLS"); s != "" {
		var err error
		kills, err = strconv.Atoi(s)
		require.NoError(t, err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "x.pt")
	last, unfinished, done := int64(-1), 0, 0
	for kill := range kills {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKillDuringSave$")
		cmd.Env = append(os.Environ(), "GODDP_TEST_KILL="+dir, fmt.Sprintf("GODDP_TEST_KILL_FROM=%d", last+1))
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(out)
		said, saved := "", false
		for !saved && lines.Scan() {
			said += lines.Text() + "\n"
			saved = strings.HasPrefix(lines.Text(), "saved ")
		}
		require.True(t, saved, "the child did not save: %s", said)
		// From the first complete save on, any moment of the next ones.
		time.Sleep(time.Duration(rand.Int64N(int64(60 * time.Millisecond))))
		require.NoError(t, cmd.Process.Kill())
		for lines.Scan() {
			done++
		}
		_ = cmd.Wait()

		v, err := Load(path, LoadOptions{})
		require.NoError(t, err, "after kill %d", kill)
		n, err := Get[int64](v, "n")
		require.NoError(t, err)
		require.Greater(t, n, last, "every save that was reported is there")
		last = n
		x, err := Get[*ts.Tensor](v, "x")
		require.NoError(t, err)
		data, err := tdp.HostBytes(x)
		require.NoError(t, err)
		for i, b := range data {
			if b != byte(n) {
				t.Fatalf("after kill %d: byte %d of save %d is from another one", kill, i, n)
			}
		}
		runtime.KeepAlive(x)
		latest, err := Latest(dir)
		require.ErrorIs(t, err, ErrNoCheckpoint, latest)
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		for _, e := range entries {
			if atomicfile.IsTemp(e.Name()) {
				unfinished++
				require.NoError(t, os.Remove(filepath.Join(dir, e.Name())))
			}
		}
	}
	t.Logf("%d kills, %d of them in the middle of a write, %d further saves between", kills, unfinished, done)
	require.Positive(t, unfinished, "no kill hit a write: the test proves nothing")
}

func saveForEver(t *testing.T, dir string) {
	n, err := strconv.Atoi(os.Getenv("GODDP_TEST_KILL_FROM"))
	require.NoError(t, err)
	x := zeros(t, gotch.Uint8, 8<<20)
	data, err := tdp.HostBytes(x)
	require.NoError(t, err)
	for ; ; n++ {
		for i := range data {
			data[i] = byte(n)
		}
		require.NoError(t, Save(filepath.Join(dir, "x.pt"), NewDict().Set("n", n).Set("x", x)))
		runtime.KeepAlive(x)
		fmt.Println("saved", n)
	}
}
