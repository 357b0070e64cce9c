# SPDX-License-Identifier: Apache-2.0
"""Two who see the same folder find each other's files; two who do not are told apart, in either direction."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conversion.files.owners import answer_canary, is_answered, release_canary, retire_canary


def test_who_shares_a_folder_is_seen(tmp_path: Path):
    canary = release_canary(tmp_path / "cache")
    for name in ("0", "1"):
        assert answer_canary(canary, name, patience_s=0)
        assert is_answered(canary, name, patience_s=0)
    assert not is_answered(canary, "2", patience_s=0)
    retire_canary(canary)
    assert list(canary.parent.iterdir()) == []


def test_who_has_another_folder_of_that_name_is_not(tmp_path: Path):
    """Each host has a folder of its own at the path that it is told."""
    canary = release_canary(tmp_path / "driver")
    theirs = Path(str(canary).replace("driver", "node"))
    assert not answer_canary(theirs, "0", patience_s=0.1)
    # Synchronised now and then instead of shared: the canary is there, but the answer never comes back.
    shutil.copytree(canary.parent, theirs.parent)
    assert answer_canary(theirs, "0", patience_s=0)
    assert not is_answered(canary, "0", patience_s=0.1)


@pytest.mark.parametrize("content", ["", "another one"])
def test_a_file_of_that_name_is_not_enough(tmp_path: Path, content: str):
    canary = release_canary(tmp_path)
    canary.write_text(content)
    assert not answer_canary(canary, "0", patience_s=0)
