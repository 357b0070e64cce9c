#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs, then tests on a CPU host. tests/README.md says what each part shows.
#   scripts/test.sh                what a newcomer runs: style, types, unit tests, proof, and a small real run
#   scripts/test.sh --full         every suite; CI runs this
#   scripts/test.sh --long [PART]  the tests marked long("PART"), or all of them part by part, at most 60 minutes each
# With --with-slurm (as root, with apt-get) the second and the third install Slurm, a system package, which some tests of tests/cluster need.
# With --with-chromium the second installs Chromium in the same way, for tests/browser.
set -euo pipefail
words=()
slurm=()
chromium=""
for word in "$@"; do
    if [[ $word == --with-slurm ]]; then slurm=("$word"); elif [[ $word == --with-chromium ]]; then chromium=$word; else words+=("$word"); fi
done
set -- "${words[@]}"
if [[ ${1:-} != --long && ($# -gt 1 || ${1:---full} != --full) ]]; then
    echo "usage: scripts/test.sh [--full | --long [PART]] [--with-slurm] [--with-chromium]" >&2
    exit 2
fi
WITH_DEV=1
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

work="$(mktemp -d)"
trap 'rm -r "$work"' EXIT

# part NAME BUDGET_S COMMAND...: prints what the command says as a whole, and notes its time. Ends what takes twice its budget: a host under
# other load is slow, not broken.
part() {
    local name=$1 budget=$2 started=$SECONDS code=0
    shift 2
    timeout --kill-after=30 $((2 * budget)) "$@" >"$work/$name.txt" 2>&1 || code=$?
    (
        flock 9
        printf '%s\n' "=== $name"
        cat "$work/$name.txt"
        printf '%-24s %5d s of %5d s\n' "$name" $((SECONDS - started)) "$budget" >>"$work/times"
        if ((code)); then echo "$name" >>"$work/failed"; fi
    ) 9>>"$work/printing"
}

# both PART...: runs these functions, the next one as soon as one of two workers is free: most tests start processes and wait for them, and keep
# two cores busy only in pairs. Goes on after a failure, so that one start shows all of them.
both() {
    printf '%s\n' "$@" >"$work/waiting"
    worker &
    worker
    wait
}

worker() {
    local next
    while next="$(take)" && [[ -n $next ]]; do "$next"; done
}

# The name of the next part; takes it from the list.
take() {
    flock 8
    head --lines=1 "$work/waiting"
    sed --in-place 1d "$work/waiting"
} 8>>"$work/taking"

report() {
    "$PYTHON" -m tests.long.stale
    echo "=== Time"
    cat "$work/times"
    if [[ -s $work/failed ]]; then
        echo "FAILED: $(paste --serial --delimiters=' ' "$work/failed")"
        exit 1
    fi
    echo "All parts passed"
}

# get COMMAND PACKAGE...: installs system packages, if the command is absent and this may; what needs it is skipped without it.
get() {
    local command=$1
    shift
    [[ $EUID == 0 ]] && command -v apt-get >/dev/null && ! command -v "$command" >/dev/null || return 0
    apt-get update --quiet >/dev/null || true
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "$@" >/dev/null || echo "apt-get could not install $*"
}

if ((${#slurm[@]})); then get slurmctld slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2; fi
if [[ -n $chromium ]]; then get chromium chromium; fi

if [[ "${1:-}" == --long ]]; then
    parts=("${@:2}")
    if ((${#parts[@]} == 0)); then
        mapfile -t parts < <(grep -rhoP 'mark\.long\("\K[^"]+' tests --include='test_*.py' | sort -u)
    fi
    for name in "${parts[@]}"; do
        part "long $name" 3600 "$PYTHON" -m pytest tests --long "$name" --durations=5 "${slurm[@]}" -rs
    done
    "$PYTHON" -m scripts.render_docs
    report
    exit
fi

run() { part "$1" "$2" "$PYTHON" -m pytest --durations=10 -rs "${@:3}"; }
unit() { run unit 550 tests/unit; }
types() { part pyright 150 "$PYTHON" -m pyright --pythonpath "$PYTHON"; }
proof() { run proof 150 tests/proof; }
smoke() { run smoke 240 -m smoke tests/smoke tests/stack/policy/test_layouts.py tests/stack/rollout/test_engine.py; }
hostile() { run hostile 150 tests/hostile; }
rehearsal() { run rehearsal 240 tests/rehearsal; }
policy() { run policy 980 tests/stack/policy; }
stack() { run stack 1500 tests/stack --ignore=tests/stack/policy; }
learn() { run learn 650 tests/learn; }
browser() { run browser 90 tests/browser; }
faults() { run faults 300 tests/faults; }
cluster() { run cluster 150 tests/cluster "${slurm[@]}"; }

part "ruff check" 30 "$PYTHON" -m ruff check .
part "ruff format" 30 "$PYTHON" -m ruff format --check .
# Long ones first, so that both workers end at about the same time.
if [[ ${1:-} == --full ]]; then
    both stack learn policy unit faults rehearsal cluster types proof hostile browser
else
    both unit smoke proof types
fi
report
