#!/bin/bash
# Asks the registry for the digests of the base images and writes them into docker/Dockerfile and docker/goddp.def, so
# that every build starts from the same bytes. Needs curl and a network; run it again to take newer ones.
#
#   docker/pin.sh [--unpin]
#
# REGISTRY and AUTH are Docker Hub's addresses unless set.
set -euo pipefail

die() { echo "pin.sh: $*" >&2; exit 1; }
cd "$(dirname "$0")"
registry=${REGISTRY:-https://registry-1.docker.io}
auth=${AUTH:-https://auth.docker.io/token?service=registry.docker.io}
files=(Dockerfile goddp.def)

# write IMAGE:TAG REFERENCE: the image, pinned before or not, in both files.
write() { sed -i -E "s#$1(@sha256:[0-9a-f]{64})?\$#$2#" "${files[@]}"; }

images=$(sed -nE 's#^ARG [A-Z]+_IMAGE=docker.io/(library/[^@]+)(@.*)?$#\1#p' Dockerfile)
[ "$(wc -w <<<"$images")" = 2 ] || die "the Dockerfile does not name two images of docker.io/library"
for image in $images; do
	name=${image%:*} tag=${image##*:}
	short=${image#library/} # as goddp.def has it
	if [ "${1-}" = --unpin ]; then
		write "$short" "$short"
		continue
	fi
	token=$(curl -fsS "$auth&scope=repository:$name:pull" | sed -nE 's/.*"token" *: *"([^"]+)".*/\1/p')
	[ -n "$token" ] || die "no token for $name from the registry"
	digest=$(curl -fsSI -H "Authorization: Bearer $token" \
		-H 'Accept: application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json' \
		"$registry/v2/$name/manifests/$tag" | tr -d '\r' | sed -nE 's/^docker-content-digest: *(sha256:[0-9a-f]{64})$/\1/Ip')
	[ -n "$digest" ] || die "the registry gave no digest for $name:$tag"
	write "$short" "$short@$digest"
	echo "$short@$digest"
done
