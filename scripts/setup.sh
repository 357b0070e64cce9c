# Sourced by quickstart.sh and test.sh: makes .venv beside the sources, once, and sets ROOT, PYTHON and the number of threads.
# A stamp names what was installed, so that a second start installs nothing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$ROOT/.venv/bin/python"
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

# Several processes share the cores; thread pools of their own would only get into each other's way.
export OMP_NUM_THREADS=1

fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local version candidate
    for version in 3.11 3.12; do
        for candidate in "python$version" python3 "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
            "$HOME/.local/share/uv/python/cpython-$version".*/bin/python; do
            if "$candidate" -c "import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (${version/./, }))" 2>/dev/null; then
                echo "$candidate"
                return
            fi
        done
    done
    fail "no Python 3.11 or 3.12 (with its venv module) among the interpreters on PATH, of pyenv and of uv; install one, e.g. apt install python3.11-venv"
}

pip_install() {
    "$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check "$@"
}

install_cpu() {
    local torch
    torch="$(mktemp)"
    grep '^torch==' "$LIST" >"$torch"
    # The CPU index first; behind a firewall, whatever CPU build pip finds. Without --no-deps a CUDA build would bring gigabytes along.
    if "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$TORCH_CPU_INDEX/torch/', timeout=5)" 2>/dev/null; then
        pip_install --no-deps "${CHECK[@]}" --index-url "$TORCH_CPU_INDEX" --requirement "$torch"
    else
        pip_install --no-deps "${CHECK[@]}" --requirement "$torch" ||
            fail "make $TORCH_CPU_INDEX reachable, or give pip its wheel (PIP_FIND_LINKS=FOLDER); MRL_UNCHECKED=1 takes builds of your own"
    fi
    rm "$torch"
    local cuda
    cuda="$("$PYTHON" -c "import runpy, sysconfig; print(runpy.run_path(sysconfig.get_path('platlib') + '/torch/version.py')['cuda'])")"
    if [[ "$cuda" != None ]]; then
        "$PYTHON" -m pip uninstall --quiet --yes torch
        fail "pip found only a build of torch for CUDA $cuda; make $TORCH_CPU_INDEX reachable, or give pip a CPU wheel (PIP_FIND_LINKS=FOLDER)"
    fi
    pip_install --no-deps "${CHECK[@]}" --requirement "$LIST"
    pip_install --no-deps --no-build-isolation --editable "$ROOT"
}

install_gpu() {
    PYTHON="$PYTHON" bash "$ROOT/scripts/install_gpu.sh"
    pip_install --no-deps --no-build-isolation --editable "$ROOT"
}

setup() {
    local kind=cpu stamp="$ROOT/.venv/installed" key
    if nvidia-smi --list-gpus >/dev/null 2>&1; then kind=gpu; fi
    # MRL_UNCHECKED=1 installs the same versions from files of any content, as mirrors have that build for themselves.
    LIST="$ROOT/constraints-$kind.hashes.txt" CHECK=(--require-hashes)
    if [[ -n ${MRL_UNCHECKED:-} ]]; then LIST="$ROOT/constraints-$kind.txt" CHECK=(); fi
    key="$(cat "$ROOT/pyproject.toml" "$LIST" <(echo "$ROOT") | sha256sum)"
    if [[ -x "$PYTHON" && "$(cat "$stamp" 2>/dev/null)" == "$key" ]]; then return; fi
    mkdir -p "$ROOT/.venv"
    # One installer at a time: the other one waits and then finds the work done.
    exec 9>"$ROOT/.venv.lock"
    flock --timeout 3600 9 || fail "another installation has held $ROOT/.venv.lock for an hour"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$key" ]]; then
        local started=$SECONDS base
        base="$(find_python)"
        echo "Installing into $ROOT/.venv with $("$base" --version) ($base) for a host with $kind ..."
        "$PYTHON" -c "" 2>/dev/null || "$base" -m venv --clear "$ROOT/.venv"
        "install_$kind"
        echo "$key" >"$stamp"
        echo "Installed in $((SECONDS - started)) s"
    fi
    exec 9>&-
}

setup
