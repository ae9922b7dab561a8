package transforms

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// PaddingMode says what is seen beyond an image's edge.
type PaddingMode int

// The padding modes of torchvision.
const (
	Constant  PaddingMode = iota // Fill
	Edge                         // the last pixel, again and again
	Reflect                      // the image mirrored, without its edge
	Symmetric                    // the image mirrored, with its edge
)

// Pad widens an image. Left, Top, Right and Bottom are added to All.
type Pad struct {
	All, Left, Top, Right, Bottom int
	Mode                          PaddingMode
	Fill                          []byte // a value, or one a channel; nil is 0
}

func (t Pad) name() string { return "Pad" }
func (t Pad) edges() (l, tp, r, b int) {
	return t.All + t.Left, t.All + t.Top, t.All + t.Right, t.All + t.Bottom
}
func (t Pad) check() error {
	if l, tp, r, b := t.edges(); min(l, tp, r, b) < 0 {
		return fmt.Errorf("padding of %d, %d, %d, %d: it must not be negative", l, tp, r, b)
	}
	return checkFill(t.Fill)
}
func (t Pad) size(in Size) Size {
	l, tp, r, b := t.edges()
	if in.Height >= 0 {
		in.Height += tp + b
	}
	if in.Width >= 0 {
		in.Width += l + r
	}
	return in
}
func (t Pad) apply(f *frame, _ *rand.Rand) error {
	l, tp, r, b := t.edges()
	return padFrame(f, l, tp, r, b, t.Mode, t.Fill)
}

func checkFill(fill []byte) error {
	if len(fill) > maxChannels {
		return fmt.Errorf("%d fill values: one, or one a channel", len(fill))
	}
	return nil
}

func padFrame(f *frame, l, tp, r, b int, mode PaddingMode, fill []byte) error {
	if l == 0 && tp == 0 && r == 0 && b == 0 {
		return nil
	}
	if mode == Constant {
		var v [maxChannels]byte
		for c := range f.src.Channels {
			switch {
			case len(fill) == 1:
				v[c] = fill[0]
			case len(fill) > 1 && len(fill) != f.src.Channels:
				return fmt.Errorf("%d fill values for %d channels", len(fill), f.src.Channels)
			case len(fill) > 1:
				v[c] = fill[c]
			}
		}
		f.pad(l, tp, r, b, v)
		return nil
	}
	src := f.render()
	if reach := max(l, r) - src.Width; mode == Reflect && (reach >= 0 || max(tp, b) >= src.Height) {
		return fmt.Errorf("reflected padding must be smaller than the image of %dx%d", src.Height, src.Width)
	}
	if mode == Symmetric && (max(l, r) > src.Width || max(tp, b) > src.Height) {
		return fmt.Errorf("symmetric padding must not exceed the image of %dx%d", src.Height, src.Width)
	}
	h, w, c := src.Height+tp+b, src.Width+l+r, src.Channels
	out := f.buffer(h * w * c)
	for y := range h {
		sy := beyond(y-tp, src.Height, mode)
		for x := range w {
			sx := beyond(x-l, src.Width, mode)
			copy(out[(y*w+x)*c:(y*w+x+1)*c], src.Pix[(sy*src.Width+sx)*c:])
		}
	}
	f.set(Image{out, h, w, c, false})
	return nil
}

// beyond maps a coordinate outside 0 to n-1 to the pixel seen there.
func beyond(i, n int, mode PaddingMode) int {
	switch {
	case mode == Edge:
		return min(max(i, 0), n-1)
	case i < 0 && mode == Reflect:
		return -i
	case i < 0:
		return -i - 1
	case i >= n && mode == Reflect:
		return 2*n - 2 - i
	case i >= n:
		return 2*n - 1 - i
	}
	return i
}

// square is Width where it is set, and Height otherwise.
func square(h, w int) (int, int) {
	if w == 0 {
		w = h
	}
	return h, w
}

func checkSize(h, w int) error {
	if h, w = square(h, w); h <= 0 || w <= 0 {
		return fmt.Errorf("a size of %dx%d", h, w)
	}
	return nil
}

// RandomCrop cuts out a part of given size at a random place, after padding.
type RandomCrop struct {
	Height, Width int // Width 0: a square
	Padding       int // on all sides
	PadIfNeeded   bool
	Mode          PaddingMode
	Fill          []byte
}

