package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"math"
	"strings"
	"time"
	"unsafe"
)

// Store is c10d::Store. Close it when no process group uses it any more.
type Store struct{ h *C.tdp_store }

// TCPStoreOptions are c10d's, with its meaning of each.
type TCPStoreOptions struct {
	Host           string
	Port           uint16
	Server         bool
	Workers        int // < 0: not known
	WaitForWorkers bool
	Timeout        time.Duration
	MultiTenant    bool
	ListenFD       int // >= 0: a bound socket, taken over; < 0: bind Port
}

func millis(d time.Duration) C.int64_t {
	if d <= 0 {
		return -1
	}
	return C.int64_t(max(1, min(d.Milliseconds(), math.MaxInt32)))
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// cstrings copies strings to C memory. Call the second result when done.
func cstrings(s []string) (**C.char, func()) {
	if len(s) == 0 {
		return nil, func() {}
	}
	list := make([]*C.char, len(s))
	for i, x := range s {
		list[i] = C.CString(x)
	}
	return &list[0], func() {
		for _, c := range list {
			C.free(unsafe.Pointer(c))
		}
	}
}

func newStore(h *C.tdp_store, err error) (*Store, error) {
	if err != nil {
		return nil, err
	}
	return &Store{h: h}, nil
}

// NewTCPStore connects to a TCP store, and serves it when o.Server is set.
func NewTCPStore(o TCPStoreOptions) (*Store, error) {
	if err := Ready(); err != nil {
		return nil, err
	}
	host := C.CString(o.Host)
	defer C.free(unsafe.Pointer(host))
	var h *C.tdp_store
	rec := C.tdp_store_new_tcp(host, C.uint16_t(o.Port), flag(o.Server), C.int64_t(o.Workers), flag(o.WaitForWorkers),
		millis(o.Timeout), flag(o.MultiTenant), C.int32_t(o.ListenFD), &h)
	return newStore(h, done("TCP store", rec))
}

// NewFileStore keeps the keys in a file that all ranks see. workers <= 0: not known.
func NewFileStore(path string, workers int) (*Store, error) {
	if err := Ready(); err != nil {
		return nil, err
	}
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var h *C.tdp_store
	rec := C.tdp_store_new_file(p, C.int32_t(workers), &h)
	return newStore(h, done("file store", rec))
}

// NewHashStore keeps the keys in this process.
func NewHashStore() (*Store, error) {
	if err := Ready(); err != nil {
		return nil, err
	}
	var h *C.tdp_store
	rec := C.tdp_store_new_hash(&h)
	return newStore(h, done("hash store", rec))
}

// Prefix gives a store whose keys are s's under "prefix/". Each is closed on its own.
func (s *Store) Prefix(prefix string) (*Store, error) {
	p := C.CString(prefix)
	defer C.free(unsafe.Pointer(p))
	var h *C.tdp_store
	rec := C.tdp_store_new_prefix(p, s.h, &h)
	return newStore(h, done("prefix store", rec, s))
}

// Close lets go of the store. Process groups made with it keep it alive for themselves.
func (s *Store) Close() error {
	h := s.h
	s.h = nil
	return done("close store", C.tdp_store_free(h), s)
}

// Port is the port of a TCP store.
func (s *Store) Port() (int, error) {
	var out C.uint16_t
	rec := C.tdp_store_port(s.h, &out)
	return int(out), done("store port", rec, s)
}

// SetTimeout bounds Get and the operations of process groups on the store.
func (s *Store) SetTimeout(d time.Duration) error {
	return done("store timeout", C.tdp_store_set_timeout(s.h, millis(d)), s)
}

// Set writes a value.
func (s *Store) Set(key string, value []byte) error {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	return done("store set "+key, C.tdp_store_set(s.h, k, ptr(value), C.uint64_t(len(value))), s)
}

func take(b *C.tdp_bytes) []byte {
	out := C.GoBytes(unsafe.Pointer(b.data), C.int(b.size))
	C.tdp_bytes_free(b)
	return out
}

// Get waits for a key, at most the store's timeout, and gives its value.
func (s *Store) Get(key string) ([]byte, error) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	var b C.tdp_bytes
	if err := done("store get "+key, C.tdp_store_get(s.h, k, &b), s); err != nil {
		return nil, err
	}
	return take(&b), nil
}

// MultiGet gives the values of keys in one round trip where the store can. It waits for each.
func (s *Store) MultiGet(keys []string) ([][]byte, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	list, free := cstrings(keys)
	defer free()
	values := make([]C.tdp_bytes, len(keys))
	rec := C.tdp_store_multi_get(s.h, list, C.int32_t(len(keys)), &values[0])
	if err := done("store multi_get", rec, s); err != nil {
		return nil, err
	}
	out := make([][]byte, len(keys))
	for i := range values {
		out[i] = take(&values[i])
	}
	return out, nil
}

