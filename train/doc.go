// Package train is the tutorial's Trainer grown up: the loop over epochs and steps that a data-parallel job runs on
// every rank, with what such jobs want around it.
//
// A [Task] is what to train: the model under DDP, its optimizer, this rank's loaders, and a [StepFunc] that computes
// the loss of a batch. [Options] say how: for how long, with which schedule, precision and clipping, what to report,
// where to save. [New] checks both, [Trainer.Run] trains:
//
//	trainer, err := train.New(train.Task[*data.Batch]{
//		Model: ddp, Optimizer: optimizer, Train: loader, Eval: test,
//		Step: train.Supervised(nn.CrossEntropyLoss{}, train.Accuracy()),
//	}, train.Options{Epochs: 10, Snapshots: train.Snapshots{Dir: "snapshots", Resume: true}})
//	if err != nil {
//		return err
//	}
//	return trainer.Run(ctx)
//
// Programs that take all that from their command line use [Flags].
//
// # A step
//
// A step of the optimizer takes Options.Accumulate batches; the gradients of all but the last are kept local by
// NoSync. Then come unscaling, clipping, the optimizer, the schedule and the average of weights. The loss stays on
// the device: only every LogEvery-th step the ranks meet, in one collective that carries the sums of all figures and
// whether a rank wants to stop. So no rank waits in a step for its device or for another rank, beside DDP's own
// reduction. Two options do: a gradient scaler reads whether gradients were infinite, as PyTorch's does (not with a
// fused optimizer on a GPU), and WeightBySamples adds up weights.
//
// Figures are means over samples and ranks, times are means over steps and ranks. On a GPU the times of forward,
// backward and optimizer are those of giving it work; where it is the slower one, the wait shows in what comes next.
// What is called communication is c10d's own measurement, taken in some of the steps: the time that the reduction of
// gradients took beyond the backward that it overlaps with.
//
// # Evaluation
//
// Every sample counts once: the loader has a [data.EvalSampler], ranks may have unequally many samples, and sums, not
// means, are added up over the ranks. All ranks evaluate with rank 0's buffers, which are those that are saved.
//
// # Snapshots and resuming
//
// A snapshot has the model, optimizer, scheduler, scaler, average of weights, the figures of the epoch so far, and of
// every rank its random numbers and its place in the data. It is a file that torch.load reads. A run that goes on
// from one, also in the middle of an epoch, ends with the bits of a run that was never stopped. Two things limit
// this: the number of ranks has to be the same (with another one the samples that are left are dealt out anew, and a
// warning says so), and with three ranks or more Gloo adds gradients up in an order that depends on DDP's buckets,
// which are cut anew in a run's second step.
//
// A job is told to stop by its context: under package launch SIGTERM, SIGINT or SIGUSR1 to any of its processes. All
// ranks finish the steps up to their next meeting, save, and return an error that matches launch.ErrResume; the
// program ends with the exit status for it, and goes on when it is started again.
//
// # Errors
//
// An error or a panic on one rank, in the step function, a callback or anywhere else, is returned by Run on that
// rank, with the epoch and step. The others learn of it by a collective that fails, or are ended by the launcher;
// none of them waits longer than the group's timeout.
package train
