package tdp

/*
#include <limits.h>
#include <malloc.h>
#include <stdlib.h>

static int tdp_memory_is_kept;

static int tdp_unset(const char *name) {
	const char *value = getenv(name);
	return value == NULL || *value == 0;
}

// The C library keeps the memory of freed tensors for the next ones. By itself it gives much of it back to the kernel, which
// clears it page by page when it is wanted again: 32,000 pages in each step of ResNet-50, more than in Python, since what
// threads other than the first allocate comes in pieces of 64 MiB that are given back whole. With one arena that never
// shrinks there are hardly any.
//
// It has to be before there are threads, so it is for every program that has this package. Whoever has chosen by glibc's
// variables is left alone.
__attribute__((constructor)) static void tdp_keep_memory(void) {
	if (tdp_unset("GLIBC_TUNABLES") && tdp_unset("MALLOC_ARENA_MAX") && tdp_unset("MALLOC_MMAP_THRESHOLD_") &&
	    tdp_unset("MALLOC_TRIM_THRESHOLD_"))
		tdp_memory_is_kept = mallopt(M_ARENA_MAX, 1) && mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, INT_MAX);
}

static int tdp_keeps_memory(void) { return tdp_memory_is_kept; }
*/
import "C"

// keepsMemory tells whether the memory of freed tensors stays with this process, as it does unless one of glibc's
// variables for malloc is set.
func keepsMemory() bool { return C.tdp_keeps_memory() != 0 }
