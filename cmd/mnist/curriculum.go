package main

import (
	"context"

	"github.com/goddp/goddp/data/vision"
)

// difficulty scores images for a curriculum: an image is the harder, the farther it is from the mean image of its
// class. Every rank computes the same scores.
func difficulty(ctx context.Context, set *vision.Images) ([]float64, error) {
	means := make([][]float64, len(set.Classes()))
	counts := make([]float64, len(means))
	err := each(ctx, set, func(_ int, s vision.Sample) {
		if means[s.Label] == nil {
			means[s.Label] = make([]float64, len(s.Image.Pix))
		}
		counts[s.Label]++
		for k, p := range s.Image.Pix {
			means[s.Label][k] += float64(p)
		}
	})
	if err != nil {
		return nil, err
	}
	for label, mean := range means {
		for k := range mean {
			mean[k] /= counts[label]
		}
	}
	scores := make([]float64, set.Len())
	err = each(ctx, set, func(i int, s vision.Sample) {
		for k, p := range s.Image.Pix {
			d := float64(p) - means[s.Label][k]
			scores[i] += d * d
		}
	})
	return scores, err
}

func each(ctx context.Context, set *vision.Images, do func(i int, s vision.Sample)) error {
	for i := range set.Len() {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		s, err := set.Item(ctx, i)
		if err != nil {
			return err
		}
		do(i, s)
	}
	return nil
}
