package transforms

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
)

func noise(h, w, c int, planar bool) Image {
	rng := rand.New(rand.NewPCG(uint64(h), uint64(w*4+c)))
	m := Image{make([]byte, h*w*c), h, w, c, planar}
	for i := range m.Pix {
		m.Pix[i] = byte(rng.Uint32())
		if rng.IntN(3) == 0 { // flat parts too
			m.Pix[i] = byte(i)
		}
	}
	return m
}

// peer runs torchvision on images and gives what comes out, as raw bytes.
const peer = `
import json, sys, os
import numpy as np, torch
from PIL import Image
from torchvision import transforms as T
from torchvision.transforms import functional as F
I = T.InterpolationMode
out = open(sys.argv[2], "wb")
for c in json.load(open(sys.argv[1])):
    a = np.frombuffer(bytes.fromhex(c["pix"]), dtype=np.uint8).reshape(c["h"], c["w"], c["c"])
    img = Image.fromarray(a[:, :, 0] if c["c"] == 1 else a)
    t = eval(c["python"])(img)
    if not isinstance(t, torch.Tensor): t = F.pil_to_tensor(t)
    out.write(t.contiguous().numpy().tobytes())
`

// Every step without randomness gives torchvision's numbers, to the last bit.
func TestAgainstTorchvision(t *testing.T) {
	type step struct {
		steps  []Transform
		python string
	}
	adjust := func(change func(Image)) []Transform {
		return []Transform{Func{Label: "adjust", Do: func(m Image, _ *rand.Rand) (Image, error) {
			m.Pix = bytes.Clone(m.Pix)
			change(m)
			return m, nil
		}}}
	}
	imagenet := Normalize{Mean: []float64{0.485, 0.456, 0.406}, Std: []float64{0.229, 0.224, 0.225}}
	const pyNorm = "T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))"
	cases := []step{
		{[]Transform{ToTensor{}}, "T.ToTensor()"},
		{[]Transform{ToTensor{}, Normalize{[]float64{0.1307}, []float64{0.3081}}}, "T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))])"},
		{[]Transform{ToTensor{}, imagenet}, "T.Compose([T.ToTensor(), " + pyNorm + "])"},
		{[]Transform{ToTensor{}, imagenet, imagenet}, "T.Compose([T.ToTensor(), " + pyNorm + ", " + pyNorm + "])"},
		{[]Transform{Resize{Size: 25}, CenterCrop{Height: 22}, ToTensor{}, imagenet}, "T.Compose([T.Resize(25), T.CenterCrop(22), T.ToTensor(), " + pyNorm + "])"},
		{[]Transform{CenterCrop{Height: 7}}, "T.CenterCrop(7)"},
		{[]Transform{CenterCrop{Height: 40, Width: 21}}, "T.CenterCrop((40, 21))"},
		{[]Transform{CenterCrop{Height: 21, Width: 50}}, "T.CenterCrop((21, 50))"},
		{[]Transform{Pad{All: 3, Fill: []byte{9}}}, "T.Pad(3, 9)"},
		{[]Transform{Pad{Left: 1, Top: 2, Right: 3, Bottom: 4, Mode: Edge}}, "T.Pad((1, 2, 3, 4), 0, 'edge')"},
		{[]Transform{Pad{All: 5, Mode: Reflect}}, "T.Pad(5, 0, 'reflect')"},
		{[]Transform{Pad{All: 5, Mode: Symmetric}}, "T.Pad(5, 0, 'symmetric')"},
		{[]Transform{CenterCrop{Height: 9}, Pad{All: 2}, Pad{All: 1, Fill: []byte{200}}}, "T.Compose([T.CenterCrop(9), T.Pad(2), T.Pad(1, 200)])"},
		{[]Transform{RandomHorizontalFlip{P: 1}, CenterCrop{Height: 8, Width: 5}, RandomVerticalFlip{P: 1}, Pad{Left: 2, Top: 1}},
			"T.Compose([T.RandomHorizontalFlip(1), T.CenterCrop((8, 5)), T.RandomVerticalFlip(1), T.Pad((2, 1, 0, 0))])"},
		{[]Transform{Pad{Left: 3}, RandomHorizontalFlip{P: 1}, ToTensor{}}, "T.Compose([T.Pad((3, 0, 0, 0)), T.RandomHorizontalFlip(1), T.ToTensor()])"},
		{[]Transform{Resize{Size: 30, MaxSize: 40}}, "T.Resize(30, max_size=40)"},
		{[]Transform{Grayscale{}}, "T.Grayscale()"},
		{[]Transform{Grayscale{Channels: 3}}, "T.Grayscale(3)"},
		{[]Transform{RandomErasing{P: 1}}, ""},
	}
	cases = cases[:len(cases)-1]
	for _, size := range [][2]int{{8, 8}, {13, 40}, {33, 29}, {64, 17}, {1, 1}} {
		for filter, name := range map[Filter]string{Bilinear: "BILINEAR", Nearest: "NEAREST", Bicubic: "BICUBIC", Lanczos: "LANCZOS", Box: "BOX"} {
			cases = append(cases, step{[]Transform{Resize{Height: size[0], Width: size[1], Filter: filter}},
				fmt.Sprintf("T.Resize((%d, %d), I.%s)", size[0], size[1], name)})
		}
	}
	for _, f := range []float64{0, 0.3, 0.5, 0.77, 1, 1.4, 2.5} {
		cases = append(cases, step{adjust(func(m Image) { adjustBrightness(m, f) }), fmt.Sprintf("lambda x: F.adjust_brightness(x, %v)", f)},
			step{adjust(func(m Image) { adjustContrast(m, f) }), fmt.Sprintf("lambda x: F.adjust_contrast(x, %v)", f)},
			step{adjust(func(m Image) { adjustSaturation(m, f) }), fmt.Sprintf("lambda x: F.adjust_saturation(x, %v)", f)})
	}
	for _, f := range []float64{-0.5, -0.21, 0, 0.1, 0.33, 0.5} {
		cases = append(cases, step{adjust(func(m Image) { adjustHue(m, f) }), fmt.Sprintf("lambda x: F.adjust_hue(x, %v)", f)})
	}

	type spec struct {
		H      int    `json:"h"`
		W      int    `json:"w"`
		C      int    `json:"c"`
		Pix    string `json:"pix"`
		Python string `json:"python"`
	}
	var specs []spec
	var want [][]byte
	var labels []string
	for _, size := range [][3]int{{28, 28, 1}, {32, 32, 3}, {19, 31, 3}, {50, 23, 1}, {64, 47, 3}} {
		img := noise(size[0], size[1], size[2], false)
		for _, c := range cases {
			p, err := Compose(c.steps...)
			require.NoError(t, err)
			out, err := p.Output(Size{img.Height, img.Width, img.Channels})
			if err != nil {
				continue // a normalisation for three channels on a grey image
			}
			for _, planar := range []bool{false, true} {
				in := img
				if planar {
					in.Planar = true
					in.Pix = make([]byte, len(img.Pix))
					for i := range in.Pix {
						plane := img.Height * img.Width
						in.Pix[i] = img.Pix[i%plane*img.Channels+i/plane]
					}
				}
				n := out.Channels * out.Height * out.Width
				var got []byte
				if p.Float() {
					v := make([]float32, n)
					require.NoError(t, p.Apply(in, v, rand.New(rand.NewPCG(1, 1))), c.python)
					for _, x := range v {
						got = binary.LittleEndian.AppendUint32(got, math.Float32bits(x))
					}
				} else {
					got = make([]byte, n)
					require.NoError(t, p.ApplyBytes(in, got, rand.New(rand.NewPCG(1, 1))), c.python)
				}
				specs = append(specs, spec{img.Height, img.Width, img.Channels, fmt.Sprintf("%x", img.Pix), c.python})
				want = append(want, got)
				labels = append(labels, fmt.Sprintf("%v of %v planar %v", c.python, size, planar))
			}
		}
	}
	dir := t.TempDir()
	text, err := json.Marshal(specs)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "in"), text, 0o600))
	testenv.RunPython(t, peer, filepath.Join(dir, "in"), filepath.Join(dir, "out"))
	theirs, err := os.ReadFile(filepath.Join(dir, "out"))
	require.NoError(t, err)
	bad := 0
	for i, ours := range want {
		require.GreaterOrEqual(t, len(theirs), len(ours), labels[i])
		if !bytes.Equal(theirs[:len(ours)], ours) {
			k := 0
			for theirs[k] == ours[k] {
				k++
			}
			t.Errorf("%s: differs at byte %d of %d: ours %d, torchvision's %d", labels[i], k, len(ours), ours[k], theirs[k])
			if bad++; bad > 20 {
				t.FailNow()
			}
		}
		theirs = theirs[len(ours):]
	}
	require.Empty(t, theirs)
	t.Logf("%d images", len(want))
}

// Colours all over the cube through PIL's colour circle and back. (All 2^24 were compared once: none differed.)
func TestHueOfManyColours(t *testing.T) {
	const step, n = 61, 275000
	crc := func(shift float64) uint32 {
		m := Image{make([]byte, 3*n), n, 1, 3, false}
		for i := range n {
			k := i * step
			m.Pix[3*i], m.Pix[3*i+1], m.Pix[3*i+2] = byte(k>>16), byte(k>>8), byte(k)
		}
		adjustHue(m, shift)
		return crc32sum(m.Pix)
	}
	out := testenv.RunPython(t, `
import numpy as np, zlib
from PIL import Image
from torchvision.transforms import functional as F
i = (np.arange(275000, dtype=np.uint32) * 61).reshape(-1, 1)
a = np.stack([i >> 16, (i >> 8) & 255, i & 255], axis=2).astype(np.uint8)
for f in (0.0, 0.37): print(zlib.crc32(np.asarray(F.adjust_hue(Image.fromarray(a), f)).tobytes()), end=" ")`)
	require.Equal(t, fmt.Sprintf("%d %d ", crc(0), crc(0.37)), out)
}
