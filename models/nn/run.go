package nn

import (
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Run passes x through modules one after the other and drops what lies between. Like a ForwardT it leaves x to the
// caller and panics with an error value.
func Run(x *ts.Tensor, train bool, modules ...ts.ModuleT) *ts.Tensor {
	y := x
	for _, m := range modules {
		next := m.ForwardT(y, train)
		if y != x && y != next {
			y.MustDrop()
		}
		y = next
	}
	if y == x { // no module, or ones that hand their input through
		return Must(tdp.Share(x))
	}
	return y
}
