#!/bin/bash
# Builds the CPU image without a Docker engine and without a registry, and trains in it. The two base images are made
# here from Debian's packages (and this machine's Go); all else is the Dockerfile as it is.
#
#   docker/check.sh            build, check, train, tell the size
#   docker/check.sh --python   also the size of the same job's image in Python
#
# It needs root, buildah and debootstrap (apt-get install buildah debootstrap), and what `make setup` needs. Variables:
# MIRROR, the Debian mirror (default: the one this machine uses); WORK, a folder for what may be used again (default
# goddp-docker-check in /var/tmp; 3 GB, 9 GB with --python); PIP_CONF and CA_FILE, pip's configuration and the CA
# certificates to fetch with (default: this machine's).
set -euo pipefail

die() { echo "check.sh: $*" >&2; exit 1; }
say() { echo "--- $*"; }
with_python=
case ${1-} in
'') ;;
--python) with_python=1 ;;
*) echo "usage: docker/check.sh [--python]" >&2; exit 2 ;;
esac
[ "$(id -u)" = 0 ] || die "needs root, for chroot"
for tool in buildah debootstrap go; do
	command -v "$tool" >/dev/null || die "needs $tool (apt-get install buildah debootstrap; Go from its site)"
done
cd "$(dirname "$0")/.."

suite=bookworm # the Dockerfile's
if [ -z "${MIRROR-}" ]; then
	# shellcheck disable=SC2016 # apt's own variables
	MIRROR=$(apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 2>/dev/null |
		awk -v s="$suite" '$2 == s && $3 == "main" { print $1; exit }')
	[ -n "$MIRROR" ] || die "cannot tell this machine's Debian mirror: set MIRROR"
fi
work=${WORK:-/var/tmp/goddp-docker-check}
# Storage and caches of its own: nothing of the user's images is touched.
export TMPDIR=$work/tmp
mkdir -p "$TMPDIR"
buildah() { command buildah --root "$work/storage" --runroot "$work/run" --log-level error "$@"; }
containers=()
cleanup() { for c in "${containers[@]}"; do buildah rm "$c" >/dev/null || true; done; }
trap cleanup EXIT
from() { container=$(buildah from --pull-never "$1") && containers+=("$container"); }
in_container() { buildah run --isolation chroot "$@"; }

