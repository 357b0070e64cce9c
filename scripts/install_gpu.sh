#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs constraints-gpu.txt into the environment of PYTHON [python], in the same steps for scripts/setup.sh and for docker/Dockerfile:
#   scripts/install_gpu.sh                    all of it; without nvcc of CUDA 13 all but the compiled kernels
#   scripts/install_gpu.sh kernels            the compiled kernels, beside the rest
#   scripts/install_gpu.sh check              only says what is missing on this host, and what that means
#   scripts/install_gpu.sh gpus               lists the GPUs of this host, if nvidia-smi does
#   scripts/install_gpu.sh base               all that need not be compiled
#   scripts/install_gpu.sh wheel NAME FOLDER  a wheel of a library that PyPI has only as sources: the project's own from GitHub, else compiled here
#   scripts/install_gpu.sh rest FOLDER        the wheels of FOLDER
#   scripts/install_gpu.sh nvcc ARGUMENTS...  nvcc for the GPUs of TORCH_CUDA_ARCH_LIST alone
# CUDA_HOME [where nvcc is, or /usr/local/cuda]; TORCH_CUDA_ARCH_LIST [those that each library lists], as "9.0;10.0";
# MAX_JOBS compilers at once [one for each core and each 8 GB of memory]; MRL_UNCHECKED=1 takes files of any content
# instead of those of constraints-gpu.hashes.txt.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CONSTRAINTS="$ROOT/constraints-gpu.txt"
PYTHON="${PYTHON:-python}"
LIST="$ROOT/constraints-gpu.hashes.txt" CHECK=(--require-hashes)
if [[ -n ${MRL_UNCHECKED:-} ]]; then LIST="$CONSTRAINTS" CHECK=(); fi
BUILD=(torch setuptools wheel ninja packaging hatchling editables)
KERNELS=(transformer-engine-torch causal-conv1d mamba-ssm)
# Without the first of the kernels, an import of these fails with errors that Megatron-Core does not expect.
ENGINE=(transformer-engine transformer-engine-cu13)
CUDA="$(sed -nE 's/^cuda-toolkit==([0-9]+\.[0-9]+).*/\1/p' "$CONSTRAINTS")"
LIMIT_S=60
IMAGE="or use the image (docs/containers.md)"

fail() {
    echo "install_gpu: $*" >&2
    exit 1
}

run_pip() {
    local command=$1
    shift
    "$PYTHON" -m pip "$command" --disable-pip-version-check "$@"
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

# within COMMAND...: its output, and its exit code, 124 if it gives no answer within LIMIT_S. It is then left behind: not
# even SIGKILL ends all that wait for a driver.
within() {
    local output pid code=0 ticks
    output="$(mktemp)"
    "$@" >"$output" 2>&1 &
    pid=$!
    for ((ticks = 0; ticks < LIMIT_S * 20; ticks++)); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.05
    done
    if kill -9 "$pid" 2>/dev/null; then code=124; else wait "$pid" || code=$?; fi
    cat "$output"
    rm "$output"
    return "$code"
}

# Without nvidia-smi, as in some containers, device files tell of GPUs. What nvidia-smi says of a host without is passed on.
list_gpus() {
    local listed code=0
    if ! command -v nvidia-smi >/dev/null; then
        for listed in /dev/nvidia[0-9]*; do [[ ! -e $listed ]] || echo "$listed"; done
        return
    fi
    listed="$(within nvidia-smi --list-gpus)" || code=$?
    if [[ $code == 124 ]]; then
        fail "nvidia-smi gives no answer within $LIMIT_S s, so the GPU's driver hangs: restart it or the host, or install for CPUs with MRL_CPU=1"
    fi
    if [[ $code == 0 && $listed =~ (^|$'\n')GPU\ [0-9]+: ]]; then
        echo "$listed"
    else
        listed="${listed%%$'\n'*}"
        echo "install_gpu: nvidia-smi lists no GPU (${listed:-it says nothing}): this host counts as one without" >&2
    fi
}

# Driver and GPUs must be new enough for CUDA 13 (its release notes): a driver of 580, GPUs of capability 7.5. The header
# of nvidia-smi has named the newest CUDA of the driver since 2018, in several words.
check_driver() {
    local said cuda driver capability out="or install for CPUs with MRL_CPU=1"
    command -v nvidia-smi >/dev/null || return 0
    said="$(within nvidia-smi)" || fail "nvidia-smi fails, or gives no answer within $LIMIT_S s: ${said%%$'\n'*}; restart the driver or the host, $out"
    cuda="$(sed -nE 's/.*CUDA( [A-Za-z]+)* Version *: *([0-9]+)\..*/\2/p' <<<"$said" | head -n 1)"
    driver="$(sed -nE 's/.*Driver Version *: *([0-9]+)\..*/\1/p' <<<"$said" | head -n 1)"
    if ((${cuda:-$((${driver:-580} < 580 ? 12 : 13))} < ${CUDA%%.*})); then
        fail "the GPU's driver (${driver:-unknown}) runs CUDA up to ${cuda:-12}, and torch is built for CUDA $CUDA: install a driver of 580 or newer, $out"
    fi
    capability="$(within nvidia-smi --query-gpu=compute_cap --format=csv,noheader)" || return 0
    capability="$(grep -E '^ *[0-9]+\.[0-9]+ *$' <<<"$capability" | sort -V | head -n 1)" || return 0
    if [[ -n $capability && $(printf '%s\n' 7.5 "$capability" | sort -V | head -n 1) != 7.5 ]]; then
        fail "a GPU of compute capability ${capability// /} is too old for CUDA $CUDA, which begins at 7.5: leave it out with CUDA_VISIBLE_DEVICES, $out"
    fi
}

# Triton compiles the start of each kernel on the host, whichever kernels are installed.
check_compiler() {
    local headers
    command -v g++ >/dev/null || fail "no g++, which compiles Triton's kernels and Transformer Engine; apt install g++, $IMAGE"
    headers="$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('include'))")"
    [[ -f $headers/Python.h ]] || fail "no $headers/Python.h, which extensions of Python are compiled with; apt install ${headers##*/}-dev, $IMAGE"
}

