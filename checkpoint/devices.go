package checkpoint

import (
	"github.com/sugarme/gotch"
)

// deviceCount is how many GPUs this process can use. Tests put another count in its place.
var deviceCount = func() int { return int(gotch.Cuda{}.DeviceCount()) }
