// Package tdp is the cgo side of csrc/tdp: the only package of this module that calls into C.
//
// It adds nothing to the C ABI but Go types, Go errors and lifetimes: what a call uses stays alive until the call
// returned. Policy (defaults, names, environment variables) lives in the packages above it.
package tdp
