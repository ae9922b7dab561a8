package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/internal/tdp"
)

func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return strings.Join(out, " ")
}

func TestManagerKeepsLatestAndBest(t *testing.T) {
	ctx := context.Background()
	for _, async := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "deep", "er")
		m, err := NewManager(ManagerOptions{Dir: dir, Keep: 2, Async: async})
		require.NoError(t, err)
		_, err = m.Latest()
		require.ErrorIs(t, err, ErrNoCheckpoint)
		for step, loss := range []float64{5, 2, 3, 4, 2} {
			require.NoError(t, m.SaveBest(ctx, int64(step), NewDict().Set("step", step), loss))
		}
		require.NoError(t, m.Close())
		require.Equal(t, "ckpt-00000003.pt ckpt-00000004.pt ckpt-best.2.00000001.pt ckpt-best.pt", names(t, dir))
		for path, want := range map[string]int64{m.BestPath(): 1, m.Path(4): 4} {
			v, err := Load(path, LoadOptions{})
			require.NoError(t, err)
			got, err := Get[int64](v, "step")
			require.NoError(t, err)
			require.Equal(t, want, got)
		}
		// The next run goes on with the same best one, and its own steps.
		m, err = NewManager(ManagerOptions{Dir: dir, Keep: 2, Async: async})
		require.NoError(t, err)
		latest, err := m.Latest()
		require.NoError(t, err)
		require.Equal(t, m.Path(4), latest)
		require.NoError(t, m.SaveBest(ctx, 2, NewDict(), 2.5))
		require.NoError(t, m.SaveBest(ctx, 3, NewDict(), 1.5))
		require.NoError(t, m.Close())
		require.Equal(t, "ckpt-00000002.pt ckpt-00000003.pt ckpt-best.1.5.00000003.pt ckpt-best.pt", names(t, dir), "a run that was rolled back")
	}
}

func TestManagerMaximize(t *testing.T) {
	dir := t.TempDir()
	m, err := NewManager(ManagerOptions{Dir: dir, Name: "acc", Keep: 1, Maximize: true})
	require.NoError(t, err)
	for step, acc := range []float64{.1, .9, .5} {
		require.NoError(t, m.SaveBest(context.Background(), int64(step), nil, acc))
	}
	require.Equal(t, "acc-00000002.pt acc-best.0.9.00000001.pt acc-best.pt", names(t, dir))
}

func TestLatestPassesOverPartialFiles(t *testing.T) {
	dir := t.TempDir()
	_, err := Latest(filepath.Join(dir, "nowhere"))
	require.ErrorIs(t, err, ErrNoCheckpoint)
	for i, name := range []string{"epoch_2.pt", "epoch_10.pt", "epoch_11.pth", "epoch_12.pt", "notes.txt", "model.pt", ".epoch_99.pt" + atomicfile.TempMark + "1-0"} {
		require.NoError(t, Save(filepath.Join(dir, name), i))
	}
	good, err := os.ReadFile(filepath.Join(dir, "epoch_12.pt"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "epoch_12.pt"), good[:len(good)-30], 0o666)) // as torch.save leaves it when it dies
	require.NoError(t, os.WriteFile(filepath.Join(dir, "epoch_13.pt"), nil, 0o666))
	got, err := Latest(dir)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "epoch_11.pth"), got)
	for _, n := range []string{"epoch_2.pt", "epoch_10.pt", "epoch_11.pth"} {
		require.NoError(t, os.Remove(filepath.Join(dir, n)))
	}
	_, err = Latest(dir)
	require.ErrorIs(t, err, ErrNoCheckpoint)
	require.ErrorContains(t, err, "epoch_12.pt")
}

func TestOnlyRankZeroWritesAndAllAgree(t *testing.T) {
	dir := t.TempDir()
	const world = 4
	run := func(value any) [world]error {
		// Every rank brings its error; all get the first one.
		var mu sync.Mutex
		var all error
		gate := make(chan struct{})
		waiting := 0
		agree := func(ctx context.Context, mine error) error {
			mu.Lock()
			all = errors.Join(all, mine)
			if waiting++; waiting == world {
				close(gate)
			}
			mu.Unlock()
			<-gate
			return all
		}
		var errs [world]error
		var wg sync.WaitGroup
		for rank := range world {
			m, err := NewManager(ManagerOptions{Dir: dir, Rank: rank, Agree: agree})
			require.NoError(t, err)
			wg.Go(func() { errs[rank] = m.Save(context.Background(), 1, value) })
		}
		wg.Wait()
		return errs
	}
	for _, err := range run(NewDict().Set("a", 1)) {
		require.NoError(t, err)
	}
	require.Equal(t, "ckpt-00000001.pt", names(t, dir))
	for _, err := range run(make(chan int)) {
		require.ErrorContains(t, err, "no counterpart")
	}
}

