package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// Agree meets the other ranks and gives every rank an error where one rank brought one. It is how a Manager waits
// without knowing of process groups. [AgreeBy] makes one, [Barrier] a simpler one.
type Agree func(ctx context.Context, mine error) error

// Barrier makes an Agree of a barrier alone: the ranks wait for each other, but only the rank that failed learns of it.
func Barrier(barrier func(ctx context.Context) error) Agree {
	return func(ctx context.Context, mine error) error { return errors.Join(mine, barrier(ctx)) }
}

// AgreeBy makes an Agree of a function that gives every rank the texts of all ranks, in rank order:
//
//	agree := checkpoint.AgreeBy(pg.Rank(), func(mine string) ([]string, error) { return torchddp.AllGatherObject(pg, mine) })
//
// Where a rank fails, every rank gets an error that says which one and why.
func AgreeBy(rank int, gather func(mine string) ([]string, error)) Agree {
	return func(_ context.Context, mine error) error {
		text := ""
		if mine != nil {
			text = cmp.Or(mine.Error(), "failed")
		}
		all, err := gather(text)
		if err != nil {
			return errors.Join(mine, fmt.Errorf("asking the other ranks: %w", err))
		}
		var errs []error
		for r, text := range all {
			switch {
			case text == "":
			case r == rank && mine != nil:
				errs = append(errs, fmt.Errorf("rank %d: %w", r, mine))
			default:
				errs = append(errs, fmt.Errorf("rank %d: %s", r, text))
			}
		}
		return errors.Join(errs...)
	}
}

// ManagerOptions are the choices of NewManager.
type ManagerOptions struct {
	// Dir is where the files go. Rank 0 makes it.
	Dir string
	// Name begins the names: "ckpt" (the default) gives ckpt-00000012.pt for step 12.
	Name string
	// Keep is how many of the latest files stay. 0 keeps all; 1 is no less safe, since a file is complete before the
	// one before it goes. The best one stays in any case.
	Keep int
	// Maximize: a larger metric is better, such as an accuracy. Without it a smaller one is, such as a loss.
	Maximize bool
	// Rank of this process; only rank 0 writes.
	Rank int
	// Agree, if set, ends every Save: no rank goes on before the file is in place (with Async: before it is copied),
	// and where it fails every rank learns of it.
	Agree Agree
	// Async saves beside training, see [AsyncSaver]. Errors then come from the next Save, or from Close.
	Async bool
	// Save are the options of the files themselves.
	Save SaveOptions
}

// Manager keeps the checkpoints of one training run in a folder: named by step, none half written, old ones removed,
// the best one marked.
//
// All ranks call its methods alike. It is used by one goroutine at a time.
type Manager struct {
	opt   ManagerOptions
	async AsyncSaver
}

// NewManager makes the folder and checks that it can be written to, so that a run does not fail at its first
// checkpoint, and removes what crashed runs left unfinished.
func NewManager(opt ManagerOptions) (*Manager, error) {
	if opt.Name == "" {
		opt.Name = "ckpt"
	}
	if strings.ContainsAny(opt.Name, "/\\*?[") || opt.Keep < 0 || opt.Dir == "" {
		return nil, fmt.Errorf("checkpoint manager: Dir %q, Name %q and Keep %d do not make sense", opt.Dir, opt.Name, opt.Keep)
	}
	m := &Manager{opt: opt, async: AsyncSaver{Options: opt.Save}}
	if opt.Rank != 0 {
		return m, nil
	}
	if err := os.MkdirAll(opt.Dir, 0o777); err != nil {
		return nil, fmt.Errorf("checkpoint manager: %w", err)
	}
	if err := CheckWritable(m.Path(0)); err != nil {
		return nil, err
	}
	return m, m.sweep()
}

// staleAfter is how old an unfinished file must be to be nobody's: another run may be writing to the same folder.
const staleAfter = time.Hour

