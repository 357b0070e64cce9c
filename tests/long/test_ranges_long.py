# SPDX-License-Identifier: Apache-2.0
"""Part "ranges": pyproject.toml resolves to its lowest and its highest versions on every Python, and every lower bound can be had."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
import uv

from mrl.doctor.findings import normalise
from mrl.doctor.software import applies, release, split_requirement
from tests.index import index_url
from tests.sources import ROOT

pytestmark = [pytest.mark.long("ranges"), pytest.mark.timeout(1200)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"
TIMEOUT_S = 900


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