// Add adds to a counter, which starts at 0, and gives the new value.
func (s *Store) Add(key string, delta int64) (int64, error) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	var out C.int64_t
	rec := C.tdp_store_add(s.h, k, C.int64_t(delta), &out)
	return int64(out), done("store add "+key, rec, s)
}

// CompareSet writes desired where the value is expected, or where there is none and expected is empty. It gives the
// value that stands afterwards.
func (s *Store) CompareSet(key string, expected, desired []byte) ([]byte, error) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	var b C.tdp_bytes
	rec := C.tdp_store_compare_set(s.h, k, ptr(expected), C.uint64_t(len(expected)), ptr(desired), C.uint64_t(len(desired)), &b)
	if err := done("store compare_set "+key, rec, s); err != nil {
		return nil, err
	}
	return take(&b), nil
}

// Check tells whether all keys are there.
func (s *Store) Check(keys ...string) (bool, error) {
	list, free := cstrings(keys)
	defer free()
	var out C.int32_t
	rec := C.tdp_store_check(s.h, list, C.int32_t(len(keys)), &out)
	return out != 0, done("store check", rec, s)
}

// Wait blocks until all keys are there, at most d.
func (s *Store) Wait(d time.Duration, keys ...string) error {
	list, free := cstrings(keys)
	defer free()
	return done("store wait", C.tdp_store_wait(s.h, list, C.int32_t(len(keys)), millis(d)), s)
}

// Delete removes a key and tells whether it was there.
func (s *Store) Delete(key string) (bool, error) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	var out C.int32_t
	rec := C.tdp_store_delete(s.h, k, &out)
	return out != 0, done("store delete "+key, rec, s)
}

// NumKeys counts the keys.
func (s *Store) NumKeys() (int64, error) {
	var out C.int64_t
	rec := C.tdp_store_num_keys(s.h, &out)
	return int64(out), done("store num_keys", rec, s)
}

// Clone gives a second connection to the same keys.
func (s *Store) Clone() (*Store, error) {
	var h *C.tdp_store
	rec := C.tdp_store_clone(s.h, &h)
	return newStore(h, done("clone store", rec, s))
}

// MultiSet writes many keys in one round trip where the store can.
func (s *Store) MultiSet(keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return &Error{Op: "store multi_set", Message: "as many values as keys are needed", kind: ErrValue}
	}
	if len(keys) == 0 {
		return nil
	}
	list, free := cstrings(keys)
	defer free()
	data := make([]*C.char, len(values))
	sizes := make([]C.uint64_t, len(values))
	for i, v := range values {
		data[i] = (*C.char)(C.CBytes(v))
		sizes[i] = C.uint64_t(len(v))
	}
	defer func() {
		for _, d := range data {
			C.free(unsafe.Pointer(d))
		}
	}()
	return done("store multi_set", C.tdp_store_multi_set(s.h, list, &data[0], &sizes[0], C.int32_t(len(keys))), s)
}

// Append writes value behind what the key has.
func (s *Store) Append(key string, value []byte) error {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	return done("store append "+key, C.tdp_store_append(s.h, k, ptr(value), C.uint64_t(len(value))), s)
}

// QueuePush puts a value at the end of a queue.
func (s *Store) QueuePush(key string, value []byte) error {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	return done("store queue_push "+key, C.tdp_store_queue_push(s.h, k, ptr(value), C.uint64_t(len(value))), s)
}

// QueuePop takes the first value of a queue. With block it waits for one, at most the store's timeout.
func (s *Store) QueuePop(key string, block bool) ([]byte, error) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	var b C.tdp_bytes
	if err := done("store queue_pop "+key, C.tdp_store_queue_pop(s.h, k, flag(block), &b), s); err != nil {
		return nil, err
	}
	return take(&b), nil
}

// QueueLen is the number of values in a queue.
func (s *Store) QueueLen(key string) (int64, error) {
	k := C.CString(key)
	defer C.free(unsafe.Pointer(k))
	var out C.int64_t
	rec := C.tdp_store_queue_len(s.h, k, &out)
	return int64(out), done("store queue_len "+key, rec, s)
}

// ListKeys gives all keys, in no order.
func (s *Store) ListKeys() ([]string, error) {
	var b C.tdp_bytes
	if err := done("store list_keys", C.tdp_store_list_keys(s.h, &b), s); err != nil {
		return nil, err
	}
	text := string(take(&b))
	if text == "" {
		return nil, nil
	}
	return strings.Split(strings.TrimSuffix(text, "\x00"), "\x00"), nil
}