func (m *Manager) sweep() error {
	entries, err := os.ReadDir(m.opt.Dir)
	if err != nil {
		return fmt.Errorf("checkpoint manager: %w", err)
	}
	for _, e := range entries {
		if !atomicfile.IsTemp(e.Name()) {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > staleAfter {
			_ = os.Remove(filepath.Join(m.opt.Dir, e.Name()))
		}
	}
	return nil
}

// Path is where the checkpoint of a step goes.
func (m *Manager) Path(step int64) string {
	return filepath.Join(m.opt.Dir, fmt.Sprintf("%s-%08d.pt", m.opt.Name, step))
}

// BestPath is where the best checkpoint is found.
func (m *Manager) BestPath() string { return filepath.Join(m.opt.Dir, m.opt.Name+"-best.pt") }

// Save saves v, on rank 0, as the checkpoint of a step. On the other ranks v is not looked at.
//
// ctx is for Agree alone. Rank 0 saves also when it is cancelled: a job that is being stopped is why one saves.
func (m *Manager) Save(ctx context.Context, step int64, v any) error {
	return m.save(ctx, step, v, nil)
}

// SaveBest is Save, and marks the checkpoint as the best one if no earlier one has as good a metric, in this run or in
// one before it in the same folder.
func (m *Manager) SaveBest(ctx context.Context, step int64, v any, metric float64) error {
	return m.save(ctx, step, v, &metric)
}

func (m *Manager) save(ctx context.Context, step int64, v any, metric *float64) error {
	var err error
	if m.opt.Rank == 0 {
		err = m.write(step, v, metric)
	}
	if m.opt.Agree != nil {
		return m.opt.Agree(ctx, err)
	}
	return err
}

func (m *Manager) write(step int64, v any, metric *float64) error {
	if step < 0 {
		return fmt.Errorf("saving a checkpoint: step %d is negative", step)
	}
	path := m.Path(step)
	after := func() error {
		if metric != nil {
			if err := m.markBest(path, step, *metric); err != nil {
				return err
			}
		}
		return m.prune(step)
	}
	if m.opt.Async {
		return m.async.save(path, v, after)
	}
	if err := Save(path, v, m.opt.Save); err != nil {
		return err
	}
	return after()
}

// markBest gives the best file a second name that carries its metric, so that one rename decides, and a short link.
func (m *Manager) markBest(path string, step int64, metric float64) error {
	if math.IsNaN(metric) {
		return nil
	}
	marked, best := m.marked()
	if len(marked) > 0 && !m.better(metric, best) {
		return nil
	}
	name := fmt.Sprintf("%s-best.%s.%08d.pt", m.opt.Name, strconv.FormatFloat(metric, 'g', -1, 64), step)
	to := filepath.Join(m.opt.Dir, name)
	_ = os.Remove(to)
	if err := os.Link(path, to); err != nil {
		// No hard links here: copy.
		if err := copyFile(path, to, m.opt.Save); err != nil {
			return fmt.Errorf("marking the best checkpoint: %w", err)
		}
	}
	temp := filepath.Join(m.opt.Dir, "."+m.opt.Name+"-best"+atomicfile.TempMark+strconv.Itoa(os.Getpid()))
	_ = os.Remove(temp)
	err := os.Symlink(name, temp)
	if err == nil {
		err = os.Rename(temp, m.BestPath())
	}
	if err != nil {
		return fmt.Errorf("marking the best checkpoint: %w", err)
	}
	for _, old := range marked {
		if old != name {
			_ = os.Remove(filepath.Join(m.opt.Dir, old))
		}
	}
	return atomicfile.SyncDir(m.opt.Dir)
}

func (m *Manager) better(a, b float64) bool {
	if m.opt.Maximize {
		return a > b
	}
	return a < b
}

// marked lists the files marked as best (more than one only after a crash) and the best metric among them.
func (m *Manager) marked() (names []string, best float64) {
	entries, _ := os.ReadDir(m.opt.Dir)
	for _, e := range entries {
		rest, ok1 := strings.CutPrefix(e.Name(), m.opt.Name+"-best.")
		rest, ok2 := strings.CutSuffix(rest, ".pt")
		at := strings.LastIndexByte(rest, '.')
		if !ok1 || !ok2 || at < 0 {
			continue
		}
		metric, err := strconv.ParseFloat(rest[:at], 64)
		if err != nil {
			continue
		}
		if len(names) == 0 || m.better(metric, best) {
			best = metric
		}
		names = append(names, e.Name())
	}
	return names, best
}

func copyFile(from, to string, opt SaveOptions) error {
	f, err := ptfile.Open(from, ptfile.ReadOptions{})
	if err != nil {
		return err
	}
	defer f.Close()
	return copyAtomically(to, f.OS(), f.Size, opt)
}

// prune removes all but the last Keep files. Files of later steps, of a run that was rolled back, count as older.
func (m *Manager) prune(step int64) error {
	if m.opt.Keep == 0 {
		return nil
	}
	files, err := m.files()
	if err != nil {
		return err
	}
	slices.SortStableFunc(files, func(a, b numbered) int {
		if a, b := a.number > step, b.number > step; a != b {
			if a {
				return 1
			}
			return -1
		}
		return cmp.Compare(b.number, a.number)
	})
	for _, f := range files[min(m.opt.Keep, len(files)):] {
		if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing an old checkpoint: %w", err)
		}
	}
	return nil
}

