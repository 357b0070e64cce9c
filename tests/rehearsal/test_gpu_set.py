# SPDX-License-Identifier: Apache-2.0
"""The GPU set: what pyproject.toml asks for on GPU hosts resolves to constraints-gpu.txt. Nothing is installed."""

from __future__ import annotations

import os
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest
import uv

from mrl.ops.doctor.findings import normalise
from mrl.ops.doctor.software import read_pins
from tests.index import index_url
from tests.sources import ROOT
from tests.waiting import HANG_S

CONSTRAINTS = ROOT / "constraints-gpu.txt"
EXTRAS = ("gpu", "adapters", "cluster", "loggers")
# The oldest glibc for which every package but those below has a wheel (llguidance asks for 2.31).
PLATFORM = "x86_64-manylinux_2_31"
ONLY_SOURCES = ("causal-conv1d", "mamba-ssm", "pwinput", "transformer-engine-torch")
ESSENTIAL = {
    "torch",
    "triton",
    "vllm",
    "megatron-core",
    "mamba-ssm",
    "causal-conv1d",
    "transformer-engine-torch",
    "nvidia-nccl-cu13",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """uv's environment: this host's index, and a cache for these tests."""
    index = index_url()
    try:
        urllib.request.urlopen(f"{index}/wheel/", timeout=HANG_S).close()
    except OSError as error:
        pytest.skip(f"no package index answers: {error}")
    return {**os.environ, "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(tmp_path_factory.mktemp("uv"))}


def resolve(python: str, constraints: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Packages that uv finds for the project, its extras and the build tools of install_gpu.sh, with wheels if any."""
    (tools,) = re.findall(r"^BUILD=\((.+)\)$", (ROOT / "scripts" / "install_gpu.sh").read_text(), re.MULTILINE)
    words = [uv.find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--constraint", constraints]
    words += [
        "--python-version",
        python,
        "--python-platform",
        PLATFORM,
        "--only-binary",
        ":all:",
        *(word for name in ONLY_SOURCES for word in ("--no-binary", name)),
    ]
    words += [word for extra in EXTRAS for word in ("--extra", extra)]
    return subprocess.run(
        [*words, ROOT / "pyproject.toml", "-"],
        input=tools.replace(" ", "\n"),
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_gpu_set_resolves_to_its_constraints(python: str, environment: dict[str, str]):
    done = resolve(python, CONSTRAINTS, environment)
    assert done.returncode == 0, done.stderr
    resolved = {
        normalise(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE)
    }
    # Nothing without a pin, and no pin that nothing needs.
    assert resolved == read_pins(CONSTRAINTS, python)
    assert resolved.keys() >= ESSENTIAL


def test_a_pin_that_another_package_refuses_is_found(environment: dict[str, str], tmp_path: Path):
    changed = tmp_path / "constraints.txt"
    changed.write_text(CONSTRAINTS.read_text().replace("apache-tvm-ffi==0.1.11", "apache-tvm-ffi==0.1.15.post2"))
    done = resolve("3.11", changed, environment)
    assert done.returncode != 0 and "vllm==0.32.0 depends on apache-tvm-ffi==0.1.11" in " ".join(done.stderr.split())
