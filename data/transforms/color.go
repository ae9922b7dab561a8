package transforms

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// ColorJitter changes brightness, contrast and saturation by random factors from max(0, 1-v) to 1+v, and the hue by a
// random part of the colour circle from -v to v, in random order.
type ColorJitter struct{ Brightness, Contrast, Saturation, Hue float64 }

func (t ColorJitter) name() string { return "ColorJitter" }
func (t ColorJitter) check() error {
	if !(t.Brightness >= 0 && t.Contrast >= 0 && t.Saturation >= 0) {
		return fmt.Errorf("brightness %v, contrast %v and saturation %v must not be negative", t.Brightness, t.Contrast, t.Saturation)
	}
	if !(t.Hue >= 0 && t.Hue <= 0.5) {
		return fmt.Errorf("hue %v should be between 0 and 0.5", t.Hue)
	}
	return nil
}
func (t ColorJitter) size(in Size) Size { return in }
func (t ColorJitter) apply(f *frame, rng *rand.Rand) error {
	order := rng.Perm(4)
	factor := func(v float64) float64 { return uniform(rng, max(0, 1-v), 1+v) }
	b, c, s, h := factor(t.Brightness), factor(t.Contrast), factor(t.Saturation), uniform(rng, -t.Hue, t.Hue)
	for _, step := range order {
		switch {
		case step == 0 && t.Brightness > 0:
			f.color(func(m Image) { adjustBrightness(m, b) })
		case step == 1 && t.Contrast > 0:
			f.color(func(m Image) { adjustContrast(m, c) })
		case step == 2 && t.Saturation > 0:
			f.color(func(m Image) { adjustSaturation(m, s) })
		case step == 3 && t.Hue > 0:
			f.color(func(m Image) { adjustHue(m, h) })
		}
	}
	return nil
}

// color changes the window's pixels in place, on a copy where they are the caller's.
func (f *frame) color(change func(Image)) {
	m := f.render()
	if own := cap(f.spare[f.turn]) > 0 && len(m.Pix) > 0 && &m.Pix[0] == &f.spare[f.turn][:1][0]; !own {
		out := f.buffer(len(m.Pix))
		copy(out, m.Pix)
		m.Pix = out
		f.set(m)
	}
	change(m)
}

// Grayscale turns colours into grey; Channels 3 repeats it, otherwise one channel is left.
type Grayscale struct{ Channels int }

func (t Grayscale) name() string { return "Grayscale" }
func (t Grayscale) check() error {
	if t.Channels != 0 && t.Channels != 1 && t.Channels != 3 {
		return fmt.Errorf("channels should be either 1 or 3, got %d", t.Channels)
	}
	return nil
}
func (t Grayscale) size(in Size) Size {
	in.Channels = max(t.Channels, 1)
	return in
}
func (t Grayscale) apply(f *frame, _ *rand.Rand) error {
	m := f.render()
	n, c := m.Height*m.Width, max(t.Channels, 1)
	out := f.buffer(n * c)
	for i := range n {
		v := m.Pix[i*m.Channels]
		if m.Channels >= 3 {
			v = luma(m.Pix[i*m.Channels:])
		}
		for k := range c {
			out[i*c+k] = v
		}
	}
	f.set(Image{out, m.Height, m.Width, c, false})
	return nil
}

// luma is the grey of an RGB pixel.
func luma(p []byte) byte {
	return byte((uint32(p[0])*19595 + uint32(p[1])*38470 + uint32(p[2])*7471 + 1<<15) >> 16)
}

// mix goes from byte a to byte b by a factor, which may lie outside 0 to 1.
func mix(a, b byte, factor float32) byte {
	v := float32(a) + float32(factor*float32(int(b)-int(a)))
	if v <= 0 {
		return 0
	}
	if v >= 255 {
		return 255
	}
	return byte(v)
}

// mixTable is mix with one fixed a.
func mixTable(a byte, factor float64) (t [256]byte) {
	for i := range t {
		t[i] = mix(a, byte(i), float32(factor))
	}
	return t
}

func adjustBrightness(m Image, factor float64) {
	t := mixTable(0, factor)
	for i, v := range m.Pix {
		m.Pix[i] = t[v]
	}
}

func adjustContrast(m Image, factor float64) {
	sum, n := uint64(0), m.Height*m.Width
	for i := range n {
		if m.Channels >= 3 {
			sum += uint64(luma(m.Pix[i*m.Channels:]))
		} else {
			sum += uint64(m.Pix[i*m.Channels])
		}
	}
	t := mixTable(byte(float64(sum)/float64(n)+0.5), factor)
	for i, v := range m.Pix {
		m.Pix[i] = t[v]
	}
}

func adjustSaturation(m Image, factor float64) {
	if m.Channels < 3 {
		return
	}
	for i := 0; i+2 < len(m.Pix); i += m.Channels {
		p := m.Pix[i : i+3]
		grey := luma(p)
		for c, v := range p {
			p[c] = mix(grey, v, float32(factor))
		}
	}
}

func adjustHue(m Image, factor float64) {
	if m.Channels < 3 {
		return
	}
	shift := byte(int32(factor * 255))
	for i := 0; i+2 < len(m.Pix); i += m.Channels {
		p := m.Pix[i : i+3]
		h, s, v := toHSV(p[0], p[1], p[2])
		p[0], p[1], p[2] = fromHSV(h+shift, s, v)
	}
}

// toHSV has the mix of single and double precision that PIL computes with.
func toHSV(r, g, b byte) (h, s, v byte) {
	hi, lo := max(r, g, b), min(r, g, b)
	if hi == lo {
		return 0, 0, hi
	}
	span := float32(hi - lo)
	sat := span / float32(hi)
	rc, gc, bc := float32(hi-r)/span, float32(hi-g)/span, float32(hi-b)/span
	var hue float32
	switch hi {
	case r:
		hue = bc - gc
	case g:
		hue = float32(2 + float64(rc) - float64(bc))
	default:
		hue = float32(4 + float64(gc) - float64(rc))
	}
	hue = float32(math.Mod(float64(hue)/6+1, 1))
	return byte(int(float64(hue) * 255)), byte(int(float64(sat) * 255)), hi
}

func fromHSV(h, s, v byte) (r, g, b byte) {
	if s == 0 {
		return v, v, v
	}
	x := float64(h) * 6 / 255
	i := int(x)
	f := float32(x - float64(i))
	fs := float32(float64(s) / 255)
	at := func(k float64) byte {
		return byte(min(max(int(math.Round(float64(v)*k)), 0), 255))
	}
	p := at(1 - float64(fs))
	q := at(1 - float64(float32(fs*f)))
	t := at(1 - float64(fs)*(1-float64(f)))
	switch i % 6 {
	case 0:
		return v, t, p
	case 1:
		return q, v, p
	case 2:
		return p, v, t
	case 3:
		return p, q, v
	case 4:
		return t, p, v
	}
	return v, p, q
}