# Reason why this host cannot compile the kernels; none if it can. The setup.py of mamba-ssm and of causal-conv1d fails without nvcc, even where a
# wheel could be had.
toolkit_fault() {
    local found remedy="apt install cuda-toolkit-${CUDA/./-} from NVIDIA's repository"
    if [[ ! -x $CUDA_HOME/bin/nvcc || ! -f $CUDA_HOME/include/cuda_runtime.h ]]; then
        echo "no nvcc, or no headers of it, in CUDA_HOME=$CUDA_HOME; set CUDA_HOME to a CUDA $CUDA toolkit, or install one ($remedy), $IMAGE"
        return
    fi
    found="$(within "$CUDA_HOME/bin/nvcc" --version)" || true
    found="$(sed -nE 's/.*release ([0-9.]+),.*/\1/p' <<<"$found")"
    [[ ${found%%.*} == "${CUDA%%.*}" ]] ||
        echo "nvcc in CUDA_HOME=$CUDA_HOME is of CUDA ${found:-unknown}, but torch is built for $CUDA and refuses other major versions; $remedy and set CUDA_HOME to it, $IMAGE"
}

# Before gigabytes are downloaded.
check_toolkit() {
    local fault
    fault="$(toolkit_fault)"
    [[ -z $fault ]] || fail "$fault"
    check_compiler
}

# check_host: fails if nothing can be installed for GPUs; says what an installation will lack.
check_host() {
    check_driver
    check_compiler
    FAULT="$(toolkit_fault)"
    if [[ -n $FAULT ]]; then
        echo "Without compiled kernels (${KERNELS[*]}): $FAULT."
        echo "mrl's layers of plain torch take their place, and are slower; later: PYTHON=.venv/bin/python bash scripts/install_gpu.sh kernels"
    fi
}

# pins NAME...: the lines of these packages.
pins() {
    local name
    for name in "$@"; do sed -n "/^$name==/p" "$LIST"; done
}

# install_base NAME...: all but these.
install_base() {
    local name without=()
    for name in "$@"; do without+=(-e "/^$name==/d"); done
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

install_kernels() {
    local name
    WHEELS="$(mktemp -d)"
    trap 'rm -r "$WHEELS"' EXIT
    for name in "${KERNELS[@]}"; do build_wheel "$name" "$WHEELS"; done
    install_rest "$WHEELS"
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
    "gpus 1") list_gpus ;;
    "check 1") check_host ;;
    "base 1")
        check_toolkit
        install_base "${KERNELS[@]}"
        ;;
    "wheel 3") build_wheel "$2" "$3" ;;
    "rest 2") install_rest "$2" ;;
    "kernels 1")
        check_toolkit
        run_pip install --no-deps "${CHECK[@]}" --requirement <(pins "${ENGINE[@]}")
        install_kernels
        ;;
    "all 0")
        check_host
        if [[ -z $FAULT ]]; then
            install_base "${KERNELS[@]}"
            install_kernels
        else
            install_base "${KERNELS[@]}" "${ENGINE[@]}"
        fi
        ;;
    *) fail "usage: install_gpu.sh [kernels | check | gpus | base | wheel NAME FOLDER | rest FOLDER]" ;;
esac
