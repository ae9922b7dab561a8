// Package vision has the image data sets of the tutorials: MNIST, FashionMNIST, CIFAR10, CIFAR100 and folders of images.
//
// A set is looked for under Options.Root in the places where torchvision keeps it, so that Go and Python share one
// folder. Archives are read as they are, without unpacking them by hand:
//
//	train, err := vision.CIFAR10(ctx, vision.Options{Root: "data", Transform: augment})
//	loader, err := data.NewDataLoader(train, data.Options{BatchSize: 128, Shuffle: true})
//
// A set keeps its images as bytes in memory, as they are in the files, and its transform turns them into floats while
// a batch is written. Where there is neither network nor data, Options.Synthetic makes images of the same shape that a
// model can learn to tell apart.
//
// Files are not trusted: whatever is in them, reading ends with the set or with a [FormatError] that names file and
// offset, and takes no more memory than the published files need.
package vision