# --- The base images' stand-ins.
base=localhost/goddp-check/debian golang=localhost/goddp-check/golang
have() { buildah inspect --type image "$1" >/dev/null 2>&1; }
if ! have "$base"; then
	say "debootstrap: a stand-in for debian:$suite-slim"
	rm -rf "$work/rootfs"
	debootstrap --variant=minbase "$suite" "$work/rootfs" "$MIRROR" >"$work/debootstrap.log" ||
		die "debootstrap failed, see $work/debootstrap.log"
	# What the slim image leaves out, and what a build leaves behind.
	find "$work/rootfs/usr/share/doc" -type f ! -name copyright -delete
	rm -rf "$work"/rootfs/usr/share/{man,info,locale,lintian,linda,groff}/* \
		"$work"/rootfs/var/cache/apt/* "$work"/rootfs/var/lib/apt/lists/* "$work"/rootfs/var/log/*
	echo 'Acquire::Check-Valid-Until "false";' >"$work/rootfs/etc/apt/apt.conf.d/99check" # a mirror may be frozen
	from scratch
	buildah add "$container" "$work/rootfs" / >/dev/null
	buildah config --cmd bash "$container"
	buildah commit "$container" "$base" >/dev/null
	rm -rf "$work/rootfs"
fi
if ! have "$golang"; then
	say "a stand-in for golang:$suite, with $(go version)"
	from "$base"
	in_container "$container" sh -c 'apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ git make' \
		>"$work/golang.log" 2>&1 || die "apt-get failed, see $work/golang.log"
	buildah add "$container" "$(go env GOROOT)" /usr/local/go >/dev/null
	buildah config --env GOPATH=/go --env GOTOOLCHAIN=local \
		--env PATH=/go/bin:/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
	buildah commit "$container" "$golang" >/dev/null
fi

# --- The Dockerfile.
secrets=()
pip_conf=${PIP_CONF-}
for f in "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf" /etc/pip.conf; do
	[ -n "${PIP_CONF+set}" ] || [ -n "$pip_conf" ] || [ ! -e "$f" ] || pip_conf=$f
done
[ -z "$pip_conf" ] || secrets+=(--secret "id=pip,src=$pip_conf")
ca=${CA_FILE-/etc/ssl/certs/ca-certificates.crt}
[ ! -e "$ca" ] || secrets+=(--secret "id=ca,src=$ca")
image=localhost/goddp-check/goddp
say "buildah bud docker/Dockerfile"
buildah bud --isolation chroot --pull-never --layers -f docker/Dockerfile -t "$image" "${secrets[@]}" \
	--build-arg BUILD_IMAGE="$golang" --build-arg BASE_IMAGE="$base" --build-arg GOPROXY="$(go env GOPROXY)" .

# --- What came out.
from "$image"
root=$(buildah mount "$container")
say "the image has no Python, no compiler and no pip"
found=$(find "$root" -xdev \( -name 'python*' -o -name 'libpython*' -o -name 'pip*' -o -name 'g++*' -o -name 'gcc-[0-9]*' -o -name cc1plus \) \
	-type f -perm /111 | sed "s#^$root##" || true)
[ -z "$found" ] || die "the image holds $found"
user=$(buildah inspect --format '{{.OCIv1.Config.User}}' "$container")
[ "$user" = 65532:65532 ] || die "the image runs as \"$user\""

say "two ranks train in it, as user $user"
in_container "$container" sh -c 'id -u; command -v python3 && exit 1; multigpu 5 5 --loss mse --nproc-per-node 2 --backend gloo' | tee "$work/train.log"
[ "$(head -1 "$work/train.log")" = 65532 ] || die "the ranks ran as user $(head -1 "$work/train.log")"
for rank in 0 1; do
	grep -q "^\[CPU$rank\] Epoch 4 | Batchsize: 32 | Steps: 32$" "$work/train.log" || die "rank $rank did not come to epoch 4"
done
[ "$(stat -c %u "$root/work/checkpoint.pt")" = 65532 ] || die "the checkpoint is not the user's"
cp "$root/work/checkpoint.pt" "$work/checkpoint.pt"
in_container "$container" goddp run --nproc-per-node 2 /opt/goddp/multigpu 1 1 --dataset-size 64 --backend gloo >"$work/run.log" 2>&1 ||
	die "goddp run failed in the image: $(cat "$work/run.log")"
go run ./cmd/goddp ckpt show "$work/checkpoint.pt" 2>/dev/null || die "the checkpoint cannot be read"
buildah run --isolation chroot "$container" rm -f /work/checkpoint.pt

size() { # of the image's files, and of what is pulled
	printf '%s: %d MB of files, %d MB as one layer of gzip -1\n' "$1" "$(($(du -sxB1 "$2" | cut -f1) / 1000000))" \
		"$(($(tar -C "$2" --one-file-system -cf - . | gzip -1 | wc -c) / 1000000))"
}
size "goddp:cpu" "$root"
echo "of that in /opt/goddp, in bytes:"
(cd "$root/opt/goddp" && find . -type f -printf '%12s  %P\n' | sort -k2)

if [ -n "$with_python" ]; then
	say "the same base with python3 and pip install torch"
	from "$base"
	mounts=()
	[ -z "$pip_conf" ] || mounts+=(-v "$pip_conf:/etc/pip.conf:ro")
	[ ! -e "$ca" ] || mounts+=(-v "$ca:/etc/ssl/certs/ca-certificates.crt:ro")
	in_container "$container" sh -c 'apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-pip' \
		>"$work/python.log" 2>&1 || die "apt-get failed, see $work/python.log"
	in_container "${mounts[@]}" "$container" pip install --no-cache-dir --break-system-packages torch==2.11.0 numpy >>"$work/python.log" 2>&1 ||
		die "pip failed, see $work/python.log"
	in_container "$container" python3 -c 'import torch; print("import torch:", torch.__version__)'
	in_container "$container" sh -c 'apt-get purge -y python3-pip >/dev/null; apt-get autoremove -y >/dev/null; rm -rf /var/lib/apt/lists/* /var/cache/apt/*'
	python=$(buildah mount "$container")
	size "python3 and torch as the index has it" "$python"
	# What a wheel for the CPU alone would leave out; such wheels are on PyTorch's own index only.
	lib=$(echo "$python"/usr/local/lib/python3*/dist-packages)
	rm -rf "$lib"/nvidia "$lib"/triton "$lib"/torch/lib/lib*{cuda,nvshmem,nvrtc}*
	size "the same without CUDA's libraries and triton" "$python"
fi
say "all is well"