func TestCheckWritable(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, CheckWritable(filepath.Join(dir, "x.pt")))
	require.Empty(t, names(t, dir))
	require.ErrorContains(t, CheckWritable(filepath.Join(dir, "no", "x.pt")), "does not exist")
	require.ErrorContains(t, CheckWritable(dir), "it is a folder")
	require.ErrorContains(t, CheckWritable(""), "no path")
	require.ErrorContains(t, CheckWritable("/dev/null"), "not a regular file")
	if os.Getuid() != 0 {
		require.NoError(t, os.Chmod(dir, 0o555))
		require.Error(t, CheckWritable(filepath.Join(dir, "x.pt")))
	}
	_, err := NewManager(ManagerOptions{Dir: "/proc/nothing"})
	require.Error(t, err)
}

// A full disk: the limit on the file size stands for it. The old file stays, nothing is left behind.
func TestDiskFull(t *testing.T) {
	if path := os.Getenv("GODDP_TEST_DISK_FULL"); path != "" {
		signal.Ignore(syscall.SIGXFSZ)
		require.NoError(t, syscall.Setrlimit(1 /* RLIMIT_FSIZE */, &syscall.Rlimit{Cur: 64 << 10, Max: 64 << 10}))
		err := Save(path, NewDict().Set("new", zeros(t, gotch.Float, 1<<20)))
		require.ErrorIs(t, err, syscall.EFBIG)
		require.ErrorContains(t, err, "saving "+path)
		var a AsyncSaver
		require.NoError(t, a.Save(path, NewDict().Set("new", zeros(t, gotch.Float, 1<<20))))
		require.ErrorIs(t, a.Save(path, nil), syscall.EFBIG, "the error surfaces at the next call")
		require.NoError(t, a.Close())
		return
	}
	dir := t.TempDir()
	path := filepath.Join(dir, "x.pt")
	require.NoError(t, Save(path, NewDict().Set("old", 1)))
	cmd := exec.Command(os.Args[0], "-test.run=^TestDiskFull$")
	cmd.Env = append(os.Environ(), "GODDP_TEST_DISK_FULL="+path)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	v, err := Load(path, LoadOptions{})
	require.NoError(t, err)
	old, err := Get[int64](v, "old")
	require.NoError(t, err)
	require.EqualValues(t, 1, old)
	require.Equal(t, "x.pt", names(t, dir))
}

// The copy is taken when Save returns: what training changes afterwards is not in the file.
func TestAsyncSaveTakesACopy(t *testing.T) {
	dir := t.TempDir()
	x := zeros(t, gotch.Float, 1<<20)
	b, err := tdp.HostBytes(x)
	require.NoError(t, err)
	var a AsyncSaver
	d := NewDict().Set("x", x).Set("same", x)
	for round := range 3 {
		for i := range b {
			b[i] = byte(round + 1)
		}
		path := filepath.Join(dir, strconv.Itoa(round)+".pt")
		d.Set("round", round)
		require.NoError(t, a.Save(path, d))
		d.Set("round", "changed afterwards")
		for i := range b {
			b[i] = 99
		}
		require.NoError(t, a.Wait())
		v, err := Load(path, LoadOptions{})
		require.NoError(t, err)
		got, err := Get[int64](v, "round")
		require.NoError(t, err)
		require.EqualValues(t, round, got)
		y, err := Get[*ts.Tensor](v, "x")
		require.NoError(t, err)
		data, err := tdp.HostBytes(y)
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{byte(round + 1)}, len(b)), data)
		runtime.KeepAlive(y)
	}
	// Without a Wait between them at most one is under way, and all arrive.
	for i := range 5 {
		require.NoError(t, a.Save(filepath.Join(dir, fmt.Sprintf("q%d.pt", i)), d))
	}
	require.NoError(t, a.Close())
	for i := range 5 {
		_, err := Load(filepath.Join(dir, fmt.Sprintf("q%d.pt", i)), LoadOptions{})
		require.NoError(t, err)
	}
	require.ErrorContains(t, a.Save(filepath.Join(dir, "late.pt"), d), "closed")
	require.NotContains(t, names(t, dir), atomicfile.TempMark)
	runtime.KeepAlive(x)
}

