//go:build linux

package main

import (
	"bytes"
	"image/color"
	"os"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// charted are the works of the chart, from top to bottom.
var charted = []string{
	"floor/nothing", "floor/udp", "floor/full", "floor/everything",
	"sweep/backend-leaves", "sweep/10-leave", "sweep/100-leave", "sweep/service-edited", "sweep/ipv6-leaves",
	"sweep/full-0", "sweep/full-1", "sweep/full-25", "sweep/udp4-1", "conntrack/everything",
	"kube-proxy/backend-leaves", "kube-proxy/1", "kube-proxy/25",
	"conntrack-tools/delete", "conntrack-tools/list", "ti-mo/everything", "vishvananda/everything",
}

// kinds of works have a colour each (those of Okabe and Ito, which everybody can
// tell apart).
var kinds = []struct {
	prefixes []string
	name     string
	color    color.RGBA
}{
	{[]string{"floor/"}, "the kernel's floor", color.RGBA{0x70, 0x70, 0x70, 0xff}},
	{[]string{"sweep/", "conntrack/"}, "flowsweep", color.RGBA{0x00, 0x72, 0xb2, 0xff}},
	{[]string{"kube-proxy/", "conntrack-tools/", "ti-mo/", "vishvananda/"}, "peers", color.RGBA{0xd5, 0x5e, 0x00, 0xff}},
}

// glyphs tell the sizes apart, the largest last.
var glyphs = []draw.GlyphDrawer{draw.RingGlyph{}, draw.SquareGlyph{}, draw.CircleGlyph{}}

// chart draws the time of each work as points on a logarithmic scale, a bar over
// the spread, into an SVG file.
func (r *results) chart(o *options, file string) error {
	titles := map[string]string{}
	for _, w := range works(o) {
		titles[w.name] = w.title
	}
	var rows []string
	for _, name := range slices.Backward(charted) { // the y axis goes up
		if slices.ContainsFunc(r.Figures, func(f figures) bool { return f.Work == name }) {
			rows = append(rows, name)
		}
	}
	p := plot.New()
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.TickerFunc(decades)
	p.X.Label.Text = "time, logarithmic"
	p.BackgroundColor = color.White
	var labels []string
	for _, name := range rows {
		labels = append(labels, titles[name])
	}
	p.NominalY(labels...)
	p.Y.Width, p.Y.Tick.Width, p.Y.Padding = 0, 0, vg.Points(20) // room for a wider font
	faint := draw.LineStyle{Color: color.Gray{0xe0}, Width: vg.Points(0.5)}
	p.Add(&plotter.Grid{Vertical: faint, Horizontal: faint})
	sizes := r.sizes()
	for i, n := range sizes {
		glyph := glyphs[max(0, len(glyphs)-len(sizes))+i]
		for _, k := range kinds {
			if err := r.points(p, rows, k.prefixes, n, k.color, glyph); err != nil {
				return err
			}
		}
		p.Legend.Add(thousands(n)+" flows", thumb{draw.GlyphStyle{Color: color.Black, Radius: vg.Points(3), Shape: glyph}})
	}
	for _, k := range kinds {
		p.Legend.Add(k.name, thumb{draw.GlyphStyle{Color: k.color, Radius: vg.Points(4), Shape: draw.BoxGlyph{}}})
	}
	p.Legend.Top, p.Legend.Padding = true, vg.Points(4)
	p.X.Min, p.X.Max = p.X.Min*0.8, p.X.Max*4 // room for the legend
	p.Y.Min, p.Y.Max = -0.7, float64(len(rows))-0.3
	sans := func(s *text.Style) { s.Font.Variant, s.Font.Size = "Sans", font.Points(9) }
	for _, s := range []*text.Style{&p.X.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		sans(s)
	}
	width, height := 22*vg.Centimeter, vg.Length(len(rows))*vg.Points(15)+vg.Points(60)
	c := vgsvg.NewWith(vgsvg.UseWH(width, height))
	margin := vg.Points(6)
	p.Draw(draw.Crop(draw.New(c), margin, -margin, margin, -margin))
	var svg bytes.Buffer
	if _, err := c.WriteTo(&svg); err != nil {
		return err
	}
	// Fonts of the same widths, where the one that was measured with is missing.
	fonts := strings.ReplaceAll(svg.String(), "font-family:Liberation Sans;",
		"font-family:Liberation Sans,Arial,Helvetica,sans-serif;")
	return os.WriteFile(file, []byte(fonts), 0o644) //nolint:gosec // a picture
}

// points adds the works of one kind at one size.
func (r *results) points(p *plot.Plot, rows, prefixes []string, n int, c color.Color, glyph draw.GlyphDrawer) error {
	var xys plotter.XYs
	var spread plotter.XErrors
	for y, name := range rows {
		f := r.find(name, n)
		if f == nil || !slices.ContainsFunc(prefixes, func(s string) bool { return strings.HasPrefix(name, s) }) {
			continue
		}
		mid, least, most := f.median(seconds)
		xys = append(xys, plotter.XY{X: mid, Y: float64(y)})
		spread = append(spread, struct{ Low, High float64 }{least - mid, most - mid})
	}
	if len(xys) == 0 {
		return nil
	}
	s, err := plotter.NewScatter(xys)
	if err != nil {
		return err
	}
	s.GlyphStyle = draw.GlyphStyle{Color: c, Radius: vg.Points(3), Shape: glyph}
	bars, err := plotter.NewXErrorBars(struct {
		plotter.XYer
		plotter.XErrorer
	}{xys, spread})
	if err != nil {
		return err
	}
	bars.Color, bars.CapWidth = c, vg.Points(4)
	p.Add(s, bars)
	return nil
}

// thumb is a glyph in the legend.
type thumb struct{ draw.GlyphStyle }

// Thumbnail implements plot.Thumbnailer.
func (t thumb) Thumbnail(c *draw.Canvas) { c.DrawGlyph(t.GlyphStyle, c.Center()) }

// decades are the ticks of a scale of seconds: a word at each power of ten, a
// mark at what is between.
func decades(least, most float64) (ticks []plot.Tick) {
	for unit := 1e-6; unit <= most; unit *= 10 {
		for i := range 9 {
			if v := unit * float64(i+1); v >= least && v <= most {
				t := plot.Tick{Value: v}
				if i == 0 {
					t.Label = strings.Replace(strings.Replace(duration(v*1.0000001), ".00", "", 1), ".0", "", 1)
				}
				ticks = append(ticks, t)
			}
		}
	}
	return ticks
}
