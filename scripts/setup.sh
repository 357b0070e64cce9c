# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: makes .venv beside the sources, once, and sets ROOT, PYTHON and the number of threads.
# It installs for the GPUs that nvidia-smi lists, or for CPUs where there are none or MRL_CPU=1 asks for that.
# A caller that sets WITH_DEV=1 gets the tools of the tests as well, and one that sets ON_CPUS=1 an environment for CPUs
# even on a host with GPUs: .venv-cpu. A stamp names what is installed, so that a second start installs nothing.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# Several processes share the cores; thread pools of their own would only get into each other's way.
export OMP_NUM_THREADS=1

fail() {
    echo "setup: $*" >&2
    exit 1
}

case "$(uname -s) $(uname -m)" in
    "Linux x86_64" | "Linux aarch64") ;;
    *) fail "mrl runs on Linux, on x86-64 and aarch64, and not on $(uname -s) on $(uname -m); use a Linux host, on Windows WSL 2" ;;
esac

# find_python VERSION...: an interpreter of the first of these versions that there is.
find_python() {
    local version candidate
    for version in "$@"; do
        for candidate in "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
            "$HOME/.local/share/uv/python/cpython-$version".*/bin/python; do
            if "$candidate" -c "import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (${version/./, }))" 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
    fail "no Python 3.11, 3.12 or 3.13 (with its venv module) among the interpreters on PATH, of pyenv and of uv; install one, e.g. apt install python3.11-venv"
}

# list NAME: the file of pins. MRL_UNCHECKED=1 installs the same versions from files of any content, as mirrors have that build for themselves.
list() {
    if [[ -n ${MRL_UNCHECKED:-} ]]; then echo "$ROOT/constraints-$1.txt"; else echo "$ROOT/constraints-$1.hashes.txt"; fi
}

# install_list FILE [OPTION...]: its packages, of which each has its own hash where the list has hashes. Compiled to bytecode here: where processes
# must not write any (PYTHONDONTWRITEBYTECODE, as in many containers), each of a run's would compile all that it imports.
install_list() {
    local file=$1 check=()
    shift
    if [[ -z ${MRL_UNCHECKED:-} ]]; then check=(--require-hashes); fi
    "$PYTHON" -m uv pip install --quiet --python "$PYTHON" --no-deps --compile-bytecode --index-strategy unsafe-best-match "${check[@]}" "$@" --requirement "$file"
}

# uv downloads and unpacks in parallel; pip installs it, and pip's settings say where packages come from.
install_uv() {
    local file check=()
    file="$(mktemp)"
    grep '^uv==' "$(list cpu)" >"$file"
    if [[ -z ${MRL_UNCHECKED:-} ]]; then check=(--require-hashes); fi
    "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-deps "${check[@]}" --requirement "$file"
    rm "$file"
    eval "$("$PYTHON" "$ROOT/scripts/uv_settings.py")"
}

install_cpu() {
    local file index=() cuda
    install_uv
    file="$(mktemp)"
    grep '^torch==' "$(list cpu)" >"$file"
    # The CPU index first; behind a firewall, whatever CPU build the settings lead to. Without --no-deps a CUDA build would bring gigabytes along.
    if "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$TORCH_CPU_INDEX/torch/', timeout=5)" 2>/dev/null; then
        index=(--default-index "$TORCH_CPU_INDEX")
    fi
    install_list "$file" "${index[@]}" ||
        fail "make $TORCH_CPU_INDEX reachable, or give pip or uv its wheel (PIP_FIND_LINKS=FOLDER); MRL_UNCHECKED=1 takes builds of your own"
    rm "$file"
    cuda="$("$PYTHON" -c "import runpy, sysconfig; print(runpy.run_path(sysconfig.get_path('platlib') + '/torch/version.py')['cuda'])")"
    if [[ "$cuda" != None ]]; then
        "$PYTHON" -m uv pip uninstall --quiet --python "$PYTHON" torch
        fail "found only a build of torch for CUDA $cuda; make $TORCH_CPU_INDEX reachable, or give pip or uv a CPU wheel (PIP_FIND_LINKS=FOLDER)"
    fi
    install_list "$(list cpu)"
}

install_gpu() {
    PYTHON="$PYTHON" bash "$ROOT/scripts/install_gpu.sh"
    install_uv
}

install_dev() {
    install_uv
    install_list "$(list dev)"
}

# setup_list NAME: installs constraints-NAME and mrl itself, unless the stamp says that this has been done.
setup_list() {
    local name=$1 key base started=$SECONDS
    key="$name $(cat "$ROOT/pyproject.toml" "$(list "$name")" <(echo "$ROOT") | sha256sum)"
    if [[ -x "$PYTHON" ]] && grep --quiet --line-regexp --fixed-strings -- "$key" "$STAMP" 2>/dev/null; then return; fi
    # One installer at a time: the other one waits and then finds the work done.
    exec 9>"$VENV.lock"
    flock --timeout 3600 9 || fail "another installation has held $VENV.lock for an hour"
    if ! grep --quiet --line-regexp --fixed-strings -- "$key" "$STAMP" 2>/dev/null; then
        # shellcheck disable=SC2086
        base="$(find_python $PYTHONS)"
        # Before anything is downloaded, or replaced.
        if [[ $name == gpu ]]; then PYTHON="$base" bash "$ROOT/scripts/install_gpu.sh" check 9>&-; fi
        if [[ $name == cpu ]] && ! "$base" -c "import ctypes; ctypes.CDLL('libnuma.so.1')" 2>/dev/null; then
            fail "vLLM for CPUs needs libnuma.so.1; install it, e.g. apt-get install libnuma1"
        fi
        # Packages for GPUs and those for CPUs do not go into one environment.
        if ! "$PYTHON" -c "" 2>/dev/null || { [[ $name != dev ]] && grep --quiet "^$OTHER_KIND " "$STAMP" 2>/dev/null; }; then
            "$base" -m venv --clear "$VENV"
        fi
        echo "Installing constraints-$name into $VENV with $("$PYTHON" --version) ($base), and compiling it: 1 to 5 minutes ..."
        echo "$name is being installed" >>"$STAMP"
        # In a shell of its own: uv's settings are for the installation, not for the tests that follow it.
        ("install_$name")
        "$PYTHON" -m uv pip install --quiet --python "$PYTHON" --no-deps --no-build-isolation --editable "$ROOT"
        { grep --invert-match "^$name " "$STAMP" 2>/dev/null || true; echo "$key"; } >"$STAMP.new"
        mv "$STAMP.new" "$STAMP"
        echo "Installed in $((SECONDS - started)) s"
    fi
    exec 9>&-
}

VENV="$ROOT/.venv" KIND=cpu OTHER_KIND=gpu PYTHONS="3.11 3.12 3.13" GPUS=""
if [[ ${MRL_CPU:-0} == 0 ]]; then GPUS="$(bash "$ROOT/scripts/install_gpu.sh" gpus)"; fi
if [[ -n $GPUS && -n ${ON_CPUS:-} ]]; then
    export MRL_CPU=1
    VENV="$ROOT/.venv-cpu"
    echo "The suites run on CPUs, in an environment of their own: $VENV; GPUs: bash scripts/gpu_check.sh first"
elif [[ -n $GPUS ]]; then
    # The images, and all that ran on GPUs, have Megatron-Core 0.19, which needs Python 3.12.
    KIND=gpu OTHER_KIND=cpu PYTHONS="3.12 3.13 3.11"
fi
PYTHON="$VENV/bin/python" STAMP="$VENV/installed"
setup_list "$KIND"
if [[ -n ${WITH_DEV:-} ]]; then setup_list dev; fi
