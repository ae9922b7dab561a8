package amp

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

const mean = 1 // a loss's reduction

type tableOps map[string]func() (*ts.Tensor, error)

// lowerOps are those that autocast runs in the lower precision, given float32.
func lowerOps(t *testing.T) tableOps {
	seq, w1 := numbers(t, 1, 2, 5), numbers(t, 3, 2, 3)
	vol, w3 := numbers(t, 1, 2, 5, 5, 5), numbers(t, 3, 2, 3, 3, 3)
	img, back1, back2, back3 := numbers(t, 1, 2, 5, 5), numbers(t, 2, 3, 3), numbers(t, 2, 3, 3, 3), numbers(t, 2, 3, 3, 3, 3)
	a, c, q := numbers(t, 4, 4), numbers(t, 2, 4, 4), numbers(t, 1, 2, 4, 4)
	list := func(n int, v int64) []int64 {
		l := make([]int64, n)
		for i := range l {
			l[i] = v
		}
		return l
	}
	none := ts.NewTensor()
	return tableOps{
		"conv1d": func() (*ts.Tensor, error) { return ts.Conv1d(seq, w1, none, list(1, 1), list(1, 0), list(1, 1), 1) },
		"conv3d": func() (*ts.Tensor, error) { return ts.Conv3d(vol, w3, none, list(3, 1), list(3, 0), list(3, 1), 1) },
		"conv_transpose1d": func() (*ts.Tensor, error) {
			return ts.ConvTranspose1d(seq, back1, none, list(1, 1), list(1, 0), list(1, 0), 1, list(1, 1))
		},
		"conv_transpose2d": func() (*ts.Tensor, error) {
			return ts.ConvTranspose2d(img, back2, none, list(2, 1), list(2, 0), list(2, 0), 1, list(2, 1))
		},
		"conv_transpose3d": func() (*ts.Tensor, error) {
			return ts.ConvTranspose3d(vol, back3, none, list(3, 1), list(3, 0), list(3, 0), 1, list(3, 1))
		},
		"addbmm":         func() (*ts.Tensor, error) { return a.Addbmm(c, c, false) },
		"prelu":          func() (*ts.Tensor, error) { return a.Prelu(numbers(t, 1), false) },
		"linalg_vecdot":  func() (*ts.Tensor, error) { return ts.LinalgVecdot(a, a, -1) },
		"attention":      func() (*ts.Tensor, error) { return ts.ScaledDotProductAttention(q, q, q, none, 0, false, nil) },
		"softmax":        func() (*ts.Tensor, error) { return tdp.Softmax(a, 1, false) },
		"log_softmax":    func() (*ts.Tensor, error) { return tdp.Softmax(a, 1, true) },
		"sum-f32":        func() (*ts.Tensor, error) { return a.Sum(gotch.Float, false) },
		"cumsum-f32":     func() (*ts.Tensor, error) { return a.Cumsum(0, gotch.Float, false) },
		"norm":           func() (*ts.Tensor, error) { return a.Norm(false) },
		"layer_norm-f32": func() (*ts.Tensor, error) { return ts.LayerNorm(a, []int64{4}, none, none, 1e-5, false) },
	}
}

