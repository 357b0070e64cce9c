# SPDX-License-Identifier: Apache-2.0
"""Presence of what Dockerfiles name: files, pins, extras, the folder where launchers look. No image is built here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mrl.ops.launch import main
from tests.sources import ROOT
from tests.waiting import HANG_S

FOLDER = ROOT / "scripts" / "docker"
FILES = [FOLDER / "Dockerfile", FOLDER / "Dockerfile.cpu"]
KNOWN = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and words of each step, comments left out and lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def pins(name: str) -> set[str]:
    return {line.split("==")[0] for line in (ROOT / name).read_text().splitlines() if "==" in line}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_step_is_one_to_docker_and_to_bash(path: Path):
    steps = instructions(path)
    assert {name for name, _ in steps} <= KNOWN
    stages = [words.split()[-1] for name, words in steps if name == "FROM"]
    assert "release" in stages
    for name, words in steps:
        if name == "RUN":
            script = re.sub(r"--mount=\S+ ", "", words)
            assert (
                subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=HANG_S).stderr
                == ""
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_starts_from_the_bytes_of_a_digest(path: Path):
    steps = instructions(path)
    stages = {words.split()[-1] for name, words in steps if name == "FROM"}
    assert {words.split()[0] for name, words in steps if name == "FROM"} <= stages | {"${BASE}"}
    (base,) = [words for name, words in steps if name == "ARG" and words.startswith("BASE=")]
    assert re.fullmatch(r"BASE=[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_images_run_as_a_user_that_owns_none_of_their_files(path: Path):
    stage, user, folder, users, made = "", "root", "", dict[str, tuple[str, str]](), set[str]()
    for name, words in instructions(path):
        if name == "FROM":
            source, _, stage = words.partition(" AS ")
            user, folder = users.get(source, ("root", ""))
        elif name == "USER":
            assert words in made | {"root"}
            user = words
        elif name == "WORKDIR":
            folder = words
        elif name == "RUN":
            made |= set(re.findall(r"useradd .*?(\w+)$", words))
            # Whoever installs is root, and nobody is given what was installed.
            assert user == "root" or not re.search(r"pip|apt-get|installer", words)
            assert "chown" not in words
        users[stage] = (user, folder)
    assert {users[stage] for stage in users if stage.startswith("release")} == {("mrl", "/home/mrl")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_not_ignored(path: Path):
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    for name, words in instructions(path):
        if name == "COPY" and "--from" not in words:
            for source in words.split()[:-1]:
                assert (ROOT / source).exists() and source not in ignored, source
    assert not ignored & {"mrl", "conversion", "configs", "scripts", "tests"}


def test_versions_stand_in_the_constraints_alone():
    for path in FILES:
        constraints = f"constraints-{'cpu' if path.suffix else 'gpu'}.txt"
        text = path.read_text()
        assert constraints.replace(".txt", ".hashes.txt") in text
        # What is looked up in the file has a line there, and what is installed by name is pinned there.
        assert set(re.findall(r"[\^/]([a-z-]+)==", text)) <= pins(constraints)
        assert not re.search(r"(torch|vllm|megatron-core|mamba-ssm|transformer-engine)==\d", text)
    script = (ROOT / "scripts" / "install_gpu.sh").read_text()
    named = re.findall(r"^(?:BUILD|KERNELS)=\((.+)\)$", script, re.MULTILINE)
    assert len(named) == 2 and set(" ".join(named).split()) <= pins("constraints-gpu.txt")


def test_the_gpu_image_is_of_the_cuda_that_torch_is_built_for():
    # Apex refuses another minor version too.
    (image,) = re.findall(r"^ARG BASE=nvidia/cuda:(\d+\.\d+)\.\d+-cudnn-devel-", FILES[0].read_text(), re.MULTILINE)
    (toolkit,) = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE)
    assert image == toolkit


def test_nccl_finds_the_network_cards_of_the_gpu_image():
    # The library without the drivers of the cards finds none, and NCCL takes TCP without a word.
    installed = " ".join(
        words for name, words in instructions(FILES[0]) if name == "RUN" and "apt-get install" in words
    ).split()
    assert {"libibverbs1", "ibverbs-providers"} <= set(installed)


def test_launchers_look_for_the_sources_where_images_have_them(capsys: pytest.CaptureFixture[str]):
    for path in FILES:
        assert ("WORKDIR", "/opt/mrl") in instructions(path)
    assert main(["lepton", "grpo_tiny.yaml", "checkpointing.checkpoint_dir=/mnt/run", "--image", "mrl"]) == 0
    printed = capsys.readouterr().out
    paths = re.findall(r"/opt/mrl/(\S+)", printed + (ROOT / "mrl/ops/launchers/kubernetes.py").read_text())
    assert len(paths) >= 2 and all((ROOT / path.strip('"],')).is_file() for path in paths)
