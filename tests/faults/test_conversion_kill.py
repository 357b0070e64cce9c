# SPDX-License-Identifier: Apache-2.0
"""Conversions that are killed at any point leave nothing that looks complete, and the next one goes on from there."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from conversion import convert as conversion_module
from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf, differences, faults_against_manifest
from tests.unit.conversion.cached_models import light_processes
from tests.unit.conversion.hf_folders import large_config, write_large_folder

MAX_FILE_BYTES = 40_000_000
DIRECTIONS = ("hf-to-mcore", "mcore-to-hf")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill") / "hf"
    write_large_folder(folder, large_config(120_000_000, vocabulary=2000))
    return folder


def to_mcore(source: Path, out: Path) -> None:
    convert_hf_to_mcore(source, out)


def to_hf(source: Path, out: Path) -> None:
    convert_mcore_to_hf(source, out, max_shard_bytes=MAX_FILE_BYTES)


def in_child(convert: Callable[[Path, Path], None], source: Path, out: Path) -> BaseProcess:
    process = light_processes().Process(target=in_small_files, args=(convert, source, out))
    process.start()
    return process


def in_small_files(convert: Callable[[Path, Path], None], source: Path, out: Path) -> None:
    # A forked child must not wait for threads that only its parent has.
    torch.set_num_threads(1)
    conversion_module.MAX_FILE_BYTES = MAX_FILE_BYTES
    convert(source, out)


def kill_at(num_bytes: int, process: BaseProcess, folder: Path) -> None:
    """Kills the process once the unfinished outputs in `folder` hold `num_bytes`, or lets it end."""
    while process.is_alive() and sum(size(path) for path in folder.glob(".out.partial@*")) < num_bytes:
        time.sleep(0.001)
    process.kill()
    process.join()


def is_begun(folder: Path) -> bool:
    """Tells whether an unfinished output in `folder` has a whole file."""
    names = (name for path in folder.glob(".out.partial@*") for _, _, found in os.walk(path) for name in found)
    return any(name.endswith(".finished") for name in names)


def size(folder: Path) -> int:
    """Bytes of the files in a folder that another process writes and renames meanwhile."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(root, name))
    return total


def content(folder: Path) -> dict[str, str]:
    """Checksums of all files except those that tell times and places."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("direction", "num_kills"),
    [
        ("hf-to-mcore", 8),
        ("mcore-to-hf", 5),
        *(pytest.param(name, 20, marks=pytest.mark.long("kills")) for name in DIRECTIONS),
    ],
)
def test_what_a_killed_conversion_left_is_continued(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: str, num_kills: int
):
    monkeypatch.setattr(conversion_module, "MAX_FILE_BYTES", MAX_FILE_BYTES)
    source, convert = hf, to_mcore
    if direction == "mcore-to-hf":
        to_mcore(hf, tmp_path / "mcore")
        source, convert = tmp_path / "mcore", to_hf
    convert(source, tmp_path / "whole")
    num_bytes = size(tmp_path / "whole")
    random.seed(direction)
    out, num_kept = tmp_path / "out", 0
    for _ in range(num_kills):
        kill_at(random.randrange(num_bytes), in_child(convert, source, out), tmp_path)
        if out.exists():
            # It was faster this time. What is there is whole, and the next round begins anew.
            assert content(out) == content(tmp_path / "whole")
            out.rename(tmp_path / f"done{time.monotonic_ns()}")
        leftovers = list(tmp_path.glob(".out.partial@*"))
        assert len(leftovers) <= 1
        num_kept += any(True for path in leftovers for _ in path.rglob("*.finished"))
    assert num_kept > num_kills // 4, "the kills came before anything was written"
    convert(source, out)
    assert content(out) == content(tmp_path / "whole")
    assert list(faults_against_manifest(out)) == list(differences(hf, out)) == []
    assert not list(tmp_path.glob(".out.partial@*"))


def test_a_leftover_of_another_source_is_not_continued(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversion_module, "MAX_FILE_BYTES", MAX_FILE_BYTES)
    while not is_begun(tmp_path):
        # The first time, or it was faster than this loop looks.
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = in_child(to_mcore, hf, tmp_path / "out")
        while process.is_alive() and not is_begun(tmp_path):
            time.sleep(0.001)
        process.kill()
        process.join()
    write_large_folder(tmp_path / "other", large_config(120_000_000, vocabulary=2000))
    to_mcore(tmp_path / "other", tmp_path / "out")
    assert list(differences(tmp_path / "other", tmp_path / "out")) == []
    assert not list(tmp_path.glob(".out.partial@*"))


def test_a_live_conversion_is_left_alone(hf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    process = in_child(to_mcore, hf, tmp_path / "out")
    while not list(tmp_path.glob(".out.partial@*/content")):
        time.sleep(0.001)
    with caplog.at_level(logging.INFO):
        try:
            to_mcore(hf, tmp_path / "out")
        except ValueError as error:
            assert "exists" in str(error)
    process.join()
    assert list(faults_against_manifest(tmp_path / "out")) == []
    assert not list(tmp_path.glob(".out.partial@*"))
