package report

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// readPage reads a report, and checks what holds for each of them: it needs nothing beside itself, and its charts are
// well-formed.
func readPage(t testing.TB, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	page := string(text)
	require.True(t, strings.HasPrefix(page, "<!doctype html>"))
	require.True(t, strings.HasSuffix(page, "</html>\n") || strings.HasSuffix(page, "</html>"))
	require.NotRegexp(t, `(?i)<script|<link|<iframe|<img|@import|url\(|\bsrc=|\bhref=`, page, "it asks for nothing")
	for _, svg := range regexp.MustCompile(`(?s)<svg.*?</svg>`).FindAllString(page, -1) {
		for d := xml.NewDecoder(strings.NewReader(svg)); ; {
			_, err := d.Token()
			if err == io.EOF {
				break
			}
			require.NoError(t, err, svg)
		}
		require.NotContains(t, svg, "NaN")
		require.NotContains(t, svg, "Inf")
		require.NotContains(t, svg, "FEED", "each colour is the style sheet's")
		require.NotContains(t, svg, "FFFFFF")
	}
	return page
}

func TestHTML(t *testing.T) {
	path := filepath.Join(t.TempDir(), "below", "report.html")
	play(t, HTML(path))
	page := readPage(t, path)
	require.Contains(t, page, "<h1>cifar10</h1>")
	require.Contains(t, page, "resnet50, 25,557,032 parameters, on cuda:0, 4 ranks, 2 hosts, nccl, batch 128 a rank")
	require.Contains(t, page, `<span class="status whole">finished: 3 epochs</span>`)
	for _, title := range []string{"loss", "accuracy", "Throughput", "Learning rate", "Where a step&#39;s time goes"} {
		require.Contains(t, page, "<h3>"+title+"</h3>")
	}
	require.Equal(t, 6, strings.Count(page, "<svg"), "five curves and the ranks")
	require.Contains(t, page, `<span class="soft">loss</span><b>0.9</b><span class="soft">last evaluation</span>`)
	require.Contains(t, page, "<td>2</td><td>node-b</td><td>101")
	require.Less(t, strings.Index(page, ">rank 2</text>"), len(page))
	require.Contains(t, page, "<th>eval accuracy</th>")
	require.Contains(t, page, "<td>saved as snapshot.pt</td>")
	require.Contains(t, page, `<th scope="row">schedule</th><td>cosine | warm-up &lt;5&gt;</td>`)
	require.Contains(t, page, "<td>67.7 MB</td><td>9ms</td><td>7.53 GB/s</td>")
	require.NotContains(t, page, `class="warning"`)
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1, "no temporary file stays")
}

func TestHTMLOfARunThatEndsEarly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.html")
	sink := HTML(path)
	run := sampleRun()
	run.StartEpoch, run.StartStep = 1, 40
	require.NoError(t, sink.Begin(run))
	s := sampleStep(1, 50, 10)
	s.Values[0].Value = math.NaN()
	require.NoError(t, sink.Step(s))
	require.NoError(t, sink.Close())
	page := readPage(t, path)
	require.Contains(t, page, `<span class="status">ended after 1 of 3 epochs</span>`)
	require.Contains(t, page,
		"loss (training, by steps) was NaN or infinite in 1 of 1 reports, first at step 150: lower the")
	require.NotContains(t, page, "<h3>loss</h3>", "there is no point to draw")
	require.Contains(t, page, "<h3>accuracy</h3>", "one point is a chart")
}

func TestHTMLWithoutASingleStep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.html")
	sink := HTML(path)
	require.NoError(t, sink.Begin(Run{}))
	require.NoError(t, sink.Close())
	page := readPage(t, path)
	require.Contains(t, page, "No step was reported")
	require.NotContains(t, page, "<svg")
	require.NoError(t, HTML(filepath.Join(t.TempDir(), "x.html")).Close(), "a run that never began has no report")
}

func TestHTMLOfStrangeRuns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.html")
	playOdd(t, HTML(path))
	page := readPage(t, path)
	require.Contains(t, page, "&lt;script&gt;alert(1)&lt;/script&gt;")
	require.Contains(t, page, "{{.}}")
	require.Contains(t, page, "was NaN or infinite")
}

func TestHTMLIsAlsoWrittenOnTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.html")
	sink := HTML(path).(*html)
	require.NoError(t, sink.Begin(sampleRun()))
	require.NoError(t, sink.Step(sampleStep(0, 100, 100)))
	require.NoError(t, sink.Epoch(sampleEpoch(0)))
	require.NoFileExists(t, path, "not for every epoch")
	sink.written = time.Now().Add(-2 * rewrite)
	require.NoError(t, sink.Epoch(sampleEpoch(1)))
	require.Contains(t, readPage(t, path), "still running: 2 of 3 epochs done")
	require.NoError(t, sink.Close())
	require.Contains(t, readPage(t, path), "ended after 2 of 3 epochs")
}

func TestHTMLPathsThatCannotBe(t *testing.T) {
	dir := t.TempDir()
	require.ErrorContains(t, HTML(dir).Begin(Run{}), dir+" is there and is no file: name another")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	require.ErrorContains(t, HTML(filepath.Join(dir, "file", "a.html")).Begin(Run{}), "report: HTML: ")
}

// A run of any length makes a page of bounded size, out of bounded memory, and shows its spikes.
func TestHTMLOfAVeryLongRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "report.html")
	sink := HTML(path).(*html)
	const epochs, steps, ranks = 1000, 200, 256
	run := Run{World: ranks, Epochs: epochs, StepsPerEpoch: steps}
	require.NoError(t, sink.Begin(run))
	all := make([]RankFigures, ranks)
	for i := range all {
		all[i] = RankFigures{i, times(float64(i%7), 0)}
	}
	for epoch := range epochs {
		for step := 1; step <= steps; step++ {
			n := epoch*steps + step
			s := Step{Epoch: epoch, Step: step, GlobalStep: int64(n), Values: []Value{{"loss", 1 / float64(n)},
				{fmt.Sprint("made up ", n), 1}}, LR: 1 / float64(n), Times: times(1, 0)}
			if n == 77_777 {
				s.Values[0].Value = 50
			}
			if step == steps {
				s.Ranks = all
			}
			require.NoError(t, sink.Step(s))
		}
		require.NoError(t, sink.Epoch(Epoch{Epoch: epoch, Step: int64(epoch+1) * steps}))
	}
	require.NoError(t, sink.Close())
	page := readPage(t, path)
	require.Less(t, len(page), 1_500_000)
	loss := sink.values["loss"].splits["step"]
	require.Less(t, len(loss.points), maxPoints)
	require.Len(t, sink.names, maxNames)
	require.Equal(t, 50.0, maxOf(loss.all()))
	mean, ok := loss.mean()
	require.True(t, ok)
	require.InDelta(t, (math.Log(200_000)+0.5772+50)/200_000, mean, 1e-7, "means stay exact")
	require.Contains(t, page, "The slowest 32 of 256 ranks.")
	require.Contains(t, page, "760 epochs between the first and the last ones are left out.")
	require.Contains(t, page, "More than 48 figures have names of their own")
}

func maxOf(points []point) float64 {
	high := math.Inf(-1)
	for _, p := range points {
		high = max(high, p.high)
	}
	return high
}

func TestSeriesKeepsTheShape(t *testing.T) {
	for _, n := range []int{0, 1, 2, 799, 800, 801, 1600, 12345} {
		var s series
		for i := range n {
			s.add(float64(i), float64(i))
		}
		points, count := s.all(), 0
		require.LessOrEqual(t, len(points), maxPoints)
		for i, p := range points {
			count += p.n
			require.InDelta(t, p.x, p.y, 1e-9, "a straight line stays one")
			require.True(t, i == 0 || points[i-1].high < p.low)
		}
		require.Equal(t, n, count)
	}
	var none *series
	require.Empty(t, none.all())
}

func TestReplaceLeavesTheOldFileWhenItFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	require.NoError(t, os.WriteFile(path, []byte("old"), 0o644))
	require.ErrorIs(t, replace(path, func(w io.Writer) error {
		fmt.Fprint(w, "half")
		return io.ErrUnexpectedEOF
	}), io.ErrUnexpectedEOF)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, bytes.Equal(text, []byte("old")))
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)
}
