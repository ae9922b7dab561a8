package report

import (
	"bytes"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/cheggaaa/pb/v3"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// terminal is a pseudo-terminal of so many columns; text gives what was written to it.
func terminal(t *testing.T, columns int) (tty *os.File, text func() string) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this system gives no pseudo-terminal: %v", err)
	}
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	tty, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(columns), Row: 24}))
	var out bytes.Buffer
	var done sync.WaitGroup
	done.Go(func() { io.Copy(&out, master) }) // ends by an error when the last end is closed
	return tty, func() string {
		tty.Close()
		done.Wait()
		master.Close()
		return strings.ReplaceAll(out.String(), "\r\n", "\n") // the terminal's own
	}
}

// shown is what a terminal shows of text whose lines are not wider than it.
func shown(t *testing.T, text string, columns int) []string {
	t.Helper()
	var lines []string
	for line := range strings.SplitSeq(text, "\n") {
		var cells []rune
		for part := range strings.SplitSeq(line, "\r") {
			// The line of an epoch may wrap: nothing goes back over it.
			if strings.Contains(line, "\r") && !strings.Contains(part, " | ") {
				require.LessOrEqual(t, pb.CellCount(part), columns-1, "it would wrap: %q", part)
			}
			over := []rune(part)
			if len(cells) > len(over) {
				over = append(over, cells[len(over):]...)
			}
			cells = over
		}
		lines = append(lines, strings.TrimRight(string(cells), " "))
	}
	return lines
}

func TestProgressOnATerminal(t *testing.T) {
	tty, text := terminal(t, 120)
	t.Setenv("TERM", "xterm")
	sink := Auto(tty)
	require.NoError(t, sink.Begin(sampleRun()))
	require.NoError(t, sink.Step(sampleStep(0, 50, 10)))
	require.NoError(t, sink.Epoch(sampleEpoch(0)))
	_, err := io.WriteString(sink, "level=INFO msg=\"from a log\"\n")
	require.NoError(t, err)
	require.NoError(t, sink.Step(sampleStep(1, 30, 10)))
	_, err = io.WriteString(sink, "level=INFO msg=second\n")
	require.NoError(t, err)
	require.NoError(t, sink.Close())
	lines := shown(t, text(), 120)
	require.Len(t, lines, 6)
	require.Contains(t, lines[0], "cifar10: resnet50, 25,557,032 parameters")
	require.Contains(t, lines[1], "epoch 1/3 done in 10s | train loss 1.5", "the bar makes room for the epoch's line")
	require.Equal(t, `level=INFO msg="from a log"`, lines[2])
	require.Equal(t, "level=INFO msg=second", lines[3], "lines of a log go above the bar")
	require.Regexp(t, `^epoch 2/3 \[=+> +\] 30/100  0s left, all 0s  loss 0\.\d+  accuracy 0\.\d+  5,\d+/s  lr 0\.\d+$`,
		lines[4])
	require.Empty(t, lines[5])
}

func TestProgressFitsEveryWidth(t *testing.T) {
	for _, columns := range []int{1, 2, 7, 13, 20, 33, 40, 61, 80, 200} {
		t.Run(strconv.Itoa(columns), func(t *testing.T) {
			tty, text := terminal(t, columns)
			sink := Progress(tty, ProgressOptions{})
			require.NoError(t, sink.Begin(sampleRun()))
			s := sampleStep(0, 50, 10)
			s.Values = append(s.Values, Value{"日本語の名前", 1}, Value{"\x1b[31m", 2})
			require.NoError(t, sink.Step(s))
			require.NoError(t, sink.Close())
			out := text()
			require.NotContains(t, out, "\x1b")
			lines := shown(t, out, max(columns, 2))
			last := lines[len(lines)-2]
			require.True(t, strings.HasPrefix("epoch 1/3", last[:min(len(last), 9)]), "%q", last)
			if columns >= 33 {
				require.Contains(t, last, "] 50/100", "the bar and the count stay")
			}
		})
	}
}

func TestProgressOfAStreamHasNoBar(t *testing.T) {
	tty, text := terminal(t, 80)
	sink := Progress(tty, ProgressOptions{})
	require.NoError(t, sink.Begin(Run{}))
	require.NoError(t, sink.Step(Step{Epoch: 0, Step: 1234, Values: []Value{{"loss", 0.25}}}))
	require.NoError(t, sink.Step(Step{Epoch: 1, Step: 1}), "an epoch without an end")
	require.NoError(t, sink.Close())
	lines := shown(t, text(), 80)
	require.Equal(t, []string{"run: 1 rank, 0 epochs", "epoch 1 1234  loss 0.25  0/s  lr 0",
		"epoch 2 1  0/s  lr 0", ""}, lines)
}

func TestProgressAfterAResume(t *testing.T) {
	tty, text := terminal(t, 80)
	sink := Progress(tty, ProgressOptions{})
	run := sampleRun()
	run.StartEpoch, run.StartStep = 1, 90
	require.NoError(t, sink.Begin(run))
	require.NoError(t, sink.Close())
	lines := shown(t, text(), 80)
	require.Regexp(t, `^epoch 2/3 \[=+> +\] 90/100$`, lines[len(lines)-2])

	b := &bars{run: run, first: 90}
	require.Empty(t, b.left(Step{Step: 90}), "nothing is known yet")
	b.since = b.since.Add(-1)
	require.Contains(t, b.left(Step{Epoch: 2, Step: 100}), "left")
}

func TestStrangeRunsOnATerminal(t *testing.T) {
	tty, text := terminal(t, 50)
	playOdd(t, Progress(tty, ProgressOptions{}))
	require.False(t, regexp.MustCompile(`[\x00-\x09\x0b\x0c\x0e-\x1f]`).MatchString(text()))
}

func TestDumbTerminalsGetLines(t *testing.T) {
	tty, text := terminal(t, 80)
	t.Setenv("TERM", "dumb")
	play(t, Auto(tty))
	require.NotContains(t, text(), "\r")
}

func TestLogBesideLines(t *testing.T) {
	var out bytes.Buffer
	sink := Auto(&out)
	n, err := io.WriteString(sink, "a line\n")
	require.NoError(t, err)
	require.Equal(t, 7, n)
	require.Equal(t, "a line\n", out.String())
}
