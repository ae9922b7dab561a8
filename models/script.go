package models

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// The values that go into and come out of TorchScript beside *ts.Tensor, int64, float64, bool, string, []any for lists
// and nil for None.
type (
	Tuple      = tdp.Tuple      // a tuple
	NamedTuple = tdp.NamedTuple // a typing.NamedTuple, as a result
	Field      = tdp.Field      // its member
	Dict       = tdp.Dict       // a dict in its order
	Entry      = tdp.Entry      // its member
)

// ScriptModule is a TorchScript module: what torch.jit.save wrote in Python, or Save here. Its parameters and buffers have
// Python's names and order, and it trains like any other module.
//
// ForwardT's train decides for the whole module, whatever mode it was saved in; Eval on the module or on one of its
// children (see nn.NamedModules) keeps that part in evaluation.
type ScriptModule struct {
	nn.Base
	script  *tdp.Script
	class   string
	modules []*nn.Base // in the order of the tree, the root first
	flags   []bool     // what was last set
	tensors []*ts.Tensor
	norms   []*scriptNorm
}

// scriptNode is a module inside a ScriptModule. It is there for its names, its tensors and its mode.
type scriptNode struct {
	nn.Base
	class string
}

var errInner = fmt.Errorf("%w: a module inside of a TorchScript module runs only as part of it", tdp.ErrUnsupported)

// ForwardT panics: TorchScript calls its inner modules itself.
func (n *scriptNode) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	panic(&nn.Error{Path: n.Path(), Module: n.class, Err: errInner})
}

// TypeName is what Python calls the module.
func (n *scriptNode) TypeName() string { return "RecursiveScriptModule" }

// ExtraRepr names the class that was scripted.
func (n *scriptNode) ExtraRepr() string { return "original_name=" + n.class }

func (n *scriptNode) String() string { return nn.Repr(n) }

// LoadScript reads a file that torch.jit.save wrote, onto a device.
func LoadScript(path string, device gotch.Device) (*ScriptModule, error) {
	if _, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("load TorchScript: %w", err)
	}
	s, err := tdp.LoadScript(path, &device)
	if err != nil {
		return nil, fmt.Errorf("load TorchScript %s: %w", path, err)
	}
	return newScriptModule(s)
}

// ReadScript is LoadScript from a stream.
func ReadScript(r io.Reader, device gotch.Device) (*ScriptModule, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("load TorchScript: %w", err)
	}
	s, err := tdp.LoadScriptData(data, &device)
	if err != nil {
		return nil, fmt.Errorf("load TorchScript: %w", err)
	}
	return newScriptModule(s)
}

func newScriptModule(s *tdp.Script) (*ScriptModule, error) {
	entries, err := s.Tree()
	if err != nil {
		return nil, err
	}
	m := &ScriptModule{script: s, tensors: make([]*ts.Tensor, len(entries))}
	nodes := make([]nn.Module, len(entries)) // of the entries that are modules
	for i, e := range entries {
		if e.Kind == tdp.ScriptModule && e.Parent < 0 {
			m.class = e.Type
			nodes[i] = m
			m.modules = append(m.modules, &m.Base)
			continue
		}
		parent := base(nodes[e.Parent])
		switch e.Kind {
		case tdp.ScriptModule:
			n := &scriptNode{class: e.Type}
			var child nn.Module = n
			nodes[i] = n
			m.modules = append(m.modules, &n.Base)
			err = nn.Register(nodes[e.Parent], e.Name, &child)
		case tdp.ScriptParameter:
			m.tensors[i] = e.Tensor
			err = parent.RegisterParameter(e.Name, &m.tensors[i])
		case tdp.ScriptBuffer:
			m.tensors[i] = e.Tensor
			err = parent.RegisterBuffer(e.Name, &m.tensors[i], true)
		}
		if err != nil {
			return nil, fmt.Errorf("TorchScript %s: %w", m.class, err)
		}
	}
	for i := range entries {
		if nodes[i] != nil {
			m.markBatchNorm(base(nodes[i]), entries, i)
		}
	}
	return m, nil
}

