package transforms

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// ToTensor turns bytes into floats from 0 to 1, one plane a channel.
type ToTensor struct{}

func (ToTensor) name() string { return "ToTensor" }

// Normalize subtracts a mean from each channel and divides by a deviation.
type Normalize struct{ Mean, Std []float64 }

func (t Normalize) name() string { return "Normalize" }
func (t Normalize) checkFor(channels int) error {
	if len(t.Mean) == 0 || len(t.Std) == 0 {
		return fmt.Errorf("it needs Mean and Std, one value a channel")
	}
	for _, s := range t.Std {
		if float32(s) == 0 {
			return fmt.Errorf("std evaluated to zero after conversion to float32, leading to division by zero")
		}
	}
	if channels > 0 && (len(t.Mean) != channels && len(t.Mean) != 1 || len(t.Std) != channels && len(t.Std) != 1) {
		return fmt.Errorf("it has %d means and %d deviations for %d channels", len(t.Mean), len(t.Std), channels)
	}
	return nil
}

// channel normalises the values of channel c in place. Rounding after each operation is torchvision's.
func (t Normalize) channel(v []float32, c int) {
	mean, std := float32(t.Mean[min(c, len(t.Mean)-1)]), float32(t.Std[min(c, len(t.Std)-1)])
	for i, x := range v {
		v[i] = float32(x-mean) / std
	}
}
func (t Normalize) transform(x tensor, _ *rand.Rand) {
	for c := range x.c {
		t.channel(x.v[c*x.h*x.w:(c+1)*x.h*x.w], c)
	}
}

// RandomErasing overwrites a random rectangle with probability P. The zero values are torchvision's.
type RandomErasing struct {
	P      float64    // 0 is 0.5
	Scale  [2]float64 // part of the area; zero is 0.02 to 0.33
	Ratio  [2]float64 // height by width; zero is 0.3 to 3.3
	Value  []float64  // a value, or one a channel; nil is 0
	Random bool       // normally distributed values instead
}

func (t RandomErasing) name() string { return "RandomErasing" }
func (t RandomErasing) checkFor(channels int) error {
	if err := checkP(t.P); err != nil {
		return err
	}
	if err := checkRanges(t.Scale, t.Ratio); err != nil {
		return err
	}
	if t.Scale[1] > 1 {
		return fmt.Errorf("scale %v should be between 0 and 1", t.Scale)
	}
	if channels > 0 && len(t.Value) > 1 && len(t.Value) != channels {
		return fmt.Errorf("it has %d values for %d channels: one, or one a channel", len(t.Value), channels)
	}
	return nil
}
func (t RandomErasing) transform(x tensor, rng *rand.Rand) {
	if !chance(t.P, rng) {
		return
	}
	scale, ratio := t.Scale, t.Ratio
	if scale == [2]float64{} {
		scale = [2]float64{0.02, 0.33}
	}
	if ratio == [2]float64{} {
		ratio = [2]float64{0.3, 3.3}
	}
	for range 10 {
		area := float64(x.h*x.w) * uniform(rng, scale[0], scale[1])
		aspect := math.Exp(uniform(rng, math.Log(ratio[0]), math.Log(ratio[1])))
		h := int(math.RoundToEven(math.Sqrt(area * aspect)))
		w := int(math.RoundToEven(math.Sqrt(area / aspect)))
		if h >= x.h || w >= x.w {
			continue
		}
		top, left := rng.IntN(x.h-h+1), rng.IntN(x.w-w+1)
		for c := range x.c {
			var v float32
			if len(t.Value) > 0 {
				v = float32(t.Value[min(c, len(t.Value)-1)])
			}
			for y := top; y < top+h; y++ {
				row := x.v[(c*x.h+y)*x.w+left:][:w]
				for i := range row {
					if t.Random {
						v = float32(rng.NormFloat64())
					}
					row[i] = v
				}
			}
		}
		return
	}
}