func (t RandomCrop) name() string { return "RandomCrop" }
func (t RandomCrop) check() error {
	if t.Padding < 0 {
		return fmt.Errorf("padding %d", t.Padding)
	}
	if err := checkSize(t.Height, t.Width); err != nil {
		return err
	}
	return checkFill(t.Fill)
}
func (t RandomCrop) size(in Size) Size {
	in.Height, in.Width = square(t.Height, t.Width)
	return in
}
func (t RandomCrop) apply(f *frame, rng *rand.Rand) error {
	h, w := square(t.Height, t.Width)
	if err := padFrame(f, t.Padding, t.Padding, t.Padding, t.Padding, t.Mode, t.Fill); err != nil {
		return err
	}
	if t.PadIfNeeded {
		dx, dy := max(w-f.w, 0), max(h-f.h, 0)
		if err := padFrame(f, dx, dy, dx, dy, t.Mode, t.Fill); err != nil {
			return err
		}
	}
	if f.h < h || f.w < w {
		return fmt.Errorf("required crop size (%d, %d) is larger than input image size (%d, %d)", h, w, f.h, f.w)
	}
	top, left := rng.IntN(f.h-h+1), rng.IntN(f.w-w+1)
	f.crop(top, left, h, w)
	return nil
}

// CenterCrop cuts out the middle. Images that are too small are padded with 0.
type CenterCrop struct{ Height, Width int } // Width 0: a square

func (t CenterCrop) name() string { return "CenterCrop" }
func (t CenterCrop) check() error { return checkSize(t.Height, t.Width) }
func (t CenterCrop) size(in Size) Size {
	in.Height, in.Width = square(t.Height, t.Width)
	return in
}
func (t CenterCrop) apply(f *frame, _ *rand.Rand) error {
	h, w := square(t.Height, t.Width)
	if dy, dx := max(h-f.h, 0), max(w-f.w, 0); dy > 0 || dx > 0 {
		f.pad(dx/2, dy/2, (dx+1)/2, (dy+1)/2, [maxChannels]byte{})
	}
	// Python rounds halves to even.
	f.crop(int(math.RoundToEven(float64(f.h-h)/2)), int(math.RoundToEven(float64(f.w-w)/2)), h, w)
	return nil
}

// RandomHorizontalFlip mirrors left and right with probability P; 0 is 0.5.
type RandomHorizontalFlip struct{ P float64 }

func (t RandomHorizontalFlip) name() string      { return "RandomHorizontalFlip" }
func (t RandomHorizontalFlip) check() error      { return checkP(t.P) }
func (t RandomHorizontalFlip) size(in Size) Size { return in }
func (t RandomHorizontalFlip) apply(f *frame, rng *rand.Rand) error {
	if chance(t.P, rng) {
		f.flip(true)
	}
	return nil
}

// RandomVerticalFlip mirrors top and bottom with probability P; 0 is 0.5.
type RandomVerticalFlip struct{ P float64 }

func (t RandomVerticalFlip) name() string      { return "RandomVerticalFlip" }
func (t RandomVerticalFlip) check() error      { return checkP(t.P) }
func (t RandomVerticalFlip) size(in Size) Size { return in }
func (t RandomVerticalFlip) apply(f *frame, rng *rand.Rand) error {
	if chance(t.P, rng) {
		f.flip(false)
	}
	return nil
}

func checkP(p float64) error {
	if !(p >= 0 && p <= 1) {
		return fmt.Errorf("probability %v is not between 0 and 1", p)
	}
	return nil
}

func chance(p float64, rng *rand.Rand) bool {
	if p == 0 {
		p = 0.5
	}
	return rng.Float64() < p
}

// Resize scales an image as PIL does, with antialiasing.
type Resize struct {
	Size          int // of the shorter edge; the aspect stays
	MaxSize       int // of the longer edge, with Size; 0 is no limit
	Height, Width int // instead of Size: exactly this size
	Filter        Filter
}

