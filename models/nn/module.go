package nn

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Module is a node of a model's tree: a layer, a container, or a model. A type becomes one by embedding Base and
// having gotch's ForwardT.
//
// ForwardT leaves x to its caller and gives a tensor that the caller drops. It panics with an error value when it
// fails, as gotch's Must functions do; Forward and Try turn that into an error. The other methods are Base's.
type Module interface {
	ts.ModuleT

	NamedParameters() iter.Seq2[string, *ts.Tensor]
	NamedBuffers() iter.Seq2[string, *ts.Tensor]
	NamedState() iter.Seq2[string, *ts.Tensor]
	ModuleVersions() iter.Seq2[string, int64]
	Parameters() iter.Seq[*ts.Tensor]
	Buffers() iter.Seq[*ts.Tensor]
	Path() string
	Train()
	Eval()
	Training() bool
	Freeze() error
	Unfreeze() error
	ZeroGrad() error
	To(device gotch.Device, dtype gotch.DType) error
	Drop()

	base() *Base
}

// Base holds what a module registered, in the order of registration, which is the order of everything that ranks must
// agree on. Embed it by value; its zero value is ready.
type Base struct {
	_        noCopy
	params   []parameter
	buffers  []buffer
	children []child
	version  int
	eval     bool
	norm     *BatchNorm        // the module itself, where it is one
	foreign  *ForeignBatchNorm // where MarkBatchNorm was called

	// Where the module was last registered: for messages only.
	parent *Base
	name   string
}

// noCopy makes go vet tell of copies of a module: what it registered are the fields of the original.
type noCopy struct{}

func (*noCopy) Lock()   {}
func (*noCopy) Unlock() {}

type parameter struct {
	name   string
	slot   **ts.Tensor
	sparse bool
}

type buffer struct {
	name       string
	slot       **ts.Tensor
	persistent bool
}

type child struct {
	name string
	get  func() Module // nil where there is none
}

func (b *Base) base() *Base { return b }

// RegisterParameter makes *slot a parameter of the module under a name. The slot, usually a field of the module, is
// read each time: assigning another tensor to it replaces (or ties) the parameter, and nil means that there is none. It
// trains if the tensor requires a gradient, which Trainable sees to.
func (b *Base) RegisterParameter(name string, slot **ts.Tensor) error {
	if err := b.free("parameter", name); err != nil {
		return err
	}
	b.params = append(b.params, parameter{name: name, slot: slot})
	return nil
}

// Trainable marks t as a leaf that requires a gradient, as wrapping it in Python's nn.Parameter does, and gives it.
func Trainable(t *ts.Tensor) (*ts.Tensor, error) { return t, tdp.SetRequiresGrad(t, true) }

// RegisterBuffer makes *slot a buffer: state that is saved and moved with the module, but not trained. A buffer that
// is not persistent stays out of the state dict.
func (b *Base) RegisterBuffer(name string, slot **ts.Tensor, persistent bool) error {
	if err := b.free("buffer", name); err != nil {
		return err
	}
	b.buffers = append(b.buffers, buffer{name, slot, persistent})
	return nil
}

// RegisterForeign makes a tensor of a model that is built otherwise a parameter or a buffer, under its whole path there,
// dots included.
func (b *Base) RegisterForeign(path string, slot **ts.Tensor, isBuffer bool) error {
	if path == "" {
		return fmt.Errorf("%w: a tensor needs a name", ErrTree)
	}
	if err := b.taken("tensor", path); err != nil {
		return err
	}
	if isBuffer {
		b.buffers = append(b.buffers, buffer{path, slot, true})
	} else {
		b.params = append(b.params, parameter{name: path, slot: slot})
	}
	return nil
}

// Register makes *slot a child of a module under a name. The slot is read each time: assigning another module to the
// field replaces the child, and nil means that there is none.
func Register[M Module](parent Module, name string, slot *M) error {
	var none M
	return parent.base().adopt(name, func() Module {
		if any(*slot) == any(none) {
			return nil
		}
		return *slot
	})
}