// One save is under way at most: the next waits for it, with its own copy still to be taken.
func TestAsyncSaverHasOneInFlight(t *testing.T) {
	dir := t.TempDir()
	x := zeros(t, gotch.Float, 16)
	b, err := tdp.HostBytes(x)
	require.NoError(t, err)
	var a AsyncSaver
	started, gate := make(chan struct{}), make(chan struct{})
	require.NoError(t, a.save(filepath.Join(dir, "0.pt"), NewDict().Set("x", x), func() error {
		close(started)
		<-gate
		return nil
	}))
	<-started
	second := make(chan error)
	go func() { second <- a.Save(filepath.Join(dir, "1.pt"), NewDict().Set("x", x)) }()
	b[0] = 7 // the second has copied nothing yet, and cannot
	select {
	case err := <-second:
		t.Fatalf("the second save began beside the first: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	require.NoFileExists(t, filepath.Join(dir, "1.pt"))
	close(gate)
	require.NoError(t, <-second)
	require.NoError(t, a.Close())
	v, err := Load(filepath.Join(dir, "1.pt"), LoadOptions{})
	require.NoError(t, err)
	y, err := Get[*ts.Tensor](v, "x")
	require.NoError(t, err)
	got, err := tdp.HostBytes(y)
	require.NoError(t, err)
	require.EqualValues(t, 7, got[0])
	runtime.KeepAlive(y)
	runtime.KeepAlive(x)
}

// A saver that is forgotten while it writes still writes the copy, not memory that the collector took back.
func TestAsyncSaverMayBeForgotten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.pt")
	func() {
		x := zeros(t, gotch.Float, 4<<20)
		require.NoError(t, new(AsyncSaver).Save(path, NewDict().Set("x", x)))
	}()
	for start := time.Now(); ; {
		runtime.GC()
		if _, err := os.Stat(path); err == nil {
			break
		}
		require.Less(t, time.Since(start), 5*time.Minute)
	}
	_, err := Load(path, LoadOptions{})
	require.NoError(t, err)
}

func TestPreemption(t *testing.T) {
	p := WatchPreemption(syscall.SIGUSR2)
	defer p.Stop()
	require.False(t, p.Requested())
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGUSR2))
	select {
	case <-p.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the signal did not arrive")
	}
	require.True(t, p.Requested())
	over, err := p.Agreed(context.Background(), nil)
	require.NoError(t, err)
	require.True(t, over)
	over, err = p.Agreed(context.Background(), func(_ context.Context, mine bool) (bool, error) { return mine, nil })
	require.NoError(t, err)
	require.True(t, over)
	p.Stop()
	p.Stop()

	q := WatchPreemption(syscall.SIGUSR2)
	q.Stop()
	require.False(t, q.Requested())
}

// A launcher signals a rank and the group that the rank leads: the second signal is the first one's echo. A later one
// is meant, and ends the process.
func TestPreemptionTwice(t *testing.T) {
	defer func(d time.Duration) { echo = d }(echo)
	if os.Getenv("GODDP_TEST_TWICE") == "" {
		echo = time.Hour
		p := WatchPreemption(syscall.SIGTERM)
		defer p.Stop()
		for range 3 { // without a watch each of them would end this process
			require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
			<-p.Done()
		}
		require.True(t, p.Requested())

		cmd := exec.Command(os.Args[0], "-test.run=^TestPreemptionTwice$")
		cmd.Env = append(os.Environ(), "GODDP_TEST_TWICE=1")
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		require.ErrorAs(t, err, &exit, string(out))
		require.Equal(t, syscall.SIGTERM, exit.Sys().(syscall.WaitStatus).Signal(), string(out))
		return
	}
	echo = time.Millisecond
	p := WatchPreemption(syscall.SIGTERM)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	<-p.Done()
	<-p.armed
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	time.Sleep(10 * time.Second) // it comes to another thread than this one
	t.Fatal("the second signal was ignored")
}

// SIGTERM during training: the loop saves between two steps and ends, and the next run goes on from there.
func TestSIGTERMSavesASnapshot(t *testing.T) {
	if dir := os.Getenv("GODDP_TEST_SIGTERM"); dir != "" {
		m, err := NewManager(ManagerOptions{Dir: dir})
		require.NoError(t, err)
		stop := WatchPreemption()
		defer stop.Stop()
		fmt.Println("training")
		for step := int64(1); ; step++ {
			time.Sleep(time.Millisecond)
			if over, err := stop.Agreed(context.Background(), nil); err != nil || over {
				require.NoError(t, m.Save(context.Background(), step, (&Snapshot{Step: step}).Value()))
				return
			}
		}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestSIGTERMSavesASnapshot$")
	cmd.Env = append(os.Environ(), "GODDP_TEST_SIGTERM="+dir)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line := make([]byte, len("training"))
	_, err = out.Read(line)
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	_, _ = new(bytes.Buffer).ReadFrom(out)
	require.NoError(t, cmd.Wait())
	path, err := Latest(dir)
	require.NoError(t, err)
	v, err := Load(path, LoadOptions{})
	require.NoError(t, err)
	s, err := SnapshotOf(v)
	require.NoError(t, err)
	require.Positive(t, s.Step)
}
