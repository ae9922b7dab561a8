// Package nn builds models on gotch's tensors that are torch.nn's to the bit: the same names, the same order, and after
// the same seed the same weights.
//
// # A tree of modules
//
// A [Module] is a layer, a container or a model. A type becomes one by embedding [Base], registering what it owns in the
// order in which Python would, and having gotch's ForwardT:
//
//	type Net struct {
//		nn.Base
//		FC1, FC2 nn.Module
//	}
//
//	func NewNet() (*Net, error) {
//		return nn.Try(func() *Net {
//			n := &Net{
//				FC1: nn.Must(nn.NewLinear(784, 256, nn.LinearOptions{})),
//				FC2: nn.Must(nn.NewLinear(256, 10, nn.LinearOptions{})),
//			}
//			nn.Check(nn.Register(n, "fc1", &n.FC1))
//			nn.Check(nn.Register(n, "fc2", &n.FC2))
//			return n
//		})
//	}
//
//	func (n *Net) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
//		return nn.Run(x, train && n.Training(), n.FC1, nn.NewReLU(), n.FC2)
//	}
//
// The order of registration is the order of [Base.NamedParameters], of the state dict, and of the buckets that DDP cuts.
// What is registered is the field, not its value: assigning another layer to n.FC2 replaces it in the tree, and
// assigning one layer's weight to another's ties them. Shared weights count once.
//
// # Training and evaluation
//
// train is an argument of each forward. [Base.Eval] keeps a part of the tree in evaluation all the same, which freezes
// the statistics of its batch norms; [Base.Freeze] freezes weights. [Evaluate] runs a forward in evaluation that
// autograd does not see.
//
// # Who frees what
//
// A forward leaves its input to the caller and gives a tensor that the caller drops; what lies between is dropped as
// soon as the next layer has it, and autograd keeps what the backward needs. Parameters live as long as their module is
// referenced.
//
// # Errors
//
// Constructors give errors. A forward has none to give, as gotch's interfaces have it, and panics with an error value,
// such as an [Error] that names the layer's path and both shapes; [Forward] and [Try] give it back as an error.
//
// # One thread
//
// Autograd numbers operations by the thread they ran on, and a backward runs in the order of these numbers. A training loop
// that is to give the same bits each time keeps to one thread, with runtime.LockOSThread; DDP's ranks do.
package nn
