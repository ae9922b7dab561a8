package report

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Charts are drawn by gonum/plot as SVG. Their colours are names for the page's style sheet, which has them in light
// and dark: ink(0) to ink(5) become var(--c0) to var(--c5).
const (
	axisInk = 8
	gridInk = 9
)

func ink(i int) color.NRGBA { return color.NRGBA{R: 0xfe, G: 0xed, B: 0xa0 + uint8(i), A: 0xff} }

func pale(i int) color.NRGBA {
	c := ink(i)
	c.A = 0x38
	return c
}

var inks = func() *strings.Replacer {
	var pairs []string
	for i := range 8 {
		pairs = append(pairs, fmt.Sprintf(":#FEED%02X", 0xa0+i), fmt.Sprintf(":var(--c%d)", i))
	}
	pairs = append(pairs, fmt.Sprintf(":#FEED%02X", 0xa0+axisInk), ":var(--axis)",
		fmt.Sprintf(":#FEED%02X", 0xa0+gridInk), ":var(--grid)")
	return strings.NewReplacer(pairs...)
}()

// curve is a line of a chart.
type curve struct {
	name   string
	ink    int
	data   *series
	spread bool // show the range of what points are the mean of
	dots   bool
}

// span is from the first step of the run to the last: all curves stand above the same steps.
type span struct{ low, high float64 }

func (s span) set(p *plot.Plot) {
	p.X.Min, p.X.Max = min(p.X.Min, s.low), max(p.X.Max, s.high)
	if p.X.Min == p.X.Max {
		p.X.Min, p.X.Max = p.X.Min-0.5, p.X.Max+0.5
	}
}

// legend is what a colour of a chart means.
type legend struct {
	Name string
	Ink  int
}

// A chart is as wide as a column of the page, or as all of it.
const narrow, wide, chartHeight = 6.2 * vg.Inch, 12.6 * vg.Inch, 2.5 * vg.Inch

// lineChart draws curves over global steps. It gives nothing where there is nothing to draw.
func lineChart(curves []curve, fromZero bool, steps span) (template.HTML, []legend, error) {
	p := newPlot()
	var names []legend
	low, high := math.Inf(1), math.Inf(-1)
	for _, c := range curves {
		for _, at := range c.data.all() {
			low, high = min(low, at.low), max(high, at.high)
		}
	}
	if low > high {
		return "", nil, nil
	}
	if fromZero {
		low = min(low, 0)
	}
	p.X.Label.Text = "step"
	if low > 0 && high/low > 1000 && !fromZero {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.TickerFunc(logTicks)
		p.Y.Label.Text = "log scale"
	} else if low > 0 && low < high/3 {
		low = 0 // near enough to show where zero is
	}
	for _, c := range curves {
		points := c.data.all()
		if len(points) == 0 {
			continue
		}
		names = append(names, legend{c.name, c.ink})
		if err := c.add(p, points); err != nil {
			return "", nil, fmt.Errorf("chart of %s: %w", c.name, err)
		}
	}
	if low == high { // a flat line in the middle, with ticks that can be told apart
		pad := max(math.Abs(low)*0.1, 1e-9)
		low, high = low-pad, high+pad
	}
	p.Y.Min, p.Y.Max = low, high
	steps.set(p)
	svg, err := render(p, narrow, chartHeight)
	return svg, names, err
}

func (c curve) add(p *plot.Plot, points []point) error {
	xys := make(plotter.XYs, len(points))
	for i, at := range points {
		xys[i] = plotter.XY{X: at.x, Y: at.y}
	}
	if c.spread && len(points) > 1 {
		band := make(plotter.XYs, 0, 2*len(points))
		for _, at := range points {
			band = append(band, plotter.XY{X: at.x, Y: at.high})
		}
		for i := len(points) - 1; i >= 0; i-- {
			band = append(band, plotter.XY{X: points[i].x, Y: points[i].low})
		}
		area, err := plotter.NewPolygon(band)
		if err != nil {
			return err
		}
		area.Color, area.LineStyle.Width = pale(c.ink), 0
		p.Add(area)
	}
	if len(points) > 1 {
		line, err := plotter.NewLine(xys)
		if err != nil {
			return err
		}
		line.Color, line.Width = ink(c.ink), vg.Points(1.6)
		p.Add(line)
	}
	if c.dots && len(points) <= 60 || len(points) == 1 {
		dots, err := plotter.NewScatter(xys)
		if err != nil {
			return err
		}
		dots.GlyphStyle = draw.GlyphStyle{Color: ink(c.ink), Radius: vg.Points(2.6), Shape: draw.CircleGlyph{}}
		p.Add(dots)
	}
	return nil
}