func (t Resize) name() string { return "Resize" }
func (t Resize) check() error {
	switch {
	case t.Size > 0 && (t.Height != 0 || t.Width != 0):
		return fmt.Errorf("the size %d and %dx%d exclude each other", t.Size, t.Height, t.Width)
	case t.Size == 0 && (t.Height <= 0 || t.Width <= 0), t.Size < 0:
		return fmt.Errorf("set Size, or Height and Width")
	case t.MaxSize != 0 && t.MaxSize <= t.Size:
		return fmt.Errorf("MaxSize %d must be greater than Size %d", t.MaxSize, t.Size)
	}
	return t.Filter.check()
}
func (t Resize) size(in Size) Size {
	switch {
	case t.Size == 0:
		in.Height, in.Width = t.Height, t.Width
	case in.Height < 0 || in.Width < 0:
		in.Height, in.Width = -1, -1
	default:
		in.Height, in.Width = t.target(in.Height, in.Width)
	}
	return in
}

func (t Resize) target(h, w int) (int, int) {
	if t.Size == 0 {
		return t.Height, t.Width
	}
	short, long := t.Size, t.Size*max(h, w)/min(h, w)
	if t.MaxSize > 0 && long > t.MaxSize {
		short, long = t.MaxSize*short/long, t.MaxSize
	}
	if w <= h {
		return max(long, 1), max(short, 1)
	}
	return max(short, 1), max(long, 1)
}
func (t Resize) apply(f *frame, _ *rand.Rand) error {
	h, w := t.target(f.h, f.w)
	if h != f.h || w != f.w {
		f.resize(h, w, t.Filter)
	}
	return nil
}

// RandomResizedCrop cuts out a part of random size and aspect and scales it. The zero ranges are torchvision's.
type RandomResizedCrop struct {
	Height, Width int        // Width 0: a square
	Scale         [2]float64 // part of the area; zero is 0.08 to 1
	Ratio         [2]float64 // width by height; zero is 3/4 to 4/3
	Filter        Filter
}

func (t RandomResizedCrop) name() string { return "RandomResizedCrop" }
func (t RandomResizedCrop) check() error {
	if err := checkRanges(t.Scale, t.Ratio); err != nil {
		return err
	}
	if err := t.Filter.check(); err != nil {
		return err
	}
	return checkSize(t.Height, t.Width)
}

func checkRanges(scale, ratio [2]float64) error {
	if !(scale[0] >= 0 && scale[0] <= scale[1]) || !(ratio[0] >= 0 && ratio[0] <= ratio[1]) {
		return fmt.Errorf("scale %v and ratio %v should be of kind (min, max)", scale, ratio)
	}
	return nil
}
func (t RandomResizedCrop) size(in Size) Size {
	in.Height, in.Width = square(t.Height, t.Width)
	return in
}
func (t RandomResizedCrop) apply(f *frame, rng *rand.Rand) error {
	top, left, h, w := t.params(f.h, f.w, rng)
	f.crop(top, left, h, w)
	h, w = square(t.Height, t.Width)
	if h != f.h || w != f.w {
		f.resize(h, w, t.Filter)
	}
	return nil
}

func (t RandomResizedCrop) params(height, width int, rng *rand.Rand) (top, left, h, w int) {
	scale, ratio := t.Scale, t.Ratio
	if scale == [2]float64{} {
		scale = [2]float64{0.08, 1}
	}
	if ratio == [2]float64{} {
		ratio = [2]float64{3. / 4, 4. / 3}
	}
	area := float64(height * width)
	for range 10 {
		target := area * uniform(rng, scale[0], scale[1])
		aspect := math.Exp(uniform(rng, math.Log(ratio[0]), math.Log(ratio[1])))
		w = int(math.RoundToEven(math.Sqrt(target * aspect)))
		h = int(math.RoundToEven(math.Sqrt(target / aspect)))
		if 0 < w && w <= width && 0 < h && h <= height {
			return rng.IntN(height - h + 1), rng.IntN(width - w + 1), h, w
		}
	}
	// Nothing fitted: the largest part in the middle whose aspect is allowed.
	h, w = height, width
	if in := float64(width) / float64(height); in < ratio[0] {
		h = int(math.RoundToEven(float64(w) / ratio[0]))
	} else if in > ratio[1] {
		w = int(math.RoundToEven(float64(h) * ratio[1]))
	}
	h, w = max(h, 1), max(w, 1)
	return (height - h) / 2, (width - w) / 2, h, w
}

func uniform(rng *rand.Rand, lo, hi float64) float64 { return lo + (hi-lo)*rng.Float64() }
