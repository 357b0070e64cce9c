# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the run folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Synced:
    """The calls of `os.fsync`, in order: the path of each file or folder at that moment, and its size."""

    calls: list[tuple[Path, int]] = field(default_factory=list)

    def note(self, descriptor: int) -> None:
        self.calls.append((Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size))


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    found = Synced()
    sync = os.fsync

    def noted(descriptor: int) -> None:
        found.note(descriptor)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found
