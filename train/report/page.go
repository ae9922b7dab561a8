package report

import (
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed page.tmpl
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// page is what the template shows.
type page struct {
	Title, Summary, Status string
	Whole                  bool // all epochs were run
	Cards                  []card
	Warnings               []string
	Charts                 []chart
	Stragglers             *table
	StragglerChart         *chart
	Epochs, Buckets        *table
	Settings, Environment  []Param
	Made                   string
}

// card is a figure in large type.
type card struct {
	Name, Value, Note string
}

type chart struct {
	Title, About string
	SVG          template.HTML
	Legend       []legend
	Wide         bool
}

type table struct {
	Head []string
	Rows [][]string
	Note string
}

const (
	shownRanks   = 32
	shownBuckets = 64
	shownCharts  = 16
)

func (h *html) write(w io.Writer) error {
	p, err := h.page()
	if err != nil {
		return err
	}
	return pageTemplate.Execute(w, p)
}

func (h *html) page() (page, error) {
	r := h.run
	p := page{Title: cmp.Or(printable(r.Name), "Training run"), Settings: h.settings(), Environment: h.environment(),
		Made: stamp(h.ended).Format("2 January 2006, 15:04:05 MST")}
	p.Summary = strings.TrimPrefix(r.line(), cmp.Or(printable(r.Name), "run")+": ")
	p.Status, p.Whole = h.status()
	p.Cards = h.cards()
	p.Warnings = h.warnings()
	var err error
	if p.Charts, err = h.charts(); err != nil {
		return p, err
	}
	if p.Stragglers, p.StragglerChart, err = h.stragglers(); err != nil {
		return p, err
	}
	p.Epochs, p.Buckets = h.epochTable(), h.bucketTable()
	return p, nil
}

func (h *html) status() (text string, whole bool) {
	done := h.run.StartEpoch + h.epochsDone
	switch {
	case !h.closed:
		return fmt.Sprintf("still running: %d of %s done", done, plural(h.run.Epochs, "epoch")), false
	case h.run.Epochs > 0 && done >= h.run.Epochs:
		return "finished: " + plural(h.run.Epochs, "epoch"), true
	default:
		return fmt.Sprintf("ended after %d of %s", done, plural(h.run.Epochs, "epoch")), false
	}
}

func (h *html) cards() []card {
	var list []card
	for _, split := range []string{"eval", "train", "step"} {
		for _, name := range h.names {
			s := h.values[name].splits[split]
			if s == nil || s.seen == 0 || slices.ContainsFunc(list, func(c card) bool { return c.Name == name }) {
				continue
			}
			list = append(list, card{name, number(s.last), map[string]string{"eval": "last evaluation",
				"train": "last epoch, training", "step": "last steps, training"}[split]})
		}
	}
	list = list[:min(len(list), 4)]
	if mean, ok := h.throughput.mean(); ok {
		list = append(list, card{"samples a second", number(mean), "mean, all ranks"})
	}
	if h.steps > 0 {
		list = append(list, card{"a step", short(h.total / time.Duration(h.steps)), "mean of " +
			plural(int(h.steps), "step")})
	}
	return append(list, card{"wall time", clock(stamp(h.ended).Sub(stamp(h.run.Started))), "from start to end"})
}

func (h *html) warnings() []string {
	var list []string
	for _, name := range h.names {
		for _, split := range splits {
			if s := h.values[name].splits[split.key]; s != nil && s.odd > 0 {
				list = append(list, fmt.Sprintf("%s (%s) was NaN or infinite in %d of %d reports, first at step %d: "+
					"lower the learning rate, clip gradients, or look for bad samples.",
					name, split.name, s.odd, s.seen, h.values[name].oddAt))
			}
		}
	}
	if h.unnamed > 0 {
		list = append(list, fmt.Sprintf("More than %d figures have names of their own; the others are not shown here.",
			maxNames))
	}
	if h.steps == 0 {
		list = append(list, "No step was reported: the run ended before its first figures.")
	}
	return list
}

func (h *html) charts() ([]chart, error) {
	var list []chart
	add := func(title, about string, svg template.HTML, names []legend, err error) error {
		if err == nil && svg != "" {
			list = append(list, chart{title, about, svg, names, false})
		}
		return err
	}
	for _, name := range h.names[:min(len(h.names), shownCharts)] {
		var curves []curve
		for i, split := range splits {
			curves = append(curves, curve{split.name, []int{0, 1, 2}[i], h.values[name].splits[split.key],
				split.key == "step", split.key != "step"})
		}
		svg, names, err := lineChart(curves, false, h.span)
		if err := add(name, aboutValue(name), svg, names, err); err != nil {
			return nil, err
		}
	}
	svg, names, err := lineChart([]curve{{"samples a second", 0, &h.throughput, true, false}}, true, h.span)
	if err := add("Throughput", "Samples a second of all ranks together. A falling line means that something, often "+
		"reading the data, became slower.", svg, names, err); err != nil {
		return nil, err
	}
	svg, names, err = lineChart([]curve{{"learning rate", 3, &h.lr, false, false}}, false, h.span)
	if err := add("Learning rate", "What the scheduler set.", svg, names, err); err != nil {
		return nil, err
	}
	fill := len(list)%2 == 0 // it would stand alone in its row
	width := narrow
	if fill {
		width = wide
	}
	svg, names, err = areaChart(h.phases, h.span, width)
	if err = add("Where a step's time goes", "Mean of all ranks. Data is waiting for the loader; communication is what "+
		"of the gradients' reduction the backward pass did not hide.", svg, names, err); err == nil && svg != "" {
		list[len(list)-1].Wide = fill
	}
	return list, err
}

func aboutValue(name string) string {
	switch {
	case strings.Contains(strings.ToLower(name), "loss"):
		return "Lower is better. Where the evaluation's line rises while the training's still falls, the model overfits."
	case strings.Contains(strings.ToLower(name), "acc"):
		return "Higher is better; the evaluation's is what counts."
	}
	return "A figure of the program, averaged over all ranks."
}

func (h *html) stragglers() (*table, *chart, error) {
	ranks := h.rankMeans()
	if len(ranks) == 0 {
		return nil, nil, nil
	}
	median := medianBusy(ranks)
	slices.SortStableFunc(ranks, func(a, b RankFigures) int { return cmp.Compare(b.Times.busy(), a.Times.busy()) })
	t := &table{Head: []string{"rank", "host", "busy", "against median"}}
	for _, p := range phases {
		t.Head = append(t.Head, p.name)
	}
	if n := len(ranks); n > shownRanks {
		ranks = ranks[:shownRanks]
		t.Note = fmt.Sprintf("The slowest %d of %d ranks.", shownRanks, n)
	}
	for _, r := range ranks {
		host, against := "", "–"
		if r.Rank >= 0 && r.Rank < len(h.run.Hosts) {
			host = printable(h.run.Hosts[r.Rank])
		}
		if median > 0 {
			against = share(float64(r.Times.busy()) / float64(median))
		}
		row := []string{strconv.Itoa(r.Rank), host, short(r.Times.busy()), against}
		for _, p := range phases {
			row = append(row, short(p.of(r.Times)))
		}
		t.Rows = append(t.Rows, row)
	}
	svg, names, err := barChart(ranks)
	return t, &chart{SVG: svg, Legend: names}, err
}

func (h *html) epochTable() *table {
	if len(h.epochs) == 0 {
		return nil
	}
	t := &table{Head: []string{"epoch", "time"}}
	type column struct {
		name string
		eval bool
	}
	var columns []column
	notes := false
	for _, eval := range []bool{false, true} {
		for _, e := range h.epochs {
			for _, v := range e.values(eval) {
				c := column{printable(v.Name), eval}
				if len(columns) < maxNames && !slices.Contains(columns, c) {
					columns = append(columns, c)
					t.Head = append(t.Head, map[bool]string{false: "train ", true: "eval "}[eval]+c.name)
				}
			}
			notes = notes || e.Note != ""
		}
	}
	if t.Head = append(t.Head, "samples/s", "learning rate"); notes {
		t.Head = append(t.Head, "note")
	}
	for _, e := range h.epochs {
		row := []string{strconv.Itoa(e.Epoch + 1), short(e.Duration)}
		for _, c := range columns {
			cell := "–"
			for _, v := range e.values(c.eval) {
				if printable(v.Name) == c.name {
					cell = number(v.Value)
				}
			}
			row = append(row, cell)
		}
		if row = append(row, number(e.Throughput), number(e.LR)); notes {
			row = append(row, printable(e.Note))
		}
		t.Rows = append(t.Rows, row)
	}
	if n := h.epochsDone - len(h.epochs); n > 0 {
		t.Note = fmt.Sprintf("%s between the first and the last ones are left out.", plural(n, "epoch"))
	}
	return t
}

func (e Epoch) values(eval bool) []Value {
	if eval {
		return e.Eval
	}
	return e.Train
}

func (h *html) bucketTable() *table {
	if len(h.buckets) == 0 {
		return nil
	}
	t := &table{Head: []string{"bucket", "size", "from ready to reduced", "bytes a second"}}
	for i, b := range h.buckets[:min(len(h.buckets), shownBuckets)] {
		took, rate := "–", "–"
		if b.Time > 0 {
			took, rate = short(b.Time), amount(int64(float64(b.Bytes)/b.Time.Seconds()))+"/s"
		}
		t.Rows = append(t.Rows, []string{strconv.Itoa(i), amount(b.Bytes), took, rate})
	}
	t.Note = "Of rank 0, in its last report; each of its steps reduced " + amount(h.bytes) + "."
	if n := len(h.buckets); n > shownBuckets {
		t.Note = fmt.Sprintf("The first %d of %d. %s", shownBuckets, n, t.Note)
	}
	return t
}

func (h *html) settings() []Param {
	var list []Param
	for _, p := range slices.Concat(h.run.facts(), h.run.Hyper) {
		list = append(list, Param{printable(p.Name), printable(p.Value)})
	}
	return list
}

func (h *html) environment() []Param {
	list := []Param{
		{"started", stamp(h.run.Started).Format(time.RFC3339)},
		{"ended", stamp(h.ended).Format(time.RFC3339)},
		{"Go", runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH},
		{"CPUs of rank 0", strconv.Itoa(runtime.NumCPU())},
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		list = append(list, Param{"program", build.Path})
		if v := build.Main.Version; v != "" {
			list = append(list, Param{"version", build.Main.Path + " " + v})
		}
	}
	if len(h.run.Hosts) > 0 {
		var names []string
		for _, name := range h.run.Hosts {
			if !slices.Contains(names, printable(name)) {
				names = append(names, printable(name))
			}
		}
		list = append(list, Param{plural(len(names), "host"), strings.Join(names, ", ")})
	}
	return list
}
