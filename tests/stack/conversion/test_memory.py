# SPDX-License-Identifier: Apache-2.0
"""Conversions of models that are large beside the memory that they may take, each in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conversion.convert import differences
from tests.sources import ROOT
from tests.unit.conversion.hf_folders import large_config, write_large_folder

MB = 10**6
# A few times the largest tensor, the embedding of 164 MB; not the size of the model.
MAX_RISE = 600 * MB
VOCABULARY = 40_000


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not outlive the test: pytest keeps those of three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def convert(direction: str, source: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.stack.conversion.children", direction, str(source), str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=True)
    measured = json.loads(ended.stdout.splitlines()[-1])
    assert measured["code"] == 0, ended.stdout
    return measured


def there_and_back(room: Path, num_bytes: int) -> None:
    write_large_folder(room / "hf", large_config(num_bytes, vocabulary=VOCABULARY))
    for direction, source, out in (("hf-to-mcore", "hf", "mcore"), ("mcore-to-hf", "mcore", "back")):
        measured = convert(direction, room / source, room / out)
        assert measured["peak"] - measured["base"] < MAX_RISE, (direction, measured)
    assert list(differences(room / "hf", room / "back")) == []


@pytest.mark.long("conversion")
def test_memory_does_not_grow_with_the_model(room: Path):
    there_and_back(room, 1500 * MB)


@pytest.mark.long("conversion")
@pytest.mark.timeout(3600)
def test_memory_does_not_grow_with_a_model_of_6_gb(room: Path):
    there_and_back(room, 6000 * MB)
