package libtorch

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// progress tells a person what goes on: one line a step, and a line that moves while a step is long. On what is no
// terminal the moving line becomes one line every few seconds.
type progress struct {
	mu     sync.Mutex
	w      io.Writer
	tty    bool
	drawn  int       // width of the moving line
	last   time.Time // when a line of a log was last written
	period time.Duration
}

func newProgress(w io.Writer) *progress {
	p := &progress{w: w, period: 20 * time.Second}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.tty, p.period = true, 200*time.Millisecond
	}
	return p
}

// say writes one line that stays.
func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wipe()
	fmt.Fprintf(p.w, "goddp: "+format+"\n", args...)
	p.last = time.Now()
}

// move updates the line that moves.
func (p *progress) move(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.last) < p.period {
		return
	}
	p.last = time.Now()
	line := "  " + fmt.Sprintf(format, args...)
	if !p.tty {
		fmt.Fprintln(p.w, line)
		return
	}
	p.wipe()
	fmt.Fprint(p.w, line)
	p.drawn = len(line)
}

// still ends the line that moves.
func (p *progress) still() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wipe()
}

func (p *progress) wipe() {
	if p.drawn > 0 {
		fmt.Fprint(p.w, "\r"+strings.Repeat(" ", p.drawn)+"\r")
		p.drawn = 0
	}
}

// amount is the moving line of something that is done, of total, bytes far.
func (p *progress) amount(what string, done, total int64, since time.Time) {
	const mb = 1e6
	rate := float64(done) / max(time.Since(since).Seconds(), 1e-3)
	left := ""
	if rate > 0 && done < total {
		left = ", " + (time.Duration(float64(total-done)/rate) * time.Second).String() + " left"
	}
	p.move("%s: %.0f of %.0f MB (%d%%), %.0f MB/s%s", what, float64(done)/mb, float64(total)/mb,
		100*min(done, total)/max(total, 1), rate/mb, left)
}
