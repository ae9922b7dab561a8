package transforms

import (
	"fmt"
	"math"
)

// Filter is how pixels between pixels are computed.
type Filter int

// The filters of PIL that training uses.
const (
	Bilinear Filter = iota
	Nearest
	Bicubic
	Lanczos
	Box
)

func (k Filter) check() error {
	if k < Bilinear || k > Box {
		return fmt.Errorf("unknown filter %d", k)
	}
	return nil
}

// support is how far the filter's curve reaches.
func (k Filter) support() float64 {
	switch k {
	case Bicubic:
		return 2
	case Lanczos:
		return 3
	case Box:
		return 0.5
	}
	return 1
}

func (k Filter) weight(x float64) float64 {
	switch k {
	case Box:
		if x > -0.5 && x <= 0.5 {
			return 1
		}
		return 0
	case Bicubic:
		const a = -0.5
		if x = math.Abs(x); x < 1 {
			return float64(float64(((a+2)*x-(a+3))*x)*x) + 1
		} else if x < 2 {
			return (((x-5)*x+8)*x - 4) * a
		}
		return 0
	case Lanczos:
		if x < -3 || x >= 3 {
			return 0
		}
		return sinc(x) * sinc(x/3)
	}
	if x = math.Abs(x); x < 1 {
		return 1 - x
	}
	return 0
}

func sinc(x float64) float64 {
	if x == 0 {
		return 1
	}
	x *= math.Pi
	return math.Sin(x) / x
}

// PIL computes with fixed point: 32 bits less the 8 of a byte and 2 for overshoot.
const precision = 32 - 8 - 2

// coefficients are, for each pixel of a line of output, the weights of a run of input pixels.
type coefficients struct {
	in, out int
	filter  Filter
	size    int // weights a pixel
	start   []int
	count   []int
	weights []int32
}

// compute fills k for lines of n pixels scaled to m.
func (k *coefficients) compute(n, m int, filter Filter) {
	scale := float64(n) / float64(m)
	wide := max(scale, 1)
	support := filter.support() * wide
	k.in, k.out, k.filter = n, m, filter
	k.size = int(math.Ceil(support))*2 + 1
	k.start, k.count = grow(k.start, m), grow(k.count, m)
	k.weights = grow(k.weights, m*k.size)
	line := make([]float64, k.size)
	for x := range m {
		center := (float64(x) + 0.5) * scale
		inv := 1 / wide
		first := max(int(center-support+0.5), 0)
		count := min(int(center+support+0.5), n) - first
		sum := 0.0
		for i := range count {
			w := filter.weight((float64(i+first) - center + 0.5) * inv)
			line[i] = w
			sum += w
		}
		out := k.weights[x*k.size : (x+1)*k.size]
		clear(out)
		for i := range count {
			w := line[i]
			if sum != 0 {
				w /= sum
			}
			if w < 0 {
				out[i] = int32(-0.5 + float64(w*(1<<precision)))
			} else {
				out[i] = int32(0.5 + float64(w*(1<<precision)))
			}
		}
		k.start[x], k.count[x] = first, count
	}
}

func grow[E any](s []E, n int) []E {
	if cap(s) < n {
		return make([]E, n)
	}
	return s[:n]
}

func clip8(v int32) byte {
	v >>= precision
	if uint32(v) <= 255 {
		return byte(v)
	}
	return byte(^(v >> 31)) // 0 below, 255 above
}

// resize scales the window to h by w.
func (f *frame) resize(h, w int, filter Filter) {
	src := f.render()
	if filter == Nearest {
		f.nearest(src, h, w)
		return
	}
	// Pillow 13 goes through the rows first where they lose much more than the columns. The bytes in between are
	// rounded, so that the order shows in the result.
	if h < src.Height && src.Height-h > 2*(src.Width-w) {
		src = f.scaleRows(f.scaleColumns(src, h, filter), w, filter)
	} else {
		src = f.scaleColumns(f.scaleRows(src, w, filter), h, filter)
	}
	f.set(src)
}

// scaleRows makes every row w pixels long.
func (f *frame) scaleRows(src Image, w int, filter Filter) Image {
	if w == src.Width {
		return src
	}
	c, k := src.Channels, &f.coef
	k.compute(src.Width, w, filter)
	out := f.buffer(src.Height * w * c)
	for y := range src.Height {
		in, line := src.Pix[y*src.Width*c:(y+1)*src.Width*c], out[y*w*c:(y+1)*w*c]
		if c == 3 {
			for x := range w {
				weights := k.weights[x*k.size:][:k.count[x]]
				px := in[k.start[x]*3:][:3*len(weights)]
				r, g, b := int32(1<<(precision-1)), int32(1<<(precision-1)), int32(1<<(precision-1))
				for _, wt := range weights {
					r += int32(px[0]) * wt
					g += int32(px[1]) * wt
					b += int32(px[2]) * wt
					px = px[3:]
				}
				line[3*x], line[3*x+1], line[3*x+2] = clip8(r), clip8(g), clip8(b)
			}
			continue
		}
		for x := range w {
			weights, at := k.weights[x*k.size:][:k.count[x]], k.start[x]*c
			for ch := range c {
				v := int32(1 << (precision - 1))
				for i, wt := range weights {
					v += int32(in[at+i*c+ch]) * wt
				}
				line[x*c+ch] = clip8(v)
			}
		}
	}
	return Image{out, src.Height, w, c, false}
}

// scaleColumns makes every column h pixels high.
func (f *frame) scaleColumns(src Image, h int, filter Filter) Image {
	if h == src.Height {
		return src
	}
	k, row := &f.coef, src.Width*src.Channels
	k.compute(src.Height, h, filter)
	out := f.buffer(h * row)
	f.sums = grow(f.sums, row)
	for y := range h {
		sums := f.sums
		for i := range sums {
			sums[i] = 1 << (precision - 1)
		}
		for i, wt := range k.weights[y*k.size:][:k.count[y]] {
			in := src.Pix[(k.start[y]+i)*row:][:len(sums)]
			for x, v := range in {
				sums[x] += int32(v) * wt
			}
		}
		line := out[y*row:][:len(sums)]
		for x, v := range sums {
			line[x] = clip8(v)
		}
	}
	return Image{out, h, src.Width, src.Channels, false}
}

// nearest takes the pixel under each centre. The coordinate is summed up step by step, as PIL does it.
func (f *frame) nearest(src Image, h, w int) {
	c := src.Channels
	out := f.buffer(h * w * c)
	at := make([]int, w)
	step := float64(src.Width) / float64(w)
	pos := step * 0.5
	for x := range at {
		at[x] = min(int(pos), src.Width-1)
		pos += step
	}
	step = float64(src.Height) / float64(h)
	pos = step * 0.5
	for y := range h {
		in := src.Pix[min(int(pos), src.Height-1)*src.Width*c:]
		pos += step
		for x, sx := range at {
			copy(out[(y*w+x)*c:(y*w+x+1)*c], in[sx*c:])
		}
	}
	f.set(Image{out, h, w, c, false})
}
