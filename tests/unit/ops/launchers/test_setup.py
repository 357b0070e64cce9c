# SPDX-License-Identifier: Apache-2.0
"""scripts/setup.sh and install_gpu.sh on all hosts: Python, packages and kernels each gets, and what it refuses first.

The host is a stub: nvidia-smi, nvcc and the compiler say what a host of its kind does, and Python writes down what is
installed and run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mrl.kernels import KERNELS
from tests.sources import ROOT
from tests.waiting import HANG_S

TOOLS = (
    "awk bash cat cp dirname env flock grep head mkdir mktemp mv nproc readlink rm sed sha256sum sleep sort tr uname"
)
# An interpreter, and the one of an environment that it makes. Both know their version by the name of the first.
PYTHON = """#!/bin/bash
self=$(readlink -f "$0") version=$(cat "${0%/*}/version" 2>/dev/null || echo "${0##*/python}")
case "$*" in
    *ensurepip*) [[ "$*" == *"(${version/./, })"* ]] ;;
    --version) echo "Python $version.1" ;;
    "-m venv --clear "*)
        echo "venv ${4##*/} $version" >>"$LOG"
        rm -rf "$4" && mkdir -p "$4/bin" && cp "$self" "$4/bin/python" && echo "$version" >"$4/bin/version" ;;
    *runpy*) echo None ;;
    *urllib*) ;;
    *libnuma*) [[ -z ${NO_NUMA:-} ]] ;;
    *"get_path('include')"*) echo "$HEADERS" ;;
    *"get_path('platlib')"*) echo /site ;;
    "-c "* | *uv_settings.py) ;;
    *)
        words="$*" before=""
        for word in "$@"; do
            if [[ $before == --requirement ]]; then
                words="${words/"$word"/"$(sed -nE 's/^([a-zA-Z0-9_.-]+)==.*/\\1/p' "$word" | tr '\\n' ' ')"}"
            fi
            before=$word
        done
        echo "$words MRL_CPU=${MRL_CPU:-}" >>"$LOG" ;;
esac
"""
SMI = """#!/bin/bash
case "$*" in
    --list-gpus) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)" ;;
    --query-gpu=compute_cap*) echo {capability} ;;
    *) echo "| NVIDIA-SMI 580.65.06   Driver Version: {driver}   {cuda} |" ;;
