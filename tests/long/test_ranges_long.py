# SPDX-License-Identifier: Apache-2.0
"""Part "ranges": pyproject.toml resolves to its lowest and its highest versions on every Python, and the unit tests pass on both ends.

torch, Ray, Megatron and vLLM stay as they are installed: lists of exact versions hold them together, and the suites run on these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import uv

from mrl.doctor.findings import normalise
from mrl.doctor.software import applies, release, split_requirement
from tests.index import index_url
from tests.sources import ROOT

pytestmark = [pytest.mark.long("ranges"), pytest.mark.timeout(3600)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"
HELD = ("torch", "ray", "megatron-core")
# Two are made for exactly one version of another; openai 2 needs the third, and openai 3 does not.
WITH = ("pydantic-core", "antlr4-python3-runtime", "distro")
SUITES = ("config", "data", "envs", "rollout", "store", "view", "doctor")
TIMEOUT_S = 3000


def run_uv(*words: object) -> str:
    environment, command = {**os.environ, "UV_DEFAULT_INDEX": index_url()}, [uv.find_uv_bin(), "pip", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resolve(python: str, resolution: str) -> dict[str, str]:
    """Versions by package at one end of the ranges."""
    where = ["--python-version", python, "--python-platform", PLATFORM, "--resolution", resolution]
    where += ["--extra", "cluster", "--extra", "loggers"]
    listed = run_uv("compile", "--quiet", "--no-header", "--no-annotate", *where, "pyproject.toml")
    return {normalise(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", listed, re.MULTILINE)}


def wanted(python: str) -> dict[str, str]:
    texts = [text for extra in ("cluster", "loggers") for text in PROJECT["optional-dependencies"][extra]]
    return dict(split_requirement(text) for text in [*PROJECT["dependencies"], *texts] if applies(text, python))


@pytest.mark.parametrize("python", PYTHONS)
def test_both_ends_resolve_and_lower_bounds_can_be_had(python: str):
    lowest, highest = resolve(python, "lowest-direct"), resolve(python, "highest")
    ranges = wanted(python)
    assert ranges.keys() <= lowest.keys() & highest.keys()
    bounds = {name: re.findall(r"(?:>=|==)([\d.]+)", text)[0] for name, text in ranges.items()}

    def parts(version: str) -> tuple[int, ...]:
        return (*release(version), 0, 0, 0)[:4]

    assert {name: lowest[name] for name, bound in bounds.items() if parts(lowest[name]) != parts(bound)} == {}


@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_unit_tests_pass_at_this_end(resolution: str, tmp_path: Path):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found, names = resolve(python, resolution), [*wanted(python), *WITH]
    pins = [f"{name}=={found[name]}" for name in names if name not in HELD]
    run_uv("install", "--quiet", "--no-deps", "--python", sys.executable, "--target", tmp_path, *pins)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", *(f"tests/unit/{name}" for name in SUITES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