func (b *Base) adopt(name string, get func() Module) error {
	if err := b.free("module", name); err != nil {
		return err
	}
	b.children = append(b.children, child{name, get})
	if m := get(); m != nil {
		if m.base().holds(b) {
			b.children = b.children[:len(b.children)-1]
			return fmt.Errorf("%w: registering %q would make the module its own descendant", ErrTree, name)
		}
		m.base().parent, m.base().name = b, name
	}
	return nil
}

// ErrTree: a module was registered wrongly, for instance under a name that is taken.
var ErrTree = errors.New("module tree")

func (b *Base) free(what, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: a %s needs a name", ErrTree, what)
	case strings.Contains(name, "."):
		return fmt.Errorf("%w: the %s name %q must not contain a dot: dots separate the levels of the tree", ErrTree, what, name)
	}
	return b.taken(what, name)
}

func (b *Base) taken(what, name string) error {
	taken := ""
	switch {
	case slices.ContainsFunc(b.params, func(p parameter) bool { return p.name == name }):
		taken = "parameter"
	case slices.ContainsFunc(b.buffers, func(p buffer) bool { return p.name == name }):
		taken = "buffer"
	case slices.ContainsFunc(b.children, func(p child) bool { return p.name == name }):
		taken = "module"
	default:
		return nil
	}
	return fmt.Errorf("%w: the %s name %q is taken by a %s of the same module; choose another name", ErrTree, what, name, taken)
}

// SetVersion sets the version of the module's state dict layout, which files carry. It is 1 where nothing else is set.
func (b *Base) SetVersion(v int) { b.version = v }

// Path is where the module stands in the tree that it was registered in, such as "layer1.0.conv1"; "" for a root. A
// module that was registered in several places answers with the last.
func (b *Base) Path() string {
	var names []string
	for p := b; p.parent != nil && len(names) < 1000; p = p.parent {
		names = append(names, p.name)
	}
	slices.Reverse(names)
	return strings.Join(names, ".")
}

func (b *Base) holds(other *Base) bool {
	if b == other {
		return true
	}
	for _, c := range b.modules() {
		if c.base().holds(other) {
			return true
		}
	}
	return false
}

// modules gives the children that are there.
func (b *Base) modules() iter.Seq2[string, Module] {
	return func(yield func(string, Module) bool) {
		for _, c := range b.children {
			m := c.get()
			if m == nil {
				continue
			}
			if k := m.base(); k.parent == nil { // assigned to the slot later
				k.parent, k.name = b, c.name
			}
			if !yield(c.name, m) {
				return
			}
		}
	}
}

func join(prefix, name string) string {
	if prefix == "" {
		return name
	}
	return prefix + "." + name
}

// walk visits b and everything below it, parents first. seen may be nil: then a module that stands in several places
// is visited in each.
func (b *Base) walk(prefix string, seen map[*Base]bool, yield func(string, *Base) bool) bool {
	if seen != nil {
		if seen[b] {
			return true
		}
		seen[b] = true
	}
	if !yield(prefix, b) {
		return false
	}
	for name, m := range b.modules() {
		if !m.base().walk(join(prefix, name), seen, yield) {
			return false
		}
	}
	return true
}

// NamedModules gives m and all modules below it with their paths, parents first, each once: Python's named_modules.
func NamedModules(m Module) iter.Seq2[string, Module] {
	return func(yield func(string, Module) bool) {
		seen := map[*Base]bool{}
		var visit func(string, Module) bool
		visit = func(prefix string, m Module) bool {
			if seen[m.base()] {
				return true
			}
			seen[m.base()] = true
			if !yield(prefix, m) {
				return false
			}
			for name, c := range m.base().modules() {
				if !visit(join(prefix, name), c) {
					return false
				}
			}
			return true
		}
		visit("", m)
	}
}

// Children gives the direct children of m with their names.
func Children(m Module) iter.Seq2[string, Module] { return m.base().modules() }

// Apply calls fn with every module of the tree, children before their parents, as Python's Module.apply does. It is
// the place for an initialisation of one's own. It ends at the first error.
func Apply(m Module, fn func(Module) error) error {
	for _, c := range m.base().modules() {
		if err := Apply(c, fn); err != nil {
			return err
		}
	}
	return fn(m)
}

