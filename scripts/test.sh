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

times=()
failed=()

# part NAME BUDGET_S COMMAND...: runs on after a failure, so that one start shows all of them. Ends what takes twice its budget:
# a host under other load is slow, not broken.
part() {
    local name=$1 budget=$2 started=$SECONDS
    shift 2
    echo "=== $name"
    timeout --kill-after=30 $((2 * budget)) "$@" || failed+=("$name")
    times+=("$(printf '%-24s %5d s of %5d s' "$name" $((SECONDS - started)) "$budget")")
}

report() {
    "$PYTHON" -m tests.long.stale
    printf '%s\n' "=== Time" "${times[@]}"
    if ((${#failed[@]})); then
        echo "FAILED: ${failed[*]}"
        exit 1
    fi
    echo "All parts passed"
}

# cluster COMMAND...: runs tests that need Slurm. Without it they are skipped; where it was to be installed and was not, they fail.
cluster() {
    if ((${#slurm[@]} && EUID == 0)) && ! command -v slurmctld >/dev/null && command -v apt-get >/dev/null; then
        apt-get update --quiet >/dev/null || true
        DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends \
            slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 >/dev/null || echo "apt-get could not install Slurm"
    fi
    part "$@" "${slurm[@]}" -rs
    command -v slurmctld >/dev/null ||
        times+=("No Slurm here: the tests that need it were skipped; --with-slurm installs it (as root, with apt-get)")
}

# Installs Chromium where it is asked for; the tests that need it are skipped without it.
install_chromium() {
    [[ -n $chromium && $EUID == 0 ]] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null || return 0
    apt-get update --quiet >/dev/null || true
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends chromium >/dev/null || echo "apt-get could not install Chromium"
}

if [[ "${1:-}" == --long ]]; then
    parts=("${@:2}")
    if ((${#parts[@]} == 0)); then
        mapfile -t parts < <(grep -rhoP 'mark\.long\("\K[^"]+' tests --include='test_*.py' | sort -u)
    fi
    for name in "${parts[@]}"; do
        if [[ $name == cluster ]]; then run=cluster; else run=part; fi
        "$run" "long $name" 3600 "$PYTHON" -m pytest tests --long "$name" --durations=5
    done
    "$PYTHON" -m scripts.render_docs
    report
    exit
fi
part "ruff check" 30 "$PYTHON" -m ruff check .
part "ruff format" 30 "$PYTHON" -m ruff format --check .
# The unit tests take one core; what else needs one core runs beside them.
work="$(mktemp -d)"
beside() {
    local name=$1 code=0
    shift
    "$@" >"$work/$name.txt" 2>&1 || code=$?
    echo "$code" >"$work/$name.code"
}
result() {
    until [[ -s $work/$1.code ]]; do sleep 1; done
    cat "$work/$1.txt"
    return "$(<"$work/$1.code")"
}
{
    beside pyright "$PYTHON" -m pyright --pythonpath "$PYTHON"
    beside proof "$PYTHON" -m pytest tests/proof --durations=5
    if [[ ${1:-} == --full ]]; then beside hostile "$PYTHON" -m pytest tests/hostile --durations=5; fi
} &
export -f result
export work
part unit 330 "$PYTHON" -m pytest tests/unit --durations=5
part pyright 30 bash -c "result pyright"
part proof 30 bash -c "result proof"
if [[ ${1:-} == --full ]]; then
    part hostile 60 bash -c "result hostile"
    part rehearsal 240 "$PYTHON" -m pytest tests/rehearsal --durations=10
    part stack 1200 "$PYTHON" -m pytest tests/stack --durations=10
    part learn 660 "$PYTHON" -m pytest tests/learn --durations=5
    install_chromium
    part browser 60 "$PYTHON" -m pytest tests/browser --durations=5 -rs
    part faults 390 "$PYTHON" -m pytest tests/faults --durations=5
    cluster cluster 150 "$PYTHON" -m pytest tests/cluster --durations=5
else
    part smoke 240 "$PYTHON" -m pytest -m smoke tests/smoke tests/stack/policy/test_layouts.py tests/stack/rollout/test_engine.py --durations=10
fi
rm -r "$work"
report