// batchNorms are the classes that Python's convert_sync_batchnorm knows by their type, by the names that TorchScript
// keeps.
var batchNorms = []string{"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}

// scriptNorm is a batch norm without running statistics. TorchScript computes it in the same way in training and in
// evaluation, so it is synchronised by its weight while it trains.
type scriptNorm struct {
	module     int // in ScriptModule.modules
	weight     **ts.Tensor
	group      *tdp.ProcessGroup // to synchronise it with
	registered *tdp.ProcessGroup // what it is synchronised with now
}

func (n *scriptNorm) sync(train bool) error {
	want := n.group
	if !train {
		want = nil
	}
	if want == n.registered || *n.weight == nil {
		return nil
	}
	n.registered = want
	return tdp.RegisterSyncBatchNorm(*n.weight, want)
}

// markBatchNorm makes the module of an entry known as a batch norm, if it is one: of PyTorch's class, or of one derived
// from it, which shows by its running mean.
func (m *ScriptModule) markBatchNorm(b *nn.Base, entries []tdp.ScriptEntry, module int) {
	var mean, weight **ts.Tensor
	for i, e := range entries {
		switch {
		case e.Parent != module:
		case e.Kind == tdp.ScriptBuffer && e.Name == "running_mean":
			mean = &m.tensors[i]
		case e.Kind == tdp.ScriptParameter && e.Name == "weight":
			weight = &m.tensors[i]
		}
	}
	switch class := entries[module].Type; {
	case strings.HasPrefix(class, "InstanceNorm"):
		b.MarkBatchNorm(nn.ForeignBatchNorm{})
		return
	case mean == nil && !slices.Contains(batchNorms, class):
		return
	}
	mark := nn.ForeignBatchNorm{Prepare: keepGraphs, RunningMean: func() *ts.Tensor { return nil }}
	switch {
	case mean != nil:
		mark.RunningMean = func() *ts.Tensor { return *mean }
	case weight != nil:
		n := &scriptNorm{module: slices.Index(m.modules, b), weight: weight}
		m.norms = append(m.norms, n)
		mark.Group = &n.group
	}
	b.MarkBatchNorm(mark)
}

// keepGraphs keeps TorchScript from rewriting graphs at run time, in the whole process: it would replace batch norms by
// code in which they could not be synchronised.
func keepGraphs() error {
	_, err := tdp.ScriptOptimize(false)
	return err
}

func base(m nn.Module) *nn.Base {
	if n, ok := m.(*scriptNode); ok {
		return &n.Base
	}
	return &m.(*ScriptModule).Base
}

// Save writes a file that torch.jit.load reads, in Python as well as here. The file appears whole or not at all.
func (m *ScriptModule) Save(path string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("save TorchScript: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("save TorchScript %s: %w", path, errors.Join(err, os.Remove(f.Name())))
		}
	}()
	defer f.Close() // the name is what libtorch needs; the descriptor is for Sync
	if err = m.script.Save(f.Name()); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Chmod(0o644); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// WriteTo is Save to a stream.
func (m *ScriptModule) WriteTo(w io.Writer) (int64, error) {
	data, err := m.script.SaveData()
	if err != nil {
		return 0, fmt.Errorf("save TorchScript: %w", err)
	}
	n, err := w.Write(data)
	return int64(n), err
}

// ForwardT calls forward with one tensor and gives the one that it returns. For other inputs and outputs there is Call.
func (m *ScriptModule) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	fail := func(err error) {
		e := &nn.Error{Path: m.Path(), Module: "RecursiveScriptModule(original_name=" + m.class + ")", Err: err}
		if info, err := tdp.Describe(x); err == nil {
			e.Input = info.Shape
		}
		panic(e)
	}
	out, err := m.Call(train, x)
	if err != nil {
		fail(err)
	}
	y, ok := out.(*ts.Tensor)
	if !ok {
		DropValue(out)
		fail(fmt.Errorf("%w: forward returned a %T instead of one tensor: use Call", tdp.ErrUnsupported, out))
	}
	return y
}

// Call calls forward. Arguments and result are *ts.Tensor, int64, float64, bool, string, nil, []any, Tuple and Dict;
// arguments may also be int, slices of these, and maps from strings to tensors, whose keys go in sorted order. The result's
// tensors are the caller's: DropValue frees them all.
func (m *ScriptModule) Call(train bool, args ...any) (any, error) {
	return m.CallMethod("forward", train, args...)
}

// CallMethod is Call for another exported method.
func (m *ScriptModule) CallMethod(method string, train bool, args ...any) (any, error) {
	flags := make([]bool, len(m.modules))
	for i, b := range m.modules {
		flags[i] = train && b.Training()
	}
	if !slices.Equal(flags, m.flags) {
		if err := m.script.Train(flags); err != nil {
			return nil, err
		}
		m.flags = flags
	}
	for _, n := range m.norms {
		if err := n.sync(flags[n.module]); err != nil {
			return nil, err
		}
	}
	return m.script.Call(method, args...)
}

// DropValue frees every tensor in a result of Call.
func DropValue(v any) {
	switch v := v.(type) {
	case *ts.Tensor:
		v.MustDrop()
	case []any:
		for _, x := range v {
			DropValue(x)
		}
	case Tuple:
		for _, x := range v {
			DropValue(x)
		}
	case NamedTuple:
		for _, f := range v {
			DropValue(f.Value)
		}
	case Dict:
		for _, e := range v {
			DropValue(e.Key)
			DropValue(e.Value)
		}
	}
}

// TypeName is what Python calls the module.
func (m *ScriptModule) TypeName() string { return "RecursiveScriptModule" }

// ExtraRepr names the class that was scripted.
func (m *ScriptModule) ExtraRepr() string { return "original_name=" + m.class }

func (m *ScriptModule) String() string { return nn.Repr(m) }