func (m *Manager) files() ([]numbered, error) {
	all, err := list(m.opt.Dir)
	return slices.DeleteFunc(all, func(f numbered) bool {
		rest, ok := strings.CutPrefix(filepath.Base(f.path), m.opt.Name+"-")
		_, err := strconv.ParseInt(strings.TrimSuffix(rest, ".pt"), 10, 64)
		return !ok || err != nil
	}), err
}

// Latest gives the path of the run's newest complete checkpoint, or ErrNoCheckpoint.
func (m *Manager) Latest() (string, error) {
	files, err := m.files()
	if err != nil {
		return "", err
	}
	return newest(m.opt.Dir, files)
}

// Wait waits for an asynchronous save and gives its error. On the other ranks it does nothing.
func (m *Manager) Wait() error { return m.async.Wait() }

// Close waits for an asynchronous save and gives its error.
func (m *Manager) Close() error { return m.async.Close() }

// ErrNoCheckpoint: the folder holds no complete checkpoint. Training begins at the beginning.
var ErrNoCheckpoint = errors.New("no checkpoint")

type numbered struct {
	path   string
	number int64
	mod    time.Time
}

// list gives the checkpoint files in dir whose name ends in a number, before .pt or .pth.
func list(dir string) ([]numbered, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for checkpoints: %w", err)
	}
	var out []numbered
	for _, e := range entries {
		name := e.Name()
		ext := filepath.Ext(name)
		if atomicfile.IsTemp(name) || strings.HasPrefix(name, ".") || ext != ".pt" && ext != ".pth" || strings.Contains(name, "-best.") {
			continue
		}
		stem := strings.TrimSuffix(name, ext)
		digits := len(stem) - len(strings.TrimRight(stem, "0123456789"))
		n, err := strconv.ParseInt(stem[len(stem)-digits:], 10, 64)
		if err != nil {
			continue
		}
		info, err := e.Info()
		if err != nil {
			continue // gone meanwhile
		}
		out = append(out, numbered{filepath.Join(dir, name), n, info.ModTime()})
	}
	return out, nil
}

// Latest gives the path of the newest complete checkpoint in a folder: the one with the highest number at the end of
// its name, such as epoch_3.pt or ckpt-00000012.pt. Files that are cut off (Python writes in place) are passed over.
// It gives ErrNoCheckpoint where there is none.
func Latest(dir string) (string, error) {
	files, err := list(dir)
	if err != nil {
		return "", err
	}
	return newest(dir, files)
}

func newest(dir string, files []numbered) (string, error) {
	slices.SortFunc(files, func(a, b numbered) int {
		if c := cmp.Compare(b.number, a.number); c != 0 {
			return c
		}
		return b.mod.Compare(a.mod)
	})
	var skipped []error
	for _, f := range files {
		p, err := ptfile.Open(f.path, ptfile.ReadOptions{})
		if err == nil {
			p.Close()
			return f.path, nil
		}
		skipped = append(skipped, err)
	}
	if len(skipped) > 0 {
		return "", fmt.Errorf("%w in %s that is complete: %w", ErrNoCheckpoint, dir, errors.Join(skipped...))
	}
	return "", fmt.Errorf("%w in %s", ErrNoCheckpoint, dir)
}
