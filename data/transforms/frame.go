package transforms

import "encoding/binary"

const maxChannels = 4

// frame is an image on its way through a pipeline: a window onto source bytes, which may reach beyond them (padding) and
// be read backwards (flips). Only operations that compute new pixels write any.
type frame struct {
	src          Image
	y, x, h, w   int // the window, in the source's coordinates
	flipX, flipY bool
	// The part of the source that shows; the window's rest is fill.
	top, bottom, left, right int
	fill                     [maxChannels]byte

	spare [2][]byte // memory of computed images, used in turn
	turn  int
	coef  coefficients
	sums  []int32
}

func (f *frame) set(img Image) {
	f.src = img
	f.y, f.x, f.h, f.w = 0, 0, img.Height, img.Width
	f.flipX, f.flipY = false, false
	f.top, f.bottom, f.left, f.right = 0, img.Height, 0, img.Width
	f.fill = [maxChannels]byte{}
}

// buffer gives n bytes that do not overlap the current source.
func (f *frame) buffer(n int) []byte {
	f.turn ^= 1
	if cap(f.spare[f.turn]) < n {
		f.spare[f.turn] = make([]byte, n)
	}
	return f.spare[f.turn][:n]
}

// padded tells whether the window shows fill.
func (f *frame) padded() bool {
	return f.y < f.top || f.x < f.left || f.y+f.h > f.bottom || f.x+f.w > f.right
}

// crop narrows the window to a part of it, in the coordinates of what it shows.
func (f *frame) crop(top, left, h, w int) {
	if f.flipY {
		top = f.h - top - h
	}
	if f.flipX {
		left = f.w - left - w
	}
	// What the window did not show must not come back when a later padding widens it.
	f.top, f.bottom = max(f.top, f.y), min(f.bottom, f.y+f.h)
	f.left, f.right = max(f.left, f.x), min(f.right, f.x+f.w)
	f.y, f.x, f.h, f.w = f.y+top, f.x+left, h, w
}

// pad widens the window by fill.
func (f *frame) pad(left, top, right, bottom int, fill [maxChannels]byte) {
	if f.padded() && fill != f.fill {
		f.render()
	}
	f.fill = fill
	f.crop(-top, -left, f.h+top+bottom, f.w+left+right)
}

func (f *frame) flip(horizontally bool) {
	if horizontally {
		f.flipX = !f.flipX
	} else {
		f.flipY = !f.flipY
	}
}

// render makes the window's pixels the source, channels side by side, and gives them.
func (f *frame) render() Image {
	c := f.src.Channels
	whole := f.y == 0 && f.x == 0 && f.h == f.src.Height && f.w == f.src.Width && !f.flipX && !f.flipY
	if whole && !f.padded() && (!f.src.Planar || c == 1) {
		f.src.Planar = false
		return f.src
	}
	out := f.buffer(f.h * f.w * c)
	for ch := range c {
		write(f, ch, &identity, out[ch:], c)
	}
	f.set(Image{out, f.h, f.w, c, false})
	return f.src
}

var identity = func() (t [256]byte) {
	for i := range t {
		t[i] = byte(i)
	}
	return t
}()

// write puts channel c of the window through a table into dst, whose elements lie step apart.
func write[E float32 | byte](f *frame, c int, table *[256]E, dst []E, step int) {
	pixel, base, stride := f.src.Channels, c, f.src.Channels*f.src.Width
	if f.src.Planar {
		pixel, base, stride = 1, c*f.src.Height*f.src.Width, f.src.Width
	}
	if pixel == 1 && step == 1 && f.w == f.src.Width && f.x == 0 && !f.flipX && !f.flipY && !f.padded() {
		look(table, f.src.Pix[base+f.y*stride:][:f.h*f.w], dst) // whole rows: one long one
		return
	}
	from, to := max(f.x, f.left), min(f.x+f.w, f.right)
	n := max(to-from, 0)
	lead := min(max(from-f.x, 0), f.w) // columns of fill before the source shows
	if f.flipX {
		lead = f.w - lead - n
	}
	blank := table[f.fill[c]]
	for row := range f.h {
		y := f.y + row
		if f.flipY {
			y = f.y + f.h - 1 - row
		}
		line := dst[row*f.w*step:]
		line = line[:(f.w-1)*step+1]
		if y < f.top || y >= f.bottom || n == 0 {
			spread(line, blank, step)
			continue
		}
		if lead > 0 {
			spread(line[:(lead-1)*step+1], blank, step)
		}
		if rest := lead + n; rest < f.w {
			spread(line[rest*step:], blank, step)
		}
		src := f.src.Pix[base+y*stride+from*pixel:]
		src = src[:(n-1)*pixel+1]
		line = line[lead*step:]
		line = line[:(n-1)*step+1]
		switch {
		case pixel == 1 && step == 1 && !f.flipX:
			look(table, src, line)
		case pixel == 1 && step == 1:
			lookBack(table, src, line)
		case !f.flipX:
			for i, k := 0, 0; i < len(src); i, k = i+pixel, k+step {
				line[k] = table[src[i]]
			}
		default:
			for i, k := 0, len(line)-1; i < len(src); i, k = i+pixel, k-step {
				line[k] = table[src[i]]
			}
		}
	}
}

func spread[E float32 | byte](line []E, v E, step int) {
	for i := 0; i < len(line); i += step {
		line[i] = v
	}
}

// look writes table[src[i]] to dst[i]. Eight at a time: this is where loading an image spends its time.
func look[E float32 | byte](table *[256]E, src []byte, dst []E) {
	for len(src) >= 8 && len(dst) >= 8 {
		v, d := binary.LittleEndian.Uint64(src), (*[8]E)(dst)
		d[0], d[1], d[2], d[3] = table[byte(v)], table[byte(v>>8)], table[byte(v>>16)], table[byte(v>>24)]
		d[4], d[5], d[6], d[7] = table[byte(v>>32)], table[byte(v>>40)], table[byte(v>>48)], table[byte(v>>56)]
		src, dst = src[8:], dst[8:]
	}
	for i, v := range src {
		dst[i] = table[v]
	}
}

// lookBack writes table[src[i]] to dst[len(src)-1-i].
func lookBack[E float32 | byte](table *[256]E, src []byte, dst []E) {
	n := len(src)
	for n >= 8 && len(dst) >= 8 {
		v, d := binary.LittleEndian.Uint64(src[n-8:]), (*[8]E)(dst)
		d[7], d[6], d[5], d[4] = table[byte(v)], table[byte(v>>8)], table[byte(v>>16)], table[byte(v>>24)]
		d[3], d[2], d[1], d[0] = table[byte(v>>32)], table[byte(v>>40)], table[byte(v>>48)], table[byte(v>>56)]
		n, dst = n-8, dst[8:]
	}
	for i := range n {
		dst[i] = table[src[n-1-i]]
	}
}
