// Package data feeds training: data sets, samplers and a loader, as torch.utils.data does in Python.
//
// A [Source] knows how many samples there are, what a sample's tensors look like, and how to write sample i straight
// into its row of a batch. A [Sampler] chooses indices and their order. A [DataLoader] puts both together: it allocates
// a batch's tensors once, has the rows written in place (inline, or by goroutines that work ahead), and hands over one
// batch a step:
//
//	set, err := data.NewRandomToy(2048)
//	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{})
//	loader, err := data.NewDataLoader(set, data.Options{BatchSize: 32, Sampler: sampler})
//	defer loader.Close()
//	for epoch := range epochs {
//		sampler.SetEpoch(epoch)
//		for batch, err := range loader.All(ctx) {
//			if err != nil {
//				return err
//			}
//			step(batch.Input(), batch.Target())
//		}
//	}
//
// # Who frees a batch
//
// The loader does, when the loop asks for the next batch or ends: inside the loop body a batch is whole, after it its
// tensors are gone. [Batch.Keep] makes them the caller's. What autograd or a view still uses stays alive in any case.
// With [Options.Reuse] the memory itself is used again, so that views of an old batch change under the holder's hands.
//
// # Random numbers
//
// Orders are Python's to the bit: the samplers and the loader draw from the default generator when and what Python's
// draw, so that a model built afterwards has Python's weights too. Augmentation is seeded per sample, from a number
// that the loader draws once a pass and the sample's place in the epoch: it depends neither on the number of workers nor on
// the number of ranks, and a resumed pass repeats it exactly.
//
// # Stopping and going on
//
// [DataLoader.State] names the next batch of a running pass; a new process restores it with [DataLoader.Restore] and
// continues with that very batch, also when there are more or fewer ranks than before.
package data
