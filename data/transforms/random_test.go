package transforms

import (
	"hash/crc32"
	"image"
	"image/color"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func crc32sum(b []byte) uint32 { return crc32.ChecksumIEEE(b) }

// places is an image whose bytes tell where they come from.
func places(h, w int) Image {
	m := Image{make([]byte, h*w), h, w, 1, false}
	for i := range m.Pix {
		m.Pix[i] = byte(1 + i)
	}
	return m
}

// A random crop shows a part of the padded image, every place comes about equally often, and a flip mirrors it.
func TestRandomCropAndFlip(t *testing.T) {
	const n, pad = 5, 2
	p, err := Compose(RandomCrop{Height: n, Padding: pad}, RandomHorizontalFlip{})
	require.NoError(t, err)
	img := places(n, n)
	rng := rand.New(rand.NewPCG(1, 2))
	seen := map[[3]int]int{}
	const rounds = 20000
	for range rounds {
		out := make([]byte, n*n)
		require.NoError(t, p.ApplyBytes(img, out, rng))
		found := 0
		for dy := -pad; dy <= pad; dy++ {
			for dx := -pad; dx <= pad; dx++ {
				for flip := range 2 {
					same := true
					for y := 0; y < n && same; y++ {
						for x := range n {
							sx := x
							if flip == 1 {
								sx = n - 1 - x
							}
							var want byte
							if yy, xx := y+dy, sx+dx; yy >= 0 && yy < n && xx >= 0 && xx < n {
								want = img.At(yy, xx, 0)
							}
							if out[y*n+x] != want {
								same = false
								break
							}
						}
					}
					if same {
						found++
						seen[[3]int{dy, dx, flip}]++
					}
				}
			}
		}
		require.Equal(t, 1, found)
	}
	require.Len(t, seen, 50)
	for place, k := range seen {
		require.InDelta(t, rounds/50, k, 120, "%v", place) // 6 standard deviations
	}
}

func TestRandomResizedCrop(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	c := RandomResizedCrop{Height: 8}
	fallback := 0
	for _, size := range [][2]int{{100, 80}, {30, 300}, {1, 40}} {
		for range 3000 {
			top, left, h, w := c.params(size[0], size[1], rng)
			require.True(t, top >= 0 && left >= 0 && h > 0 && w > 0 && top+h <= size[0] && left+w <= size[1])
			area, aspect := float64(h*w)/float64(size[0]*size[1]), float64(w)/float64(h)
			if size[0] == 100 {
				require.InDelta(t, 0.54, area, 0.47)
				require.InDelta(t, 1.04, aspect, 0.4)
			} else if area < 0.079 {
				fallback++
			}
		}
	}
	require.Positive(t, fallback)
	p, err := Compose(c, ColorJitter{0.4, 0.4, 0.4, 0.1}, ToTensor{}, Normalize{[]float64{0.5}, []float64{0.5}}, RandomErasing{P: 1, Random: true})
	require.NoError(t, err)
	img := noise(37, 53, 3, true)
	before := crc32sum(img.Pix)
	out := make([]float32, 3*8*8)
	require.NoError(t, p.Apply(img, out, rng))
	require.Equal(t, before, crc32sum(img.Pix), "the caller's image was changed")
	again := make([]float32, 3*8*8)
	require.NoError(t, p.Apply(img, again, rand.New(rand.NewPCG(3, 4))))
	require.NotEqual(t, out, again)
	require.NoError(t, p.Apply(img, out, rand.New(rand.NewPCG(3, 4))))
	require.Equal(t, again, out, "the same numbers must give the same image")
}

func TestRandomErasing(t *testing.T) {
	p, err := Compose(ToTensor{}, RandomErasing{P: 1, Value: []float64{7, 8, 9}})
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		out := make([]float32, 3*20*20)
		require.NoError(t, p.Apply(noise(20, 20, 3, false), out, rng))
		n := 0
		for c := range 3 {
			k := 0
			for _, v := range out[c*400 : (c+1)*400] {
				if v == float32(7+c) {
					k++
				}
			}
			if c > 0 {
				require.Equal(t, n, k)
			}
			n = k
		}
		require.InDelta(t, 0.175*400, float64(n), 0.16*400+10)
	}
}

