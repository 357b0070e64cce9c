#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, then tests on a CPU host. tests/README.md says what each part shows.
#   scripts/test.sh [PART...]      what a newcomer runs: style, unit tests, proof, and a small real run; or these parts
#   scripts/test.sh --full         every suite; CI runs this
#   scripts/test.sh --busy         unit tests, proof, smoke and stack beside four busy loops: no verdict may depend on how fast the host is
#   scripts/test.sh --long [PART]  the tests marked long("PART"), or all of them part by part
#   scripts/test.sh --evidence     records the tables of docs/ at this commit, for a release; may be stopped, and goes on (--list: what is left)
# With --with-slurm and --with-chromium (as root, with apt-get) it installs Slurm and Chromium, system packages that some tests need.
set -euo pipefail
WITH_DEV=1 ON_CPUS=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

# get COMMAND PACKAGE...: installs system packages, if the command is absent and this may; what needs it is skipped without it.
get() {
    local command=$1
    shift
    [[ $EUID == 0 ]] && command -v apt-get >/dev/null && ! command -v "$command" >/dev/null || return 0
    apt-get update --quiet >/dev/null || true
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "$@" >/dev/null || echo "apt-get could not install $*"
}

for word in "$@"; do
    case $word in
        --with-slurm) get slurmctld slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 ;;
        --with-chromium) get chromium chromium ;;
    esac
done

if [[ ${1:-} == --evidence ]]; then exec "$PYTHON" -m tests.long.evidence "${@:2}"; fi
code=0
"$PYTHON" -m tests.runner "$@" || code=$?
if [[ " $* " == *" --long "* ]]; then "$PYTHON" -m scripts.render_docs; fi
exit "$code"
