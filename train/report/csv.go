package report

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"
)

// CSV writes a table to a file: a line for each step record and each epoch, which the column "record" tells apart.
// The columns are named like TensorBoard's tags here. A figure that first appears later gets a column at the end, empty
// in the lines before. A file that is there already is continued, so a resumed run has one table; where a step stands
// in it twice, the later line is the one that counted.
func CSV(path string) Sink { return &csvFile{path: path} }

type csvFile struct {
	path    string
	f       *os.File
	columns []string
	index   map[string]int
}

// keys are the columns that every line fills.
var keys = []string{"record", "time", "epoch", "step", "global_step"}

// maxColumns is far more than a run should have, and bounds what names made up on the way cost.
const maxColumns = 1000

func (c *csvFile) String() string { return c.path }

func (c *csvFile) Begin(Run) error {
	if err := os.MkdirAll(filepath.Dir(c.path), 0o755); err != nil {
		return fmt.Errorf("report: CSV: %w", err)
	}
	f, err := os.OpenFile(c.path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("report: CSV: %w", err)
	}
	c.f = f
	if err := c.resume(); err != nil {
		c.f = nil
		return errors.Join(fmt.Errorf("report: CSV: %s: %w", c.path, err), f.Close())
	}
	return nil
}

// resume reads the header of a file with content, drops a last line that was not written whole, and goes to its end.
func (c *csvFile) resume() error {
	end, err := lastLine(c.f)
	if err != nil {
		return err
	}
	info, err := c.f.Stat()
	if err != nil {
		return err
	}
	header := slices.Clone(keys)
	if info.Size() > 0 {
		header, err = csv.NewReader(io.NewSectionReader(c.f, 0, end)).Read()
		if err != nil || len(header) < len(keys) || !slices.Equal(header[:len(keys)], keys) {
			return errors.New("the file is there and is no table of a run: remove it, or name another")
		}
	}
	c.columns, c.index = header, map[string]int{}
	for i, name := range header {
		c.index[name] = i
	}
	if err := c.f.Truncate(end); err != nil {
		return err
	}
	if _, err := c.f.Seek(end, io.SeekStart); err != nil {
		return err
	}
	if end == 0 {
		return c.write(header)
	}
	return nil
}

// lastLine gives where the last whole line ends.
func lastLine(f *os.File) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 4096)
	for end := info.Size(); end > 0; {
		start := max(end-int64(len(buf)), 0)
		n, err := f.ReadAt(buf[:end-start], start)
		if err != nil {
			return 0, err
		}
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			return start + int64(i) + 1, nil
		}
		end = start
	}
	return 0, nil
}

func (c *csvFile) Step(s Step) error {
	return c.record("step", s.Time, s.Epoch, strconv.Itoa(s.Step), s.GlobalStep, s.figures())
}

func (c *csvFile) Epoch(e Epoch) error {
	return c.record("epoch", e.Time, e.Epoch, "", e.Step, e.figures())
}

func (c *csvFile) record(kind string, at time.Time, epoch int, step string, global int64, list []Value) error {
	if c.f == nil {
		return fmt.Errorf("report: CSV: %s is not open: Begin comes first", c.path)
	}
	if err := c.widen(list); err != nil {
		return fmt.Errorf("report: CSV: %s: %w", c.path, err)
	}
	row := make([]string, len(c.columns))
	copy(row, []string{kind, stamp(at).UTC().Format(time.RFC3339Nano), strconv.Itoa(epoch), step,
		strconv.FormatInt(global, 10)})
	for _, v := range list {
		row[c.index[v.Name]] = strconv.FormatFloat(v.Value, 'g', -1, 64)
	}
	if err := c.write(row); err != nil {
		return fmt.Errorf("report: CSV: %w", err)
	}
	return nil
}

// write puts a whole line into the file by one call, so that a crash leaves a readable table.
func (c *csvFile) write(row []string) error {
	var b bytes.Buffer
	w := csv.NewWriter(&b)
	if err := w.Write(row); err != nil {
		return err
	}
	w.Flush()
	_, err := c.f.Write(b.Bytes())
	return err
}

// widen gives new names columns. That writes the file anew, which happens once for each kind of record as a rule.
func (c *csvFile) widen(list []Value) error {
	columns := slices.Clone(c.columns)
	index := map[string]int{}
	for _, v := range list {
		_, old := c.index[v.Name]
		if _, now := index[v.Name]; !old && !now {
			index[v.Name] = len(columns)
			columns = append(columns, v.Name)
		}
	}
	if len(index) == 0 {
		return nil
	}
	if len(columns) > maxColumns {
		return fmt.Errorf("more than %d columns: names of figures must not change from step to step", maxColumns)
	}
	if err := c.copy(columns); err != nil {
		return err
	}
	for name, i := range index {
		c.index[name] = i
	}
	c.columns = columns
	return nil
}

func (c *csvFile) copy(columns []string) error {
	if _, err := c.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	in := csv.NewReader(c.f)
	in.FieldsPerRecord = -1 // a person may have edited it
	in.ReuseRecord = true
	err := replace(c.path, func(w io.Writer) error {
		out := csv.NewWriter(w)
		row := make([]string, len(columns))
		for first := true; ; first = false {
			old, err := in.Read()
			if err == io.EOF {
				out.Flush()
				return out.Error()
			}
			if err != nil {
				return err
			}
			clear(row)
			copy(row, old)
			if first {
				copy(row, columns)
			}
			if err := out.Write(row); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(c.path, os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	old := c.f
	c.f = f
	return old.Close()
}

func (c *csvFile) Close() error {
	if c.f == nil {
		return nil
	}
	f := c.f
	c.f = nil
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("report: CSV: %w", err)
	}
	return nil
}
