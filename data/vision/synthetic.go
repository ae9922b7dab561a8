package vision

import (
	"hash/fnv"
	"math"
	"math/rand/v2"

	"github.com/goddp/goddp/data/transforms"
)

// synthetic draws images that a model can learn to tell apart: each class has a smooth pattern of its own, which is
// shifted by up to two pixels and covered with noise. Image i is the same in every run and on every rank, and training
// and test images differ.
type synthetic struct {
	shape    transforms.Image
	seed     uint64
	patterns [][]int16 // by class, CHW
}

// makeUp fills d with n made-up images, or as many as Options.Size says.
func (d *Images) makeUp(o Options, n, classes int) {
	if o.Size > 0 {
		n = o.Size
	}
	h := fnv.New64a()
	h.Write([]byte(d.name[:len(d.name)-len(o.part())-3])) // the set's name without its part: both share the patterns
	rng := rand.New(rand.NewPCG(h.Sum64(), 1))
	s := &synthetic{shape: d.shape, seed: h.Sum64()}
	if o.Test {
		s.seed++
	}
	height, width, channels := d.shape.Height, d.shape.Width, d.shape.Channels
	for range classes {
		p := make([]int16, channels*height*width)
		for c := range channels {
			var fx, fy, phase, amp [4]float64
			for k := range fx {
				fx[k], fy[k] = rng.Float64()*3, rng.Float64()*3
				phase[k], amp[k] = rng.Float64()*2*math.Pi, 20+20*rng.Float64()
			}
			for y := range height {
				for x := range width {
					v := 0.0
					for k := range fx {
						v += amp[k] * math.Cos(2*math.Pi*(fx[k]*float64(x)/float64(width)+fy[k]*float64(y)/float64(height))+phase[k])
					}
					p[(c*height+y)*width+x] = int16(v)
				}
			}
		}
		s.patterns = append(s.patterns, p)
	}
	d.labels = make([]byte, n)
	for i := range d.labels {
		d.labels[i] = byte((uint64(i)*0x9e3779b97f4a7c15 ^ s.seed) >> 33 % uint64(classes))
	}
	d.shape.Planar, d.synthetic = true, s
	s.shape.Planar = true
}

// draw writes image i.
func (s *synthetic) draw(pix []byte, i, label int) {
	var pcg rand.PCG
	pcg.Seed(s.seed, uint64(i)*0xbf58476d1ce4e5b9)
	h, w := s.shape.Height, s.shape.Width
	bits := pcg.Uint64()
	dy, dx := int(bits%5)-2, int(bits>>8%5)-2
	p := s.patterns[label]
	k := 0
	for c := range s.shape.Channels {
		for y := range h {
			sy := min(max(y+dy, 0), h-1)
			row := p[(c*h+sy)*w:][:w]
			for x := range w {
				if k&7 == 0 {
					bits = pcg.Uint64()
				}
				noise := int(byte(bits))&127 - 64
				bits >>= 8
				pix[k] = byte(min(max(128+int(row[min(max(x+dx, 0), w-1)])+noise, 0), 255))
				k++
			}
		}
	}
}
