// Package tcpstore is the key-value store that PyTorch's ranks meet at (c10d's TCPStore), in plain Go: a server and a client of
// the same wire protocol, without libtorch.
//
// # Mental model
//
// One process serves, the others are clients. A key holds bytes; [Client.Get] and [Client.Wait] block until somebody has set it,
// which is all that a rendezvous needs. Python's torch.distributed.TCPStore and libtorch's C++ one talk to this server (with use_libuv or
// without), and this client talks to theirs.
//
// The launcher serves one store to the workers of each attempt and another key space, which survives attempts, to the agents; see
// [Options.Lasting] and [Server.Fresh].
package tcpstore
