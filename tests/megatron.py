# SPDX-License-Identifier: Apache-2.0
"""The megatron-core of newer Pythons, whose sources run here as they are if they come before the installed ones.

With NVIDIA's emerging-optimizers beside it, which has Muon.
"""

from __future__ import annotations

import hashlib
import io
import os
import urllib.error
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from mrl.ops.doctor.software import read_pins
from tests.index import download
from tests.sources import ROOT

PYTHON = "3.12"
VERSION = read_pins(ROOT / "constraints-gpu.txt", PYTHON)["megatron-core"]
IS_NEWEST = version("megatron-core") == VERSION
"""True where this process has it, as with `environment`, or on a newer Python."""
# Of its compiled part, an index of data sets, mrl uses nothing.
WHEEL = "-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"


MUON = ("emerging-optimizers", "0.3.0", "e993682a8b93b6953b3056b0d4e2714e3a3182b0c85f456bcc78d76cd7b47429")
OVERRIDE = "import typing, typing_extensions\ntyping.override = typing_extensions.override\n"
"""First lines of that package where Python is older than it asks."""


def unpack_newest(folder: Path) -> Path:
    """Fills `folder` with sources of listed hash from the package index and returns it; skips without an index."""
    try:
        return fetch(folder)
    except urllib.error.URLError as error:
        pytest.skip(f"no package index answers: {error}")


def fetch(folder: Path) -> Path:
    """Fills `folder` as `unpack_newest` does; raises URLError without an index."""
    _, wheel = download("megatron-core", VERSION, WHEEL)
    assert hashlib.sha256(wheel).hexdigest() in (ROOT / "constraints-gpu.hashes.txt").read_text()
    zipfile.ZipFile(io.BytesIO(wheel)).extractall(folder)
    _, wheel = download(*MUON[:2], "-py3-none-any.whl")
    assert hashlib.sha256(wheel).hexdigest() == MUON[2]
    zipfile.ZipFile(io.BytesIO(wheel)).extractall(folder)
    first = folder / "emerging_optimizers" / "__init__.py"
    first.write_text(OVERRIDE + first.read_text())
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Environment of a process, and of its children, that imports Megatron from `folder`."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
