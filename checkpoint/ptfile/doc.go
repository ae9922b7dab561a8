// Package ptfile reads and writes the files of torch.save without libtorch: tensors stay descriptions of where their
// bytes lie.
//
// A file is one Python value (see package pickle) whose tensors refer to storages, each a record of a zip archive.
// Several tensors may view one storage. [Open] reads the value, and the bytes of a storage only when they are asked
// for; [Write] streams them. Package checkpoint turns the descriptions into tensors and back.
package ptfile
