package torchddp

import (
	"fmt"
	"iter"
	"strings"
	"sync"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch/ts"
)

// wrapped knows the parameters that a DDP looks after.
var wrapped = &wrappedSet{by: map[uint64]*DDP{}}

type wrappedSet struct {
	mu sync.Mutex
	by map[uint64]*DDP // by identity of the tensor
}

func (w *wrappedSet) add(d *DDP) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range d.params {
		w.by[tdp.Impl(p.Tensor)] = d
	}
}

func (w *wrappedSet) remove(d *DDP) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k, v := range w.by {
		if v == d {
			delete(w.by, k)
		}
	}
}

func (w *wrappedSet) has(t *ts.Tensor) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.by[tdp.Impl(t)] != nil
}

// BatchNormModule is a model that can name its batch norm layers, each with the tensor by which its calls are known:
// its running mean, or nil where it keeps none. Models that cannot are known by the names of their buffers,
// "….running_mean".
type BatchNormModule interface {
	BatchNormKeys() iter.Seq2[string, *ts.Tensor]
}

// bareNorms is a model that can name its batch norm layers without running statistics, each with the place of its
// group: such layers see to their synchronisation themselves, as only they know whether they train.
type bareNorms interface {
	BareBatchNorms() iter.Seq2[string, **tdp.ProcessGroup]
}

// preparer is a model that has to be told before its layers are synchronised: TorchScript's optimizer would go round
// them.
type preparer interface{ PrepareSyncBatchNorm() error }

// batchNormLayers finds a model's layers.
func batchNormLayers(module Module) []Named {
	if m, ok := module.(BatchNormModule); ok {
		return collect(m.BatchNormKeys())
	}
	var layers []Named
	for name, t := range module.NamedBuffers() {
		if path, ok := strings.CutSuffix(name, "running_mean"); ok {
			layers = append(layers, Named{strings.TrimSuffix(path, "."), t})
		}
	}
	return layers
}

func collect(seq iter.Seq2[string, *ts.Tensor]) (list []Named) {
	for name, t := range seq {
		list = append(list, Named{name, t})
	}
	return list
}

// ConvertSyncBatchNorm makes every batch norm layer of a model normalise over the batches of all the group's ranks in
// training, on CPU and CUDA alike. The model stays the same object, with the same parameters and names; convert it
// before NewDDP and after it was moved to its device. It tells how many layers there were.
func ConvertSyncBatchNorm(module Module, pg *ProcessGroup) (layers int, err error) {
	if pg == nil {
		return 0, valueErrorf("convert_sync_batchnorm: the process group is nil")
	}
	return convert(module, pg)
}

// RevertSyncBatchNorm makes them ordinary batch norm again.
func RevertSyncBatchNorm(module Module) (layers int, err error) { return convert(module, nil) }

func convert(module Module, pg *ProcessGroup) (int, error) {
	const op = "convert_sync_batchnorm"
	if _, ok := module.(*DDP); ok {
		return 0, valueErrorf("%s: the model is already wrapped in DDP: convert it first, then wrap it", op)
	}
	for name, t := range module.NamedParameters() {
		if wrapped.has(t) {
			return 0, valueErrorf("%s: the model's %q is already wrapped in DDP: convert the model first, then wrap it", op, name)
		}
	}
	layers := batchNormLayers(module)
	bare := map[string]**tdp.ProcessGroup{}
	if m, ok := module.(bareNorms); ok {
		for name, group := range m.BareBatchNorms() {
			bare[name] = group
		}
	}
	for _, l := range layers {
		if l.Tensor == nil && bare[l.Name] == nil {
			return 0, valueErrorf("%s: the layer %q has neither running statistics nor weights by which its calls could "+
				"be known: make it with affine=True or track_running_stats=True", op, l.Name)
		}
	}
	register := func(h *tdp.ProcessGroup) error {
		for _, l := range layers {
			if l.Tensor == nil {
				*bare[l.Name] = h
			} else if err := tdp.RegisterSyncBatchNorm(l.Tensor, h); err != nil {
				return fmt.Errorf("%s: %w", l.Name, err)
			}
		}
		return nil
	}
	if pg == nil || pg.size == 1 { // one rank alone is ordinary batch norm, with its own errors
		return len(layers), register(nil)
	}
	if m, ok := module.(preparer); ok {
		if err := m.PrepareSyncBatchNorm(); err != nil {
			return 0, fmt.Errorf("%s: %w", op, err)
		}
	}
	return len(layers), pg.run(op, register)
}

// hasSyncBatchNorm is for the logging data.
func hasSyncBatchNorm(module Module) bool {
	for _, l := range batchNormLayers(module) {
		if l.Tensor != nil && tdp.IsSyncBatchNorm(l.Tensor) {
			return true
		}
	}
	if m, ok := module.(bareNorms); ok {
		for _, group := range m.BareBatchNorms() {
			if *group != nil {
				return true
			}
		}
	}
	return false
}