// identity tells tensors apart by what they are, not by their handle, so that shared weights count once.
type identity struct {
	handles map[*ts.Tensor]bool
	impls   map[uint64]bool
}

func newIdentity() identity {
	return identity{handles: map[*ts.Tensor]bool{}, impls: map[uint64]bool{}}
}

// first tells whether t was not there before.
func (s identity) first(t *ts.Tensor) bool {
	if s.handles[t] {
		return false
	}
	s.handles[t] = true
	return firstImpl(s.impls, t)
}

func firstImpl(seen map[uint64]bool, t *ts.Tensor) bool {
	impl := tdp.Impl(t)
	if !seen[impl] {
		seen[impl] = true
		return true
	}
	// An undefined tensor is nobody's twin; whoever uses it gets the error.
	_, err := tdp.Describe(t)
	return err != nil
}

// NamedParameters gives every parameter of the tree with its path: in the order of registration, parents first, and a
// parameter that is shared by several modules once, under its first name. It is Python's named_parameters.
func (b *Base) NamedParameters() iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		seen := newIdentity()
		b.walk("", map[*Base]bool{}, func(prefix string, b *Base) bool {
			for _, p := range b.params {
				if t := *p.slot; t != nil && seen.first(t) && !yield(join(prefix, p.name), t) {
					return false
				}
			}
			return true
		})
	}
}

// NamedBuffers gives every buffer of the tree with its path, in the order of NamedParameters.
func (b *Base) NamedBuffers() iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		seen := newIdentity()
		b.walk("", map[*Base]bool{}, func(prefix string, b *Base) bool {
			for _, p := range b.buffers {
				if t := *p.slot; t != nil && seen.first(t) && !yield(join(prefix, p.name), t) {
					return false
				}
			}
			return true
		})
	}
}

// SparseParameters names the parameters whose gradients are sparse, which DDP must know before the first of them.
func (b *Base) SparseParameters() iter.Seq[string] {
	return func(yield func(string) bool) {
		seen := newIdentity()
		b.walk("", map[*Base]bool{}, func(prefix string, b *Base) bool {
			for _, p := range b.params {
				if t := *p.slot; t != nil && seen.first(t) && p.sparse && !yield(join(prefix, p.name)) {
					return false
				}
			}
			return true
		})
	}
}

// ForeignBatchNorm is a batch norm that something else computes, such as TorchScript. Its zero value says that a module
// is none, whatever its buffers are called.
type ForeignBatchNorm struct {
	RunningMean func() *ts.Tensor  // nil where the layer keeps none
	Group       **tdp.ProcessGroup // see BareBatchNorms; nil where the layer cannot be synchronised without running mean
	Prepare     func() error       // called before the layer is synchronised; may be nil
}

// MarkBatchNorm says that the module is a batch norm that something else computes.
func (b *Base) MarkBatchNorm(n ForeignBatchNorm) { b.foreign = &n }

// BatchNormKeys gives the path of every batch norm with the tensor by which a synchronised batch norm knows its calls:
// its running mean, or nil where it keeps none. Modules that are neither of this package nor marked are known by their
// buffer running_mean.
func (b *Base) BatchNormKeys() iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		b.walk("", map[*Base]bool{}, func(prefix string, b *Base) bool {
			switch {
			case b.foreign != nil:
				return b.foreign.RunningMean == nil || yield(prefix, b.foreign.RunningMean())
			case b.norm != nil:
				return yield(prefix, b.norm.RunningMean)
			}
			for _, p := range b.buffers {
				path := join(prefix, p.name)
				if layer, leaf := split(path); leaf == "running_mean" && *p.slot != nil && !yield(layer, *p.slot) {
					return false
				}
			}
			return true
		})
	}
}

// BareBatchNorms gives the batch norms without running statistics, each with the place of its group: while a group is
// there, the layer normalises over the batches of all its ranks in training.
func (b *Base) BareBatchNorms() iter.Seq2[string, **tdp.ProcessGroup] {
	return func(yield func(string, **tdp.ProcessGroup) bool) {
		b.walk("", map[*Base]bool{}, func(prefix string, b *Base) bool {
			switch {
			case b.foreign != nil && b.foreign.Group != nil && b.foreign.RunningMean() == nil:
				return yield(prefix, b.foreign.Group)
			case b.norm != nil && b.norm.RunningMean == nil:
				return yield(prefix, &b.norm.group)
			}
			return true
		})
	}
}