// areaChart stacks the phases of a step over global steps, in milliseconds.
func areaChart(parts []*series, steps span, width vg.Length) (template.HTML, []legend, error) {
	if len(parts) == 0 || len(parts[0].all()) == 0 {
		return "", nil, nil
	}
	p := newPlot()
	p.X.Label.Text, p.Y.Label.Text = "step", "ms"
	// The parts have the same points: each step adds one to all.
	sums := make(plotter.XYs, len(parts[0].all()))
	layers := make([]plotter.XYs, len(parts))
	for i, part := range parts {
		for j, at := range part.all() {
			sums[j].X, sums[j].Y = at.x, sums[j].Y+at.y*1000
		}
		layers[i] = append(plotter.XYs(nil), sums...)
	}
	if len(sums) == 1 { // a stripe
		for i, l := range layers {
			layers[i] = plotter.XYs{{X: l[0].X - 0.5, Y: l[0].Y}, {X: l[0].X + 0.5, Y: l[0].Y}}
		}
	}
	names := make([]legend, len(parts))
	for i := len(parts) - 1; i >= 0; i-- { // the highest first: the next covers all but its own part of it
		line, err := plotter.NewLine(layers[i])
		if err != nil {
			return "", nil, fmt.Errorf("chart of the phases: %w", err)
		}
		line.FillColor, line.Width = ink(i), 0
		p.Add(line)
		names[i] = legend{phases[i].name, i}
	}
	if p.Y.Min = 0; p.Y.Max <= 0 {
		p.Y.Max = 1
	}
	steps.set(p)
	svg, err := render(p, width, chartHeight)
	return svg, names, err
}

// barChart shows each rank's phases in milliseconds, the first rank on top.
func barChart(ranks []RankFigures) (template.HTML, []legend, error) {
	if len(ranks) == 0 {
		return "", nil, nil
	}
	p := newPlot()
	p.X.Label.Text = "ms a step"
	names := make([]legend, len(phases))
	labels := make([]string, len(ranks))
	for i, r := range ranks {
		labels[len(ranks)-1-i] = "rank " + strconv.Itoa(r.Rank)
	}
	var below *plotter.BarChart
	for i, phase := range phases {
		values := make(plotter.Values, len(ranks))
		for j, r := range ranks {
			values[len(ranks)-1-j] = float64(max(phase.of(r.Times), 0)) / float64(time.Millisecond)
		}
		bars, err := plotter.NewBarChart(values, vg.Points(12))
		if err != nil {
			return "", nil, fmt.Errorf("chart of the ranks: %w", err)
		}
		bars.Horizontal, bars.Color, bars.LineStyle.Width = true, ink(i), 0
		if below != nil {
			bars.StackOn(below)
		}
		below = bars
		p.Add(bars)
		names[i] = legend{phase.name, i}
	}
	p.NominalY(labels...)
	p.Y.Tick.LineStyle.Width = 0
	if p.X.Min = 0; p.X.Max <= 0 {
		p.X.Max = 1
	}
	svg, err := render(p, wide, vg.Points(float64(44+19*len(ranks))))
	return svg, names, err
}

func newPlot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = color.Transparent
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = nil, ink(gridInk)
	grid.Horizontal.Width = vg.Points(0.8)
	p.Add(grid)
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.LineStyle.Color, axis.Tick.LineStyle.Color = ink(axisInk), ink(axisInk)
		axis.Tick.Length = vg.Points(4)
		axis.Tick.Marker = plot.TickerFunc(linearTicks)
	}
	p.Y.LineStyle.Width, p.Y.Tick.LineStyle.Width = 0, 0
	return p
}

// linearTicks are at round numbers, about six of them.
func linearTicks(low, high float64) []plot.Tick {
	const about = 6
	unit := math.Pow(10, math.Floor(math.Log10((high-low)/about)))
	for _, by := range []float64{2, 2.5, 2} { // 1, 2, 5, 10 of it
		if (high-low)/unit > about {
			unit *= by
		}
	}
	var list []plot.Tick
	for i := math.Ceil(low/unit - 1e-9); i*unit <= high+unit*1e-9 && len(list) < 2*about; i++ {
		list = append(list, plot.Tick{Value: i * unit, Label: tick(i * unit)})
	}
	return list
}

// logTicks are the powers of ten.
func logTicks(low, high float64) []plot.Tick {
	list := plot.LogTicks{Prec: -1}.Ticks(low, high)
	for i := range list {
		if list[i].Label != "" {
			list[i].Label = tick(list[i].Value)
		}
	}
	return list
}

// tick writes a number of an axis short: 20k instead of 20000.
func tick(v float64) string {
	switch a := math.Abs(v); {
	case a == 0: // also the negative one
		return "0"
	case a >= 1e9 || a < 1e-3:
		return number(v)
	case a >= 1e6:
		return strconv.FormatFloat(v/1e6, 'g', 6, 64) + "M"
	case a >= 1e4:
		return strconv.FormatFloat(v/1e3, 'g', 6, 64) + "k"
	}
	return strconv.FormatFloat(v, 'g', 6, 64)
}

// svgHead is what stands before the drawing; the page sets the size, and needs no XML declaration.
var svgHead = regexp.MustCompile(`(?s)^.*?<svg width="[^"]*" height="[^"]*" (viewBox="[^"]*").*?>`)

// background is the transparent ground, which would still be drawn.
var background = regexp.MustCompile(`<path d="[^"]*" style="fill:#FFFFFF;fill-opacity:0" ?/>\n?`)

func render(p *plot.Plot, width, height vg.Length) (template.HTML, error) {
	canvas := vgsvg.NewWith(vgsvg.UseWH(width, height))
	p.Draw(draw.Crop(draw.New(canvas), vg.Points(4), vg.Points(-10), vg.Points(4), vg.Points(-8)))
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return "", fmt.Errorf("draw: %w", err)
	}
	text := inks.Replace(svgHead.ReplaceAllString(b.String(), `<svg $1 role="img" aria-hidden="true">`))
	// gonum escapes what it writes as text; everything else is numbers.
	return template.HTML(background.ReplaceAllString(text, "")), nil
}
