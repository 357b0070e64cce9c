# SPDX-License-Identifier: Apache-2.0
"""Shared by the rehearsals: Transformer Engine's Python, and the engines of tests/stack/rollout."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import zipfile
from pathlib import Path

import pytest

from mrl.doctor.software import read_pins
from tests.index import download
from tests.sources import ROOT
from tests.stack.rollout.conftest import checkpoint, start_engine  # noqa: F401


@pytest.fixture(scope="session")
def transformer_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Python of the Transformer Engine that GPU hosts install: a wheel without compiled parts."""
    version = read_pins(ROOT / "constraints-gpu.txt")["transformer-engine"]
    try:
        _, wheel = download("transformer-engine", version, "-py3-none-any.whl")
    except urllib.error.URLError as error:
        pytest.skip(f"no package index answers: {error}")
    assert hashlib.sha256(wheel).hexdigest() in (ROOT / "constraints-gpu.hashes.txt").read_text()
    folder = tmp_path_factory.mktemp("transformer_engine")
    zipfile.ZipFile(io.BytesIO(wheel)).extractall(folder)
    return folder
