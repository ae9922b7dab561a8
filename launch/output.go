package launch

import (
	"bytes"
	"io"
	"sync"
)

// Prefix says whether lines of a rank's output begin with its name, such as "[rank1] ".
type Prefix int

const (
	// PrefixAuto names the rank when there are several. A single rank gets the parent's own standard output and error, so that it
	// can see a terminal there and draw on it.
	PrefixAuto Prefix = iota
	// PrefixOn always names the rank.
	PrefixOn
	// PrefixOff passes lines on as they are, whole lines at a time; for programs whose lines tell the rank themselves.
	PrefixOff
)

// maxLine bounds what is kept of a line that does not end; a longer one is passed on in pieces.
const maxLine = 256 << 10

// sink is a place where several ranks write whole lines.
type sink struct {
	mu  sync.Mutex
	w   io.Writer
	err error // the first failure to write; what follows is dropped so that no rank blocks
}

func (s *sink) write(p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		_, s.err = s.w.Write(p)
	}
}

func (s *sink) failed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// lines passes one stream of one rank on to a sink, line by line.
type lines struct {
	to     *sink // nil: nowhere
	prefix string
	endAll bool // a last line without an end gets one, so that the next rank's line does not continue it
	tail   *tail
	copy   io.Writer // gets all as it comes; nil: no one
	filter func(line []byte) bool
	picked *sink  // gets the lines that filter wants
	rest   []byte // an unfinished line
	out    []byte
}

// Write takes any piece of output. It never fails.
func (l *lines) Write(p []byte) (int, error) {
	if l.tail != nil {
		l.tail.Write(p)
	}
	if l.copy != nil {
		l.copy.Write(p) //nolint:errcheck // a full disk must not stop the rank
	}
	if l.to == nil && l.picked == nil {
		return len(p), nil
	}
	l.rest = append(l.rest, p...)
	from := 0
	for {
		n := lineLen(l.rest[from:])
		if n == 0 {
			break
		}
		l.add(l.rest[from : from+n])
		from += n
	}
	for len(l.rest)-from >= maxLine {
		l.add(l.rest[from : from+maxLine])
		if l.prefix != "" {
			l.out = append(l.out, '\n')
		}
		from += maxLine
	}
	l.rest = l.rest[:copy(l.rest, l.rest[from:])]
	l.flush()
	return len(p), nil
}

// lineLen is the length of the first line with its end, 0 without an end. A carriage return ends a line too: progress bars are
// drawn with it. One at the very end is left until it is known whether a line feed follows.
func lineLen(p []byte) int {
	i := bytes.IndexAny(p, "\n\r")
	switch {
	case i < 0 || p[i] == '\r' && i+1 == len(p):
		return 0
	case p[i] == '\r' && p[i+1] == '\n':
		return i + 2
	}
	return i + 1
}

func (l *lines) add(line []byte) {
	if l.picked != nil && l.filter(line) {
		l.picked.write(append([]byte(l.prefix), line...))
	}
	if l.to == nil {
		return
	}
	// A rank that names itself in just this way is not named twice.
	if l.prefix != "" && !bytes.HasPrefix(line, []byte(l.prefix)) {
		l.out = append(l.out, l.prefix...)
	}
	l.out = append(l.out, line...)
}

func (l *lines) flush() {
	if len(l.out) > 0 {
		l.to.write(l.out)
		l.out = l.out[:0]
	}
}

// Close passes on a last line that has no end.
func (l *lines) Close() {
	if len(l.rest) == 0 {
		return
	}
	l.add(l.rest)
	if l.endAll {
		l.out = append(l.out, '\n')
	}
	l.rest = nil
	l.flush()
}

// tail keeps the end of a stream.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

// maxTail holds what C++ says before it aborts and the Go runtime's trace after that.
const maxTail = 64 << 10

func (t *tail) Write(p []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(p) > maxTail {
		p = p[len(p)-maxTail:]
	}
	if over := len(t.buf) + len(p) - maxTail; over > 0 {
		t.buf = t.buf[:copy(t.buf, t.buf[over:])]
	}
	t.buf = append(t.buf, p...)
}

// String gives whole lines where the beginning was cut off.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf
	if len(b) == maxTail {
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			b = b[i+1:]
		}
	}
	return string(bytes.ToValidUTF8(b, nil))
}