esac
"""
GPU = dict(capability="9.0", driver="580.65.06", cuda="CUDA Version: 13.0")
NVCC = "#!/bin/bash\necho Cuda compilation tools, release {0}, V{0}.88\n"
HANGS = "#!/bin/bash\nsleep 1000\n"
LIMIT = re.compile(r"^LIMIT_S=60$", re.MULTILINE)


@dataclass(frozen=True)
class Host:
    """One kind of host. Files that are None are absent."""

    smi: str | None = SMI.format(**GPU)
    nvcc: str | None = NVCC.format("13.0")
    pythons: tuple[str, ...] = ("3.11", "3.12")
    gxx: bool = True
    headers: bool = True
    variables: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Outcome:
    """The set and the Python that the host gets."""

    kind: str
    """gpu, plain (for GPUs without compiled kernels), cpu, or refused."""
    said: str = ""
    python: str = ""


NO_KERNELS = r"Without compiled kernels \(transformer-engine-torch causal-conv1d mamba-ssm\): "
HOSTS = {
    "no GPU": (Host(smi=None, nvcc=None), Outcome("cpu")),
    "no libnuma": (
        Host(smi=None, nvcc=None, variables={"NO_NUMA": "1"}),
        Outcome("refused", "apt-get install libnuma1"),
    ),
    "GPUs, no libnuma": (Host(variables={"NO_NUMA": "1"}), Outcome("gpu")),
    "nvidia-smi prints nothing": (Host(smi="#!/bin/bash\n"), Outcome("cpu", r"lists no GPU \(it says nothing\)")),
    "an empty file called nvidia-smi": (Host(smi=""), Outcome("cpu", r"lists no GPU")),
    "no driver behind nvidia-smi": (
        Host(smi="#!/bin/bash\necho NVIDIA-SMI has failed\nexit 9\n"),
        Outcome("cpu", r"\(NVIDIA-SMI has failed\)"),
    ),
    "nvidia-smi hangs": (Host(smi=HANGS), Outcome("refused", "no answer within 1 s.*driver hangs.*MRL_CPU=1")),
    "nvcc 13": (Host(), Outcome("gpu")),
    "nvcc 13.1": (Host(nvcc=NVCC.format("13.1")), Outcome("gpu")),
    "nvcc 13, Python 3.13 and 3.11": (Host(pythons=("3.11", "3.13")), Outcome("gpu", python="3.13")),
    "nvcc 13, Python 3.11": (Host(pythons=("3.11",)), Outcome("gpu", python="3.11")),
    "no nvcc": (
        Host(nvcc=None),
        Outcome("plain", NO_KERNELS + r"no nvcc.*cuda-toolkit-13-0.*\n.*install_gpu.sh kernels"),
    ),
    "nvcc 12": (Host(nvcc=NVCC.format("12.8")), Outcome("plain", NO_KERNELS + "nvcc .*is of CUDA 12.8")),
    "nvcc hangs": (Host(nvcc=HANGS), Outcome("plain", NO_KERNELS + "nvcc .*is of CUDA unknown")),
    "no compiler": (Host(gxx=False), Outcome("refused", r"no g\+\+.*apt install g\+\+")),
    "no Python.h": (Host(headers=False), Outcome("refused", "no .*Python.h.*apt install")),
    "driver for CUDA 12": (
        Host(smi=SMI.format(**GPU | dict(driver="550.90.07", cuda="CUDA Version: 12.4"))),
        Outcome("refused", r"driver \(550\) runs CUDA up to 12.*580 or newer.*MRL_CPU=1"),
    ),
    "driver that does not name its CUDA": (
        Host(smi=SMI.format(**GPU | dict(driver="535.1", cuda=""))),
        Outcome("refused", r"\(535\).*580"),
    ),
    "driver in other words": (
        Host(smi=SMI.format(**GPU | dict(driver="610.1", cuda="CUDA UMD Version: 13.3"))),
        Outcome("gpu"),
    ),
    "old GPU": (
        Host(smi=SMI.format(**GPU | dict(capability="7.0"))),
        Outcome("refused", "capability 7.0 is too old.*7.5"),
    ),
    "MRL_CPU=1": (Host(variables={"MRL_CPU": "1"}), Outcome("cpu")),
    "MRL_CPU=1, nvidia-smi hangs": (Host(smi=HANGS, variables={"MRL_CPU": "1"}), Outcome("cpu")),
    "MRL_CPU=0": (Host(variables={"MRL_CPU": "0"}), Outcome("gpu")),
}


class Stub:
    """A stub host with a copy of the scripts. `run` returns exit code and output; `log` what Python was asked for."""

    def __init__(self, folder: Path, host: Host) -> None:
        self.root = folder / "mrl"
        (self.root / "scripts").mkdir(parents=True)
        for path in (ROOT / "scripts").glob("*.*"):
            text, count = LIMIT.subn("LIMIT_S=1", path.read_text(encoding="utf-8"))
            assert count == (path.name == "install_gpu.sh")
            (self.root / "scripts" / path.name).write_text(text, encoding="utf-8")
        for path in (*ROOT.glob("constraints-*.txt"), ROOT / "pyproject.toml"):
            (self.root / path.name).write_bytes(path.read_bytes())
        self.bin, self.log_file = folder / "bin", folder / "log"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.cuda = folder / "cuda"
        (self.cuda / "include").mkdir(parents=True)
        headers = folder / "python3.12"
        headers.mkdir()
        if host.headers:
            (headers / "Python.h").touch()
        for version in host.pythons:
            self.write(self.bin / f"python{version}", PYTHON)
        if host.gxx:
            self.write(self.bin / "g++", "#!/bin/bash\n")
        if host.smi is not None:
            self.write(self.bin / "nvidia-smi", host.smi)
        if host.nvcc is not None:
            self.add_nvcc(host.nvcc)
        named = dict(PATH=self.bin, HOME=folder, LOG=self.log_file, HEADERS=headers, CUDA_HOME=self.cuda, TMPDIR="/tmp")
        self.environment = {name: str(value) for name, value in named.items()} | dict(host.variables or {})

    def add_nvcc(self, text: str) -> None:
        self.write(self.cuda / "bin" / "nvcc", text)
        (self.cuda / "include" / "cuda_runtime.h").touch()

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *words: str, **variables: str) -> tuple[int, str]:
        self.log_file.unlink(missing_ok=True)
        environment = {**self.environment, **variables}
        command = ["bash", str(self.root / "scripts" / script), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
        return done.returncode, done.stdout + done.stderr

    @property
    def log(self) -> list[str]:
        return self.log_file.read_text().splitlines() if self.log_file.exists() else []

    @property
    def installed(self) -> set[str]:
        """Packages that pip or uv was asked to install, and wheels that were asked for."""
        lines = [
            line
            for line in self.log
            if re.match(r"-m (pip (install|wheel)|uv pip install)", line) and "--editable" not in line
        ]
        return {word for line in lines for word in line.partition(" MRL_CPU=")[0].split() if word in ALL}

    @property
    def environments(self) -> list[str]:
        return [line for line in self.log if line.startswith("venv ")]

    @property
    def programs(self) -> list[str]:
        return [line for line in self.log if re.match(r"-m (mrl|tests)\.", line)]


def listed(kind: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", (ROOT / f"constraints-{kind}.txt").read_text(), re.MULTILINE))


ALL = listed("cpu") | listed("gpu") | listed("dev")
COMPILED = {kernels.package for kernels in KERNELS}
WITH_COMPILED = COMPILED | {"transformer-engine", "transformer-engine-cu13"}
WANTED = {"gpu": listed("gpu"), "plain": listed("gpu") - WITH_COMPILED, "cpu": listed("cpu")}


@pytest.mark.parametrize("name", HOSTS)
def test_the_quickstart_installs_what_the_host_can_use_and_trains(name: str, tmp_path: Path):
    host, wanted = HOSTS[name]
    stub = Stub(tmp_path, host)
    code, said = stub.run("quickstart.sh", "grpo.seed=1")
    assert re.search(wanted.said, said, re.DOTALL), said
    if wanted.kind == "refused":
        assert (code, stub.log) == (1, [])
        return
    assert code == 0, said
    python = wanted.python or ("3.11" if wanted.kind == "cpu" else "3.12")
    assert stub.environments == [f"venv .venv {python}"]
    assert stub.installed - {"uv"} == WANTED[wanted.kind] - {"uv"}
    chosen = host.variables.get("MRL_CPU", "") if host.variables else ""
    assert stub.programs == [
        f"-m mrl.prepare tiny MRL_CPU={chosen}",
        f"-m mrl.train grpo_tiny.yaml grpo.seed=1 MRL_CPU={chosen}",
    ]
    assert ("Without compiled kernels" in said) == (wanted.kind == "plain")
    # A second start installs nothing.
    assert stub.run("quickstart.sh")[0] == 0
    assert stub.environments == [] and stub.installed == set() and len(stub.programs) == 2


@pytest.mark.parametrize(
    "name", ["no GPU", "nvidia-smi hangs", "nvcc 13", "no nvcc", "driver for CUDA 12", "MRL_CPU=1"]
)
def test_the_suites_run_on_cpus_beside_the_environment_for_gpus(name: str, tmp_path: Path):
    host, wanted = HOSTS[name]
    stub = Stub(tmp_path, host)
    code, said = stub.run("test.sh", "unit")
    if name == "nvidia-smi hangs":
        assert (code, stub.log) == (1, [])
        return
    assert code == 0, said
    is_beside = wanted.kind in ("gpu", "plain", "refused")
    assert stub.environments == [f"venv {'.venv-cpu' if is_beside else '.venv'} 3.11"]
    assert stub.installed == listed("cpu") | listed("dev")
    chosen = "1" if is_beside or "MRL_CPU=1" in name else ""
    assert stub.programs == [f"-m tests.runner unit MRL_CPU={chosen}"]


def test_an_environment_for_cpus_is_replaced_by_one_for_gpus_and_back(tmp_path: Path):
    stub = Stub(tmp_path, Host())
    for variables, kind, python in (
        ({"MRL_CPU": "1"}, "cpu", "3.11"),
        ({}, "gpu", "3.12"),
        ({"MRL_CPU": "1"}, "cpu", "3.11"),
    ):
        assert stub.run("quickstart.sh", **variables)[0] == 0
        assert stub.environments == [f"venv .venv {python}"]
        assert stub.installed - {"uv"} == WANTED[kind] - {"uv"}


def test_a_host_that_is_refused_keeps_its_environment(tmp_path: Path):
    stub = Stub(tmp_path, Host())
    assert stub.run("quickstart.sh", MRL_CPU="1")[0] == 0
    (stub.bin / "g++").unlink()
    assert stub.run("quickstart.sh")[0] == 1
    assert stub.run("quickstart.sh", MRL_CPU="1")[0] == 0 and stub.installed == set()


def test_kernels_are_added_once_there_is_nvcc(tmp_path: Path):
    stub = Stub(tmp_path, Host(nvcc=None))
    assert stub.run("quickstart.sh")[0] == 0
    python = str(stub.root / ".venv/bin/python")
    code, said = stub.run("install_gpu.sh", "kernels", PYTHON=python)
    assert code == 1 and "no nvcc" in said and stub.log == []
    stub.add_nvcc(NVCC.format("13.0"))
    assert stub.run("install_gpu.sh", "kernels", PYTHON=python)[0] == 0
    assert stub.installed - {"wheel"} == WITH_COMPILED  # pip's own word
    assert stub.run("quickstart.sh")[0] == 0 and stub.installed == set()


def test_images_are_not_built_without_kernels(tmp_path: Path):
    stub = Stub(tmp_path, Host(smi=None, nvcc=None))
    code, said = stub.run("install_gpu.sh", "base", PYTHON=str(stub.bin / "python3.12"))
    assert code == 1 and "no nvcc" in said and stub.log == []


def test_an_installation_for_gpus_shows_its_progress(tmp_path: Path):
    stub = Stub(tmp_path, Host())
    said = stub.run("quickstart.sh")[1]
    steps = [line for line in said.splitlines() if line.startswith(("Installing", "Getting", "Installed"))]
    assert len(steps) == 7, said
    assert not [line for line in stub.log if "--quiet" in line and "constraints" in line]


def test_lists_pages_and_tests_name_the_same_versions_of_python():
    supported = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    for kind in ("cpu", "gpu"):
        low, high = re.findall(
            r"^# .*Python 3\.(\d+) to 3\.(\d+)\)", (ROOT / f"constraints-{kind}.txt").read_text(), re.MULTILINE
        )[0]
        assert {f"3.{minor}" for minor in range(int(low), int(high) + 1)} == supported
    tried = re.findall(r'PYTHONS="(.+?)"', (ROOT / "scripts" / "setup.sh").read_text())
    assert len(tried) == 2 and all(set(versions.split()) == supported for versions in tried)
    (row,) = re.findall(r"^\| Python (.+?) \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert set(row.split(", ")) == supported
    (resolved,) = re.findall(
        r'parametrize\("python", \[(.+?)\]', (ROOT / "tests" / "rehearsal" / "test_gpu_set.py").read_text()
    )
    assert set(re.findall(r"[\d.]+", resolved)) == supported