// PrepareSyncBatchNorm calls what MarkBatchNorm was given in this tree. A conversion to SyncBatchNorm begins with it.
func (b *Base) PrepareSyncBatchNorm() (err error) {
	b.walk("", map[*Base]bool{}, func(prefix string, b *Base) bool {
		if b.foreign != nil && b.foreign.Prepare != nil {
			if err = b.foreign.Prepare(); err != nil {
				err = fmt.Errorf("%s: %w", prefix, err)
			}
		}
		return err == nil
	})
	return err
}

func split(path string) (module, leaf string) {
	i := strings.LastIndexByte(path, '.')
	return path[:max(i, 0)], path[i+1:]
}

// Parameters gives the parameters without their names.
func (b *Base) Parameters() iter.Seq[*ts.Tensor] { return values(b.NamedParameters()) }

// Buffers gives the buffers without their names.
//
// DDP asks for them in every step, so it goes without what names cost.
func (b *Base) Buffers() iter.Seq[*ts.Tensor] {
	return func(yield func(*ts.Tensor) bool) { b.eachBuffer(map[uint64]bool{}, yield) }
}

func (b *Base) eachBuffer(seen map[uint64]bool, yield func(*ts.Tensor) bool) bool {
	for _, p := range b.buffers {
		if t := *p.slot; t != nil && firstImpl(seen, t) && !yield(t) {
			return false
		}
	}
	for _, m := range b.modules() {
		if !m.base().eachBuffer(seen, yield) {
			return false
		}
	}
	return true
}

func values[K, V any](s iter.Seq2[K, V]) iter.Seq[V] {
	return func(yield func(V) bool) {
		for _, v := range s {
			if !yield(v) {
				return
			}
		}
	}
}

// Train lets the module and all below it train where ForwardT is called with train; they do unless Eval was called.
func (b *Base) Train() { b.setEval(false) }

// Eval keeps the module and all below it in evaluation, even where ForwardT is called with train: the way to freeze
// the statistics of some batch norms while the rest of a model trains.
func (b *Base) Eval() { b.setEval(true) }

// Training tells whether the module trains when ForwardT is called with train.
func (b *Base) Training() bool { return !b.eval }

func (b *Base) setEval(on bool) {
	b.walk("", map[*Base]bool{}, func(_ string, b *Base) bool { b.eval = on; return true })
}

// Freeze stops the training of every parameter of the tree; DDP and optimizers made afterwards leave them alone.
func (b *Base) Freeze() error { return b.requiresGrad(false) }

// Unfreeze makes every parameter of the tree trainable again.
func (b *Base) Unfreeze() error { return b.requiresGrad(true) }

func (b *Base) requiresGrad(on bool) error {
	for name, p := range b.NamedParameters() {
		if err := tdp.SetRequiresGrad(p, on); err != nil {
			return fmt.Errorf("parameter %s: %w", join(b.Path(), name), err)
		}
	}
	return nil
}

// Drop frees every parameter and buffer of the tree. It is for models that are no longer needed while the program runs
// on; afterwards the module must not be used. What is not dropped is freed when Go's collector finds it.
func (b *Base) Drop() {
	handles := map[*ts.Tensor]bool{}
	drop := func(slot **ts.Tensor) {
		if t := *slot; t != nil && !handles[t] {
			handles[t] = true
			t.MustDrop()
		}
		*slot = nil
	}
	b.walk("", map[*Base]bool{}, func(_ string, b *Base) bool {
		for _, p := range b.params {
			drop(p.slot)
		}
		for _, p := range b.buffers {
			drop(p.slot)
		}
		return true
	})
}

// ZeroGrad drops the gradients of every parameter, as Python's Module.zero_grad does.
func (b *Base) ZeroGrad() error {
	for name, p := range b.NamedParameters() {
		if err := tdp.SetGrad(p, nil); err != nil {
			return fmt.Errorf("parameter %s: %w", join(b.Path(), name), err)
		}
	}
	return nil
}
