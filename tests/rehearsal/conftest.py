# SPDX-License-Identifier: Apache-2.0
"""Shared by the rehearsals: Transformer Engine's Python, and the engines of tests/stack/rollout."""

from __future__ import annotations

import functools
import hashlib
import io
import urllib.error
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.ops.doctor.software import read_pins
from tests import megatron
from tests.index import download
from tests.rehearsal.children import rows_of
from tests.sources import ROOT
from tests.stack.rollout.conftest import checkpoint, start_engine  # noqa: F401


@pytest.fixture(scope="session")
def newest_megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which a child imports the megatron-core of newer Pythons."""
    return megatron.environment(megatron.unpack_newest(tmp_path_factory.mktemp("megatron")))


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


@pytest.fixture(scope="session")
def rows_by_part(
    request: pytest.FixtureRequest, transformer_engine: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, list[dict[str, Any]]]]:
    """Rows of gpu_rows.py by part, for a key of large_run.RANKS; one process a key."""

    @functools.cache
    def rows(key: str) -> dict[str, list[dict[str, Any]]]:
        environment = request.getfixturevalue("newest_megatron") if key == "newest" else None
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows_of("gpu_rows", transformer_engine, tmp_path_factory.mktemp(key), key, environment=environment):
            found.setdefault(row["part"], []).append(row["row"])
        return found

    return rows


@pytest.fixture(scope="module", params=["installed", "newest"])
def version(request: pytest.FixtureRequest) -> str:
    """The megatron-core of a child: the installed one, or that of newer Pythons."""
    return request.param
