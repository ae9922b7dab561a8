#!/bin/bash
# Builds the programs into a folder that runs on any Linux of this one's age or younger: programs, and in lib/ the
# shared libraries of libtorch that they load. The images are made by it; it is of use without them, too.
#
#   docker/bundle.sh [--flavor cpu|cuda] FOLDER
set -euo pipefail

die() { echo "bundle.sh: $*" >&2; exit 2; }
usage='usage: docker/bundle.sh [--flavor cpu|cuda] FOLDER'

flavor=cpu
if [ "${1-}" = --flavor ]; then
	[ $# -ge 2 ] || die "$usage"
	flavor=$2
	shift 2
fi
[ $# = 1 ] || die "$usage"
case $flavor in cpu | cuda) ;; *) die "--flavor must be cpu or cuda, got \"$flavor\"" ;; esac
cd "$(dirname "$0")/.."
mkdir -p "$1/lib"
out=$(cd "$1" && pwd)
[ -z "$(ls -A "$out/lib")" ] || die "$out/lib is not empty: give a new folder"

GOWORK=off go run ./cmd/goddp setup --flavor "$flavor"
eval "$(GOWORK=off go run ./cmd/goddp env --flavor "$flavor")"
# -trimpath and -s -w keep the names of this machine's folders and the symbol tables out of the programs. The tutorial's
# steps are for reading.
go list -f '{{if eq .Name "main"}}{{.ImportPath}}{{end}}' ./cmd/... | grep -v /tutorial/ |
	xargs go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$out/"

# Every library that a program or another library names and that is not the system's, under the name by which it is
# asked for.
needed() { ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// && $3 !~ /^\/(usr\/)?lib(64)?\// { print $1, $3 }' | sort -u; }
programs=$(find "$out" -maxdepth 1 -type f)
# shellcheck disable=SC2086 # a list of names
needed $programs | while read -r name path; do cp -L "$path" "$out/lib/$name"; done

if [ "$flavor" = cuda ]; then
	# These are loaded by name while a program runs: the kernels of cuDNN, the compiler of kernels and its parts.
	tree=$(dirname "$GODDP_TORCH")
	find "$tree" \( -name 'libcudnn*.so.*' -o -name 'libnvrtc*.so.*' -o -name 'libcaffe2_nvrtc.so' -o -name 'libnvJitLink.so.*' \) \
		-exec cp -Ln {} "$out/lib/" \;
	find "$out/lib" -name '*.so*' | while read -r lib; do
		needed "$lib" | while read -r name path; do [ -e "$out/lib/$name" ] || cp -L "$path" "$out/lib/$name"; done
	done
fi
chmod 755 "$out"/lib/*
# A fifth of libtorch_cpu.so is its symbol table, which only debuggers read. NVIDIA's libraries are left as they came.
strip --strip-unneeded "$out"/lib/libtorch*.so "$out/lib/libc10.so"

# The libraries must find each other beside them. The driver's are the machine's that runs them.
missing=$(ldd "$out"/lib/* | grep 'not found' | grep -v -e 'libcuda\.so' -e 'libnvidia-' | sort -u || true)
if [ -n "$missing" ]; then
	printf 'bundle.sh: libraries are missing in %s/lib:\n%s\n' "$out" "$missing" >&2
	exit 1
fi
du -sh "$out" | sed 's/\t.*//; s/^/bundle.sh: /; s/$/ in all/'
