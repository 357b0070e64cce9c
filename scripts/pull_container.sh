#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=enroot-import
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=01:00:00
#SBATCH --output=enroot-import-%j.out

# Makes a squash file of an image, which jobs start from without a registry. On a compute node, where login nodes forbid it:
#   IMAGE=nvcr.io/ORG/mrl:TAG WORKSPACE=/shared/me sbatch --account=A --partition=P scripts/pull_container.sh
#   IMAGE       in a registry; docker://REGISTRY/NAME:TAG and enroot's own REGISTRY#NAME:TAG are the same here
#   WORKSPACE   folder on storage that all nodes share
#   OUTPUT      the file                            [WORKSPACE/NAME.TAG.sqsh]
#   ENROOT_CACHE_PATH, for the layers               [WORKSPACE/.cache/enroot]
# A private registry asks for a line in ~/.config/enroot/.credentials: machine nvcr.io login $oauthtoken password KEY
set -euo pipefail

fail() {
    echo "pull_container: $*" >&2
    exit 2
}

[[ -n ${IMAGE:-} ]] || fail "IMAGE is not set; e.g. IMAGE=nvcr.io/ORG/mrl:TAG"
[[ -n ${WORKSPACE:-} && -d ${WORKSPACE:-} ]] || fail "WORKSPACE=${WORKSPACE:-} is no folder; name one on storage that all nodes share"
command -v enroot >/dev/null || fail "enroot is not on this host; run this on a compute node: sbatch scripts/pull_container.sh"
# Without a # behind the registry enroot would ask Docker Hub.
URI=docker://$(sed -E 's,^([^/#]*[.:][^/#]*)/,\1#,' <<<"${IMAGE#docker://}")
NAME=${URI##*[/#]}
OUTPUT=${OUTPUT:-$WORKSPACE/${NAME/:/.}.sqsh}
if [[ -e $OUTPUT ]]; then
    echo "$OUTPUT is there already; remove it to import $URI again"
    exit 0
fi
if [[ $URI == *nvcr.io#* ]] && ! grep -qs "machine nvcr.io" "${ENROOT_CONFIG_PATH:-$HOME/.config/enroot}/.credentials"; then
    echo "WARNING: no line for nvcr.io in ${ENROOT_CONFIG_PATH:-$HOME/.config/enroot}/.credentials; private images will be refused"
fi
export ENROOT_CACHE_PATH=${ENROOT_CACHE_PATH:-$WORKSPACE/.cache/enroot}
mkdir -p "$ENROOT_CACHE_PATH" "$(dirname "$OUTPUT")"
# What is being written must not look like a whole image.
ASIDE=$OUTPUT.$$.part
trap 'rm -f "$ASIDE"' EXIT
enroot import --output "$ASIDE" "$URI"
mv "$ASIDE" "$OUTPUT"
echo "CONTAINER=$OUTPUT ($(du -h "$OUTPUT" | cut -f1))"
