package tcpstore

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// The protocol: a client sends a command's number and its fields, the server answers some of them. Numbers are little-endian (c10d sends its
// machine's order, and runs on little-endian machines only); strings and values have a length of 8 bytes before them.
type command byte

const (
	cmdValidate command = iota // the first thing on a connection: the magic number
	cmdSet
	cmdCompareSet
	cmdGet
	cmdAdd
	cmdCheck
	cmdWait
	cmdNumKeys
	cmdDelete
	cmdAppend
	cmdMultiGet
	cmdMultiSet
	cmdCancelWait
	cmdPing
	cmdQueuePush
	cmdQueuePop
	cmdQueueLen
	cmdListKeys
)

const magic uint32 = 0x3C85F7CE

const (
	replyReady    byte = 0
	replyNotReady byte = 1

	replyStopWaiting  byte = 0
	replyWaitCanceled byte = 1
)

// keyPrefix is put before every key by c10d's clients.
const keyPrefix = "/"

// Bounds on what a peer may send.
const (
	maxKey     = 64 << 10
	maxPayload = 256 << 20
	maxKeys    = 128 << 10
)

// ProtocolError is something that c10d's protocol does not have. The connection is of no use after it.
type ProtocolError struct{ What string }

func (e *ProtocolError) Error() string { return "tcpstore: " + e.What }

func protocolf(format string, args ...any) error {
	return &ProtocolError{fmt.Sprintf(format, args...)}
}

// reader reads fields and keeps the first error.
type reader struct {
	*bufio.Reader
	err error
}

func (r *reader) byte() byte {
	if r.err != nil {
		return 0
	}
	var b byte
	b, r.err = r.ReadByte()
	return b
}

func (r *reader) fixed(n int) []byte {
	var buf [8]byte
	if r.err == nil {
		_, r.err = io.ReadFull(r.Reader, buf[:n])
	}
	return buf[:n]
}

func (r *reader) uint32() uint32 { return binary.LittleEndian.Uint32(r.fixed(4)) }
func (r *reader) int64() int64   { return int64(binary.LittleEndian.Uint64(r.fixed(8))) }

func (r *reader) key() string { return string(r.bytes(maxKey, "key")) }

func (r *reader) value() []byte { return r.bytes(maxPayload, "value") }

func (r *reader) bytes(limit int64, what string) []byte {
	n := r.int64()
	if r.err != nil {
		return nil
	}
	if n < 0 || n > limit {
		r.err = protocolf("a %s of %d bytes, and at most %d are allowed", what, n, limit)
		return nil
	}
	if n <= 4096 {
		b := make([]byte, n)
		_, r.err = io.ReadFull(r.Reader, b)
		return b
	}
	// Grows with what really comes, not with what was announced.
	var b bytes.Buffer
	_, r.err = io.CopyN(&b, r.Reader, n)
	return b.Bytes()
}

func (r *reader) count() int {
	n := r.int64()
	if r.err == nil && (n < 0 || n > maxKeys) {
		r.err = protocolf("%d keys at once, and at most %d are allowed", n, maxKeys)
	}
	if r.err != nil {
		return 0
	}
	return int(n)
}

func (r *reader) keys() []string {
	n := r.count()
	var keys []string
	for range n {
		if keys = append(keys, r.key()); r.err != nil {
			return nil
		}
	}
	return keys
}

func appendUint32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }
func appendInt64(b []byte, v int64) []byte {
	return binary.LittleEndian.AppendUint64(b, uint64(v))
}
func appendBytes[T ~string | ~[]byte](b []byte, v T) []byte {
	return append(appendInt64(b, int64(len(v))), v...)
}

func appendKey(b []byte, key string) []byte {
	b = appendInt64(b, int64(len(keyPrefix)+len(key)))
	return append(append(b, keyPrefix...), key...)
}
