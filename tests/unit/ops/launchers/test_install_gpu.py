# SPDX-License-Identifier: Apache-2.0
"""scripts/install_gpu.sh: one set, order and flags for setup.sh and the image; an image lacks nothing. No pip runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.unit.ops.launchers.test_docker import FILES
from tests.waiting import HANG_S

SCRIPT = ROOT / "scripts" / "install_gpu.sh"
PINS = ROOT / "constraints-gpu.txt"
# Answers what the script asks of Python, but writes pip's arguments and the builds that are forced into a file.
PYTHON = f"""#!/bin/bash
case "$*" in
    "-m pip"*)
        forced="${{MAMBA_FORCE_BUILD:-}},${{CAUSAL_CONV1D_FORCE_BUILD:-}},${{NVTE_PYTORCH_FORCE_BUILD:-}}"
        words="${{*:3}}"
        for word in "$@"; do
            if [[ $word == /dev/fd/* ]]; then
                words="${{words/"$word"/"$(sed '/^#/d; s/ --hash=.*//' "$word" | tr '\\n' ' ')"}}"
            fi
        done
        echo "$words forced=$forced $MAX_JOBS" >>"$LOG"
        ;;
    *urllib*) exit "$GITHUB" ;;
    *"get_path('include')"*) echo "$HEADERS" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
NVCC = "#!/bin/bash\necho Cuda compilation tools, release {0}, V{0}.88\n"


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    """Environment of a host that has all that is needed; LOG is what pip was called with."""
    scripts = {"python": PYTHON, "cuda/bin/nvcc": NVCC.format("13.0"), "g++": "#!/bin/bash\n"}
    for name, text in scripts.items():
        path = tmp_path / "bin" / name if "/" not in name else tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for tool in (
        "bash",
        "cat",
        "dirname",
        "sed",
        "sleep",
        "awk",
        "nproc",
        "sort",
        "head",
        "mktemp",
        "readlink",
        "rm",
        "tr",
    ):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    headers = tmp_path / "python3.11"
    for header in (headers / "Python.h", tmp_path / "cuda/include/cuda_runtime.h"):
        header.parent.mkdir()
        header.touch()
    named = dict(
        PATH=tmp_path / "bin", CUDA_HOME=tmp_path / "cuda", HEADERS=headers, LOG=tmp_path / "log", MAX_JOBS=3, GITHUB=0
    )
    return {name: str(value) for name, value in named.items()}


def install(host: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, *words], env=host, capture_output=True, text=True, timeout=HANG_S)


def pip_calls(host: dict[str, str]) -> list[str]:
    """Arguments of pip's calls, the folder of wheels named FOLDER."""
    log = Path(host["LOG"])
    return re.sub(r"(--wheel-dir|--find-links) \S+", r"\1 FOLDER", log.read_text()).splitlines() if log.exists() else []


def test_the_image_takes_the_steps_of_a_bare_host(host: dict[str, str]):
    assert 'bash "$ROOT/scripts/install_gpu.sh"\n' in (ROOT / "scripts" / "setup.sh").read_text()
    assert install(host).returncode == 0
    bare = pip_calls(host)
    Path(host["LOG"]).unlink()
    steps = re.findall(r"bash scripts/install_gpu\.sh ([^&\n]+)", FILES[0].read_text())
    assert all(install(host, *step.split()).returncode == 0 for step in steps)
    assert pip_calls(host) == bare
    quiet, rest, kernels = (
        "--disable-pip-version-check",
        " forced=,, 3",
        ("transformer-engine-torch", "causal-conv1d", "mamba-ssm"),
    )
    listed = re.findall(r"^(([\w.-]+)==.+)$", PINS.read_text(), re.MULTILINE)
    pins = {name: line for line, name in listed}
    checked, built = f"{quiet} --no-deps --require-hashes", "torch setuptools wheel ninja packaging hatchling editables"
    build = (
        f"wheel {quiet} --no-cache-dir --require-hashes --no-build-isolation --no-deps --wheel-dir FOLDER --requirement"
    )
    unbuilt = " ".join(line for line, name in listed if name not in kernels)
    assert [" ".join(call.split()) for call in bare] == [
        f"install {checked} --requirement {' '.join(pins[name] for name in built.split())}{rest}",
        f"install {checked} --no-build-isolation --requirement {unbuilt}{rest}",
        *(f"{build} {pins[name]}{rest}" for name in kernels),
        f"install {quiet} --no-deps --no-index --find-links FOLDER --constraint {PINS} {' '.join(kernels)}{rest}",
    ]


