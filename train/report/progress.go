package report

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/cheggaaa/pb/v3"
	"golang.org/x/term"
)

// Auto is [Progress] where w is a terminal that can move its cursor, and [Lines] everywhere else.
func Auto(w io.Writer) *Console {
	if os.Getenv("TERM") == "dumb" {
		return &Console{Sink: Lines(w), w: w}
	}
	return Progress(w, ProgressOptions{})
}

// ProgressOptions are the options of [Progress].
type ProgressOptions struct {
	// Width says that w leads to a terminal of so many columns. 0: ask w, which is a terminal only if it is an
	// [os.File] of one.
	Width int
}

// Progress shows a bar for the epoch that runs, with the latest figures and the time that is left, and a line for each
// epoch that is done. What is no terminal gets the lines of [Lines] instead, and never a control character.
func Progress(w io.Writer, o ProgressOptions) *Console {
	width := func() int { return o.Width }
	if o.Width <= 0 {
		f, ok := w.(*os.File)
		if !ok || !term.IsTerminal(int(f.Fd())) {
			return &Console{Sink: Lines(w), w: w}
		}
		width = func() int {
			if columns, _, err := term.GetSize(int(f.Fd())); err == nil && columns > 0 {
				return columns
			}
			return 80
		}
	}
	s := &screen{w: w}
	return &Console{Sink: &bars{screen: s, width: width}, w: s}
}

// Console is where a person reads how a run goes. As an [io.Writer] it takes whole lines of something else, such as a
// log, and keeps the bar below them.
type Console struct {
	Sink
	w io.Writer
}

func (c *Console) String() string { return "progress" }

// Write puts whole lines above the bar.
func (c *Console) Write(p []byte) (int, error) {
	if s, ok := c.w.(*screen); ok {
		return s.above(p)
	}
	return c.w.Write(p)
}

// bars draws with pb, which redraws in a goroutine of its own: a slow terminal does not slow training down.
type bars struct {
	screen *screen
	width  func() int
	run    Run
	bar    *pb.ProgressBar
	epoch  int       // of bar
	first  int       // steps of this epoch that were done when bar began
	since  time.Time // when bar began
}

const (
	knownLength   = `{{string . "head"}} {{bar . "[" "=" ">" " " "]"}}{{string . "tail"}}`
	unknownLength = `{{string . "head"}}{{string . "tail"}}`
	// barRoom is what the figures behind the bar leave it.
	barRoom = 12
)

func (b *bars) Begin(r Run) error {
	b.run = r
	if err := b.say(r.line()); err != nil {
		return err
	}
	if r.Epochs > r.StartEpoch {
		b.open(r.StartEpoch, r.StartStep)
	}
	return b.screen.failed()
}

func (b *bars) open(epoch, done int) {
	b.epoch, b.first, b.since = epoch, done, time.Now()
	layout := unknownLength
	if b.run.StepsPerEpoch > 0 {
		layout = knownLength
	}
	b.bar = pb.New(b.run.StepsPerEpoch).SetCurrent(int64(done)).Set(pb.Terminal, true).Set(pb.Color, false).
		SetTemplateString(layout).SetWriter(b.screen)
	b.show(done, nil)
	b.bar.Start().Write() // at once; from now on it draws itself
}

// show gives the bar its text: as many fields as leave room for the bar itself.
func (b *bars) show(done int, fields []string) {
	columns := max(b.width()-1, 1) // the last column would wrap on some terminals
	head := b.run.epochName(b.epoch)
	tail := " " + b.run.stepName(done)
	room := columns - pb.CellCount(head) - pb.CellCount(tail)
	if b.run.StepsPerEpoch > 0 {
		room -= barRoom
	}
	for _, f := range fields {
		if room -= pb.CellCount(f) + 2; room < 0 {
			break
		}
		tail += "  " + f
	}
	b.bar.Set("head", head).Set("tail", tail).SetWidth(columns).SetCurrent(int64(done))
}

func (b *bars) Step(s Step) error {
	if b.bar != nil && b.epoch != s.Epoch {
		b.shut(true)
	}
	if b.bar == nil {
		b.open(s.Epoch, max(s.Step-s.steps(), 0))
	}
	var fields []string
	if left := b.left(s); left != "" {
		fields = append(fields, left)
	}
	fields = append(fields, named("", s.Values)...)
	fields = append(fields, number(s.Throughput)+"/s", "lr "+number(s.LR))
	b.show(s.Step, fields)
	return b.screen.failed()
}

// left says how long this epoch still takes, and the run where that is more. It goes by the clock, not by the steps'
// own times: what happens between steps takes time too.
func (b *bars) left(s Step) string {
	done := s.Step - b.first
	if b.run.StepsPerEpoch == 0 || done <= 0 {
		return ""
	}
	one := time.Since(b.since) / time.Duration(done)
	epoch := one * time.Duration(max(b.run.StepsPerEpoch-s.Step, 0))
	text := clock(epoch) + " left"
	if more := b.run.Epochs - s.Epoch - 1; more > 0 {
		text += ", all " + clock(epoch+one*time.Duration(more)*time.Duration(b.run.StepsPerEpoch))
	}
	return text
}

// clock writes a duration in whole seconds, or minutes where it is long.
func clock(d time.Duration) string {
	switch {
	case d < 0 || d > 1000*time.Hour:
		return "?"
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Round(time.Second).Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	}
	return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
}

func (b *bars) Epoch(e Epoch) error {
	b.shut(false)
	return b.say(b.run.epochLine(e))
}

func (b *bars) Close() error {
	b.shut(true)
	return b.screen.failed()
}

// shut ends the bar; what it shows last stays if keep.
func (b *bars) shut(keep bool) {
	if b.bar == nil {
		return
	}
	b.bar.Set(pb.CleanOnFinish, !keep).Finish()
	b.bar = nil
}

func (b *bars) say(line string) error {
	_, err := b.screen.above([]byte(line + "\n"))
	return err
}

// screen is a terminal on which the last line may be a bar.
type screen struct {
	mu    sync.Mutex
	w     io.Writer
	cells int // of the bar that is drawn
	err   error
}

// Write takes the bar: pb starts it with a carriage return, and ends the last one with a line feed.
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	if s.cells = 0; !strings.HasSuffix(string(p), "\n") {
		s.cells = pb.CellCount(strings.Trim(string(p), "\r"))
	}
	n, err := s.w.Write(p)
	s.err = err
	return n, err
}

// above writes lines where the bar is, which moves down with its next drawing.
func (s *screen) above(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	wipe := ""
	if s.cells > 0 {
		wipe = "\r" + strings.Repeat(" ", s.cells) + "\r"
		s.cells = 0
	}
	_, err := s.w.Write(append([]byte(wipe), p...))
	if s.err = err; err != nil {
		return 0, err
	}
	return len(p), nil
}

// failed is the first error of the terminal, which pb does not report.
func (s *screen) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}