func TestComposeErrors(t *testing.T) {
	for want, steps := range map[string][]Transform{
		"put it behind ToTensor": {Normalize{[]float64{1}, []float64{1}}},
		"put it before ToTensor": {ToTensor{}, CenterCrop{Height: 3}},
		"one already":            {ToTensor{}, ToTensor{}},
		"std evaluated to zero":  {ToTensor{}, Normalize{[]float64{1}, []float64{0}}},
		"Mean and Std":           {ToTensor{}, Normalize{}},
		"a size of 0x0":          {RandomCrop{}},
		"set Size":               {Resize{}},
		"exclude each other":     {Resize{Size: 3, Height: 2, Width: 2}},
		"greater than Size":      {Resize{Size: 3, MaxSize: 2}},
		"probability":            {RandomHorizontalFlip{P: 2}},
		"hue":                    {ColorJitter{Hue: 0.6}},
		"step 0 is nil":          {nil},
		"must not be negative":   {Pad{All: -1}},
		"Do is missing":          {Func{}},
		"unknown filter":         {Resize{Size: 3, Filter: 17}},
	} {
		_, err := Compose(steps...)
		require.ErrorContains(t, err, want)
	}
	p, err := Compose(RandomCrop{Height: 30}, ToTensor{})
	require.NoError(t, err)
	rng := rand.New(rand.NewPCG(1, 2))
	require.ErrorContains(t, p.Apply(places(20, 20), make([]float32, 900), rng), "required crop size (30, 30) is larger than input image size (20, 20)")
	require.ErrorContains(t, p.Apply(places(40, 40), make([]float32, 90), rng), "room for 90 values")
	require.ErrorContains(t, p.Apply(Image{Height: 2, Width: 2, Channels: 1, Pix: make([]byte, 3)}, nil, rng), "has 4 bytes, these are 3")
	require.ErrorContains(t, p.ApplyBytes(places(40, 40), make([]byte, 900), rng), "it gives floats")
	p, err = Compose(Pad{All: 9, Mode: Reflect})
	require.NoError(t, err)
	require.ErrorContains(t, p.ApplyBytes(places(5, 5), make([]byte, 900), rng), "reflected padding")
	p, err = Compose(ToTensor{}, Normalize{[]float64{1, 2, 3}, []float64{1, 2, 3}})
	require.NoError(t, err)
	_, err = p.Output(Size{4, 4, 1})
	require.ErrorContains(t, err, "3 means")
	require.Error(t, p.Apply(places(4, 4), make([]float32, 16), rng))
	out, err := p.Output(Size{-1, -1, 3})
	require.NoError(t, err)
	require.Equal(t, Size{-1, -1, 3}, out)
}

func TestFromImage(t *testing.T) {
	n := image.NewNRGBA(image.Rect(2, 3, 6, 8))
	g := image.NewGray(n.Rect)
	q := image.NewPaletted(n.Rect, color.Palette{color.NRGBA{1, 2, 3, 255}, color.NRGBA{9, 8, 7, 255}})
	for y := 3; y < 8; y++ {
		for x := 2; x < 6; x++ {
			n.SetNRGBA(x, y, color.NRGBA{byte(10 * x), byte(10 * y), 7, 200})
			g.SetGray(x, y, color.Gray{byte(x * y)})
			q.SetColorIndex(x, y, byte(x&1))
		}
	}
	m := FromImage(n)
	require.NoError(t, m.Check())
	require.Equal(t, []int{5, 4, 3}, []int{m.Height, m.Width, m.Channels})
	require.Equal(t, byte(30), m.At(0, 1, 0))
	require.Equal(t, byte(70), m.At(4, 0, 1))
	m = FromImage(g)
	require.Equal(t, 1, m.Channels)
	require.Equal(t, byte(5*7), m.At(4, 3, 0))
	require.Equal(t, m.At(4, 3, 0), m.RGB().At(4, 3, 2))
	m = FromImage(q)
	require.Equal(t, byte(9), m.At(0, 1, 0))
}

func BenchmarkCIFARChain(b *testing.B) {
	p, err := Compose(RandomCrop{Height: 32, Padding: 4}, RandomHorizontalFlip{}, ToTensor{},
		Normalize{[]float64{0.4914, 0.4822, 0.4465}, []float64{0.247, 0.2435, 0.2616}})
	require.NoError(b, err)
	img := noise(32, 32, 3, true)
	out := make([]float32, 3*32*32)
	rng := rand.New(rand.NewPCG(1, 2))
	for b.Loop() {
		if err := p.Apply(img, out, rng); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkMNIST(b *testing.B) {
	p, err := Compose(ToTensor{}, Normalize{[]float64{0.1307}, []float64{0.3081}})
	require.NoError(b, err)
	img := noise(28, 28, 1, false)
	out := make([]float32, 28*28)
	rng := rand.New(rand.NewPCG(1, 2))
	for b.Loop() {
		if err := p.Apply(img, out, rng); err != nil {
			b.Fatal(err)
		}
	}
}
