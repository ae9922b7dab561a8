package models

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	gotchnn "github.com/sugarme/gotch/nn"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// gotchModel is a model as gotch's users write them: a closure over layers on a VarStore.
func gotchModel(vs *gotchnn.VarStore) ts.ModuleT {
	root := vs.Root()
	fc1 := gotchnn.NewLinear(root.Sub("z_first"), 6, 5, gotchnn.DefaultLinearConfig())
	bn := gotchnn.BatchNorm1D(root.Sub("norm"), 5, gotchnn.DefaultBatchNormConfig())
	fc2 := gotchnn.NewLinear(root.Sub("a_last"), 5, 3, gotchnn.DefaultLinearConfig())
	model := gotchnn.NewFuncT(func(x *ts.Tensor, train bool) *ts.Tensor {
		h := fc1.ForwardT(x, train)
		n := bn.ForwardT(h, train)
		h.MustDrop()
		y := fc2.ForwardT(n, train)
		n.MustDrop()
		return y
	})
	return &model
}

// TestVarStoreModelTrains wraps a gotch model: order of names on every run, parameters apart from buffers, and training
// that changes the VarStore's own tensors.
func TestVarStoreModelTrains(t *testing.T) {
	for range 3 {
		vs := gotchnn.NewVarStore(gotch.CPU)
		m, err := FromVarStore(vs, gotchModel(vs))
		require.NoError(t, err)
		require.Equal(t, []string{"a_last.bias", "a_last.weight", "norm.bias", "norm.weight", "z_first.bias", "z_first.weight"},
			keys(m.NamedParameters()))
		require.Equal(t, []string{"norm.running_mean", "norm.running_var"}, keys(m.NamedBuffers()))
		require.Same(t, vs, m.VarStore())

		x, y := scriptData(t, 3, 8, 6)
		losses, _ := trainScript(t, m, x, y, 30)
		require.Less(t, losses[29], losses[0]*0.9)
		all := vs.Variables()
		for name, p := range m.NamedState() {
			v := all[name]
			require.Equal(t, sha(t, &v), sha(t, p), name)
		}
		require.NoError(t, m.To(gotch.CPU, gotch.Double))
		v := all["norm.weight"]
		require.Equal(t, gotch.Double, nn.Must(tdp.Describe(&v)).DType)
	}
	_, err := FromVarStore(nil, nil)
	require.ErrorIs(t, err, tdp.ErrValue)
}
