// Package transforms turns decoded images into the numbers a model trains on, as torchvision.transforms does.
//
// A [Pipeline] is a list of transforms on bytes, then [ToTensor], then transforms on floats:
//
//	p, err := transforms.Compose(
//		transforms.RandomCrop{Height: 32, Padding: 4},
//		transforms.RandomHorizontalFlip{},
//		transforms.ToTensor{},
//		transforms.Normalize{Mean: []float64{0.4914, 0.4822, 0.4465}, Std: []float64{0.2470, 0.2435, 0.2616}},
//	)
//
// Cropping, padding and flipping move no pixels: they only say which part of the image is read and in which direction.
// ToTensor and Normalize become one table of 256 floats a channel. The usual chain is so a single walk over the image
// that writes straight into the batch's memory.
//
// Without randomness the numbers are torchvision's on PIL images, to the last bit, resizing (with Pillow 13) included. Decoded JPEG files may differ in the last bits, since decoders do.
package transforms
