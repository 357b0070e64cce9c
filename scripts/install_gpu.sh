#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs constraints-gpu.txt into the environment of PYTHON [python], in the same steps for scripts/setup.sh and for docker/Dockerfile:
#   scripts/install_gpu.sh                    all of it
#   scripts/install_gpu.sh base               all that need not be compiled
#   scripts/install_gpu.sh wheel NAME FOLDER  a wheel of a library that PyPI has only as sources: the project's own from GitHub, else compiled here
#   scripts/install_gpu.sh rest FOLDER        the wheels of FOLDER
#   scripts/install_gpu.sh nvcc ARGUMENTS...  nvcc for the GPUs of TORCH_CUDA_ARCH_LIST alone
# CUDA_HOME [where nvcc is, or /usr/local/cuda]; TORCH_CUDA_ARCH_LIST [those that each library lists], as "9.0;10.0"; MAX_JOBS compilers at once [one for each core and each 8 GB of memory]; MRL_UNCHECKED=1 takes files
# of any content instead of those of constraints-gpu.hashes.txt.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CONSTRAINTS="$ROOT/constraints-gpu.txt"
PYTHON="${PYTHON:-python}"
LIST="$ROOT/constraints-gpu.hashes.txt" CHECK=(--require-hashes)
if [[ -n ${MRL_UNCHECKED:-} ]]; then LIST="$CONSTRAINTS" CHECK=(); fi
BUILD=(torch setuptools wheel ninja packaging hatchling editables)
KERNELS=(transformer-engine-torch causal-conv1d mamba-ssm)

fail() {
    echo "install_gpu: $*" >&2
    exit 1
}

run_pip() {
    local command=$1
    shift
    "$PYTHON" -m pip "$command" --quiet --disable-pip-version-check "$@"
}

# A wrapper called nvcc on PATH has no headers beside it.
find_cuda() {
    local home nvcc
    nvcc="$(command -v nvcc || true)"
    for home in "$(dirname "$(dirname "$(readlink -f "${nvcc:-/}")")")" /usr/local/cuda; do
        [[ -n ${CUDA_HOME:-} || ! -f $home/include/cuda_runtime.h ]] || CUDA_HOME=$home
    done
    export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
}

# Before gigabytes are downloaded: the setup.py of mamba-ssm and of causal-conv1d fails without nvcc, even where a wheel could be had.
check_host() {
    local wanted found headers out="or use the image (docs/containers.md)"
    wanted="$(sed -nE 's/^cuda-toolkit==([0-9]+\.[0-9]+).*/\1/p' "$CONSTRAINTS")"
    [[ -x $CUDA_HOME/bin/nvcc && -f $CUDA_HOME/include/cuda_runtime.h ]] ||
        fail "no nvcc, or no headers of it, in CUDA_HOME=$CUDA_HOME; set CUDA_HOME to a CUDA $wanted toolkit, install one (apt install cuda-toolkit-${wanted/./-} from NVIDIA's repository), $out"
    found="$("$CUDA_HOME/bin/nvcc" --version | sed -nE 's/.*release ([0-9.]+),.*/\1/p')"
    [[ ${found%%.*} == "${wanted%%.*}" ]] ||
        fail "nvcc in CUDA_HOME=$CUDA_HOME is of CUDA $found, but torch is built for $wanted and refuses other major versions; apt install cuda-toolkit-${wanted/./-} and set CUDA_HOME to it, $out"
    command -v g++ >/dev/null || fail "no g++, which compiles Transformer Engine; apt install g++, $out"
    headers="$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('include'))")"
    [[ -f $headers/Python.h ]] || fail "no $headers/Python.h, which extensions of Python are compiled with; apt install ${headers##*/}-dev, $out"
}

# pins NAME...: the lines of these packages.
pins() {
    local name
    for name in "$@"; do sed -n "/^$name==/p" "$LIST"; done
}

install_base() {
    local name without=()
    check_host
    for name in "${KERNELS[@]}"; do without+=(-e "/^$name==/d"); done
    echo "Installing torch, the build tools and all else that need not be compiled ..."
    # The rest has a package of Python sources, which is built with these.
    run_pip install --no-deps "${CHECK[@]}" --requirement <(pins "${BUILD[@]}")
    run_pip install --no-deps "${CHECK[@]}" --no-build-isolation --requirement <(sed "${without[@]}" "$LIST")
}

build_wheel() {
    local name=$1 folder=$2 site memory_gib
    site="$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('platlib'))")"
    # Behind the toolkit's own headers: those of the cuDNN and the NCCL that torch loads, and of CUDA's libraries where the toolkit has none.
    export CPLUS_INCLUDE_PATH="$site/nvidia/cu13/include:$site/nvidia/cudnn/include:$site/nvidia/nccl/include"
    memory_gib="$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)"
    export MAX_JOBS="${MAX_JOBS:-$(printf '%d\n' "$(nproc)" $((memory_gib < 16 ? 1 : memory_gib / 8)) | sort -n | head -n 1)}"
    # Without an answer from GitHub, two of them would end with an error rather than compile.
    if ! "$PYTHON" -c "import urllib.request; urllib.request.urlopen('https://github.com', timeout=10)" 2>/dev/null; then
        export NVTE_PYTORCH_FORCE_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE
    fi
    # The setup.py of two of them lists up to twelve kinds of GPUs, and torch's variable does not reach it.
    [[ -z ${TORCH_CUDA_ARCH_LIST:-} ]] || export PYTORCH_NVCC="bash $ROOT/scripts/install_gpu.sh nvcc"
    echo "Getting or compiling $name with at most $MAX_JOBS compilers ..."
    # pip's cache would give what was compiled against another torch.
    run_pip wheel --no-cache-dir "${CHECK[@]}" --no-build-isolation --no-deps --wheel-dir "$folder" --requirement <(pins "$name")
}

install_rest() {
    echo "Installing what was built ..."
    run_pip install --no-deps --no-index --find-links "$1" --constraint "$CONSTRAINTS" "${KERNELS[@]}"
}

# nvcc ARGUMENTS...: with -gencode for TORCH_CUDA_ARCH_LIST in place of those given.
run_nvcc() {
    local words=() kind number
    for kind in ${TORCH_CUDA_ARCH_LIST//[;,]/ }; do
        number="${kind%+PTX}" number="${number/./}"
        words+=(-gencode "arch=compute_$number,code=sm_$number")
        [[ $kind != *+PTX ]] || words+=(-gencode "arch=compute_$number,code=compute_$number")
    done
    while (($#)); do
        case $1 in
            -gencode) shift ;;
            -gencode=*) ;;
            *) words+=("$1") ;;
        esac
        shift
    done
    exec "$CUDA_HOME/bin/nvcc" "${words[@]}"
}

find_cuda
if [[ ${1:-} == nvcc ]]; then run_nvcc "${@:2}"; fi
case "${1:-all} $#" in
    "base 1") install_base ;;
    "wheel 3") build_wheel "$2" "$3" ;;
    "rest 2") install_rest "$2" ;;
    "all 0")
        install_base
        WHEELS="$(mktemp -d)"
        trap 'rm -r "$WHEELS"' EXIT
        for name in "${KERNELS[@]}"; do build_wheel "$name" "$WHEELS"; done
        install_rest "$WHEELS"
        ;;
    *) fail "usage: install_gpu.sh [base | wheel NAME FOLDER | rest FOLDER]" ;;
esac