def test_files_of_one_s_own_are_taken_when_that_is_asked_for(host: dict[str, str]):
    assert install({**host, "MRL_UNCHECKED": "1"}).returncode == 0
    assert "--require-hashes" not in "".join(pip_calls(host)) and "torch==" in pip_calls(host)[0]


def test_without_github_everything_is_compiled(host: dict[str, str]):
    assert install({**host, "GITHUB": "1"}, "wheel", "mamba-ssm", "/wheels").returncode == 0
    assert "forced=TRUE,TRUE,TRUE" in pip_calls(host)[0]


def test_compilers_are_as_many_as_cores_and_memory_allow(host: dict[str, str]):
    assert install({**host, "MAX_JOBS": ""}, "wheel", "mamba-ssm", "/wheels").returncode == 0
    jobs = int(pip_calls(host)[0].split()[-1])
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 1 <= jobs <= min(len(os.sched_getaffinity(0)), max(1, memory_gib / 8))


def test_kernels_are_compiled_for_the_listed_gpus_alone(host: dict[str, str], tmp_path: Path):
    (tmp_path / "cuda/bin/nvcc").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    given = ["-gencode", "arch=compute_75,code=sm_75", "-gencode=arch=compute_80,code=sm_80", "-c", "a b.cu"]
    done = install(host | {"TORCH_CUDA_ARCH_LIST": "9.0a;10.0+PTX"}, "nvcc", *given)
    codes = ["arch=compute_90a,code=sm_90a", "arch=compute_100,code=sm_100", "arch=compute_100,code=compute_100"]
    assert done.stdout.splitlines() == [*(word for code in codes for word in ("-gencode", code)), "-c", "a b.cu"]


@pytest.mark.parametrize(
    ("fault", "said"),
    {
        "no toolkit": (
            "CUDA_HOME",
            "no nvcc, or no headers.* CUDA_HOME=/nowhere; .* CUDA 13.0 toolkit.*cuda-toolkit-13-0.*image",
        ),
        "another CUDA": (
            "nvcc",
            "nvcc in CUDA_HOME=.* is of CUDA 12.8, but torch is built for 13.0.*cuda-toolkit-13-0.*image",
        ),
        "no compiler": (
            "g++",
            "no g.., which compiles Triton's kernels and Transformer Engine; apt install g..,.*image",
        ),
        "no headers": ("HEADERS", "no /nowhere/Python.h.*apt install nowhere-dev.*image"),
    }.values(),
    ids=lambda value: value.split(";")[0][:12],
)
def test_what_an_image_lacks_is_said_before_anything_is_downloaded(
    host: dict[str, str], tmp_path: Path, fault: str, said: str
):
    if fault in host:
        host[fault] = "/nowhere"
    elif fault == "nvcc":
        (tmp_path / "cuda/bin/nvcc").write_text(NVCC.format("12.8"))
    else:
        (tmp_path / "bin" / fault).unlink()
    done = install(host, "base")
    assert done.returncode == 1 and re.search(said, done.stderr), done.stderr
    assert pip_calls(host) == []


def test_cuda_is_where_nvcc_has_its_headers(host: dict[str, str], tmp_path: Path):
    del host["CUDA_HOME"]
    (tmp_path / "cuda/bin/nvcc").write_text(NVCC.format("12.8"))
    (tmp_path / "bin/nvcc").symlink_to(tmp_path / "cuda/bin/nvcc")
    assert f"CUDA_HOME={tmp_path}/cuda is of CUDA 12.8" in install(host, "kernels").stderr
    (tmp_path / "cuda/include/cuda_runtime.h").unlink()
    assert f"CUDA_HOME={tmp_path}/cuda" not in install(host, "kernels").stderr