// fullOps are those that autocast runs in float32, given bfloat16, and some that it leaves alone.
func fullOps(t *testing.T) tableOps {
	half := func(x *ts.Tensor) *ts.Tensor { return x.MustTotype(gotch.BFloat16, true) }
	h, other := half(numbers(t, 4, 4)), half(numbers(t, 4, 4).MustAddScalar(ts.FloatScalar(1), true))
	vol, img, seq := half(numbers(t, 1, 2, 4, 4, 4)), half(numbers(t, 1, 2, 5, 5)), half(numbers(t, 1, 2, 5))
	// Symmetric and positive, in steps that bfloat16 holds.
	good, err := tdp.FromSlice([]float32{4, 1, 1, 3}, []int64{2, 2}, gotch.CPU)
	require.NoError(t, err)
	good = half(good)
	row, sign := half(numbers(t, 4)), half(ts.MustOfSlice([]float32{1, -1, 1, -1}))
	class, index := ts.MustOfSlice([]int64{0, 1, 2, 3}), ts.MustOfSlice([]int64{1, 0})
	none := ts.NewTensor()
	p := func() *ts.Tensor { return h.MustSigmoid(false) }
	grid := half(numbers(t, 1, 2, 2, 2))
	return tableOps{
		"avg_pool3d": func() (*ts.Tensor, error) {
			return vol.AvgPool3d([]int64{2, 2, 2}, []int64{2, 2, 2}, []int64{0, 0, 0}, false, true, nil, false)
		},
		"max_pool3d": func() (*ts.Tensor, error) {
			return vol.MaxPool3d([]int64{2, 2, 2}, []int64{2, 2, 2}, []int64{0, 0, 0}, []int64{1, 1, 1}, false, false)
		},
		"adaptive_avg_pool3d":  func() (*ts.Tensor, error) { return vol.AdaptiveAvgPool3d([]int64{2, 2, 2}, false) },
		"reflection_pad1d":     func() (*ts.Tensor, error) { return seq.ReflectionPad1d([]int64{1, 1}, false) },
		"reflection_pad2d":     func() (*ts.Tensor, error) { return img.ReflectionPad2d([]int64{1, 1, 1, 1}, false) },
		"replication_pad1d":    func() (*ts.Tensor, error) { return seq.ReplicationPad1d([]int64{1, 1}, false) },
		"replication_pad2d":    func() (*ts.Tensor, error) { return img.ReplicationPad2d([]int64{1, 1, 1, 1}, false) },
		"replication_pad3d":    func() (*ts.Tensor, error) { return vol.ReplicationPad3d([]int64{1, 1, 1, 1, 1, 1}, false) },
		"grid_sampler":         func() (*ts.Tensor, error) { return ts.GridSampler(img, grid, 0, 0, false) },
		"binary_cross_entropy": func() (*ts.Tensor, error) { return p().BinaryCrossEntropy(p(), none, mean, false) },
		"nll_loss":             func() (*ts.Tensor, error) { return h.NllLoss(class, none, mean, -100, false) },
		"cross_entropy_loss":   func() (*ts.Tensor, error) { return h.CrossEntropyLoss(class, none, mean, -100, 0, false) },
		"l1_loss":              func() (*ts.Tensor, error) { return h.L1Loss(other, mean, false) },
		"smooth_l1_loss":       func() (*ts.Tensor, error) { return h.SmoothL1Loss(other, mean, 1, false) },
		"huber_loss":           func() (*ts.Tensor, error) { return h.HuberLoss(other, mean, 1, false) },
		"kl_div":               func() (*ts.Tensor, error) { return h.KlDiv(p(), mean, false, false) },
		"soft_margin_loss":     func() (*ts.Tensor, error) { return row.SoftMarginLoss(sign, mean, false) },
		"hinge_embedding_loss": func() (*ts.Tensor, error) { return row.HingeEmbeddingLoss(sign, 1, mean, false) },
		"margin_ranking_loss":  func() (*ts.Tensor, error) { return ts.MarginRankingLoss(row, row, sign, 0, mean) },
		"triplet_margin_loss":  func() (*ts.Tensor, error) { return ts.TripletMarginLoss(h, other, h, 1, 2, 1e-6, false, mean) },
		"poisson_nll_loss":     func() (*ts.Tensor, error) { return ts.PoissonNllLoss(h, p(), true, false, 1e-8, mean) },
		"cosine_embedding_loss": func() (*ts.Tensor, error) {
			return ts.CosineEmbeddingLoss(h, other, sign, 0, mean)
		},
		"multilabel_margin_loss": func() (*ts.Tensor, error) {
			return row.MultilabelMarginLoss(ts.MustOfSlice([]int64{1, -1, 0, 0}), mean, false)
		},
		"quantile": func() (*ts.Tensor, error) {
			return h.Quantile(ts.MustOfSlice([]float32{0.5}), []int64{0}, false, "linear", false)
		},
		"trace":            func() (*ts.Tensor, error) { return h.Trace(false) },
		"cdist":            func() (*ts.Tensor, error) { return ts.Cdist(h, other, 2, nil) },
		"cholesky":         func() (*ts.Tensor, error) { return good.Cholesky(false, false) },
		"cholesky_inverse": func() (*ts.Tensor, error) { return good.CholeskyInverse(false, false) },
		"inverse":          func() (*ts.Tensor, error) { return good.Inverse(false) },
		"pinverse":         func() (*ts.Tensor, error) { return good.Pinverse(1e-15, false) },
		"linalg_inv":       func() (*ts.Tensor, error) { return ts.LinalgInv(good) },
		"linalg_det":       func() (*ts.Tensor, error) { return ts.LinalgDet(good) },
		"linalg_cholesky":  func() (*ts.Tensor, error) { return good.LinalgCholesky(false, false) },
		"linalg_solve":     func() (*ts.Tensor, error) { return ts.LinalgSolve(good, good, true) },
		"fft_fft":          func() (*ts.Tensor, error) { return h.FftFft(nil, -1, "backward", false) },
		"fft_rfft":         func() (*ts.Tensor, error) { return h.FftRfft(nil, -1, "backward", false) },
		"index_copy": func() (*ts.Tensor, error) {
			return numbers(t, 4, 4).IndexCopy(0, index, h.MustNarrow(0, 0, 2, false), false)
		},
		"softmax-bf16":     func() (*ts.Tensor, error) { return tdp.Softmax(h, 1, false) },
		"log_softmax-bf16": func() (*ts.Tensor, error) { return tdp.Softmax(h, 1, true) },
		// gotch's sums name the dtype of their result.
		"sum-bf16":      func() (*ts.Tensor, error) { return h.Sum(gotch.BFloat16, false) },
		"sum-to-f32":    func() (*ts.Tensor, error) { return h.Sum(gotch.Float, false) },
		"cumsum-bf16":   func() (*ts.Tensor, error) { return h.Cumsum(0, gotch.BFloat16, false) },
		"cumsum-to-f32": func() (*ts.Tensor, error) { return h.Cumsum(0, gotch.Float, false) },
		"prod-bf16":     func() (*ts.Tensor, error) { return h.Prod(gotch.BFloat16, false) },
		"prod-to-f32":   func() (*ts.Tensor, error) { return h.Prod(gotch.Float, false) },
		"cumprod-bf16":  func() (*ts.Tensor, error) { return h.Cumprod(0, gotch.BFloat16, false) },
		"norm-bf16":     func() (*ts.Tensor, error) { return h.Norm(false) },
		"mm-bf16":       func() (*ts.Tensor, error) { return h.Mm(other, false) },
	}
}
