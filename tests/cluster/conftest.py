# SPDX-License-Identifier: Apache-2.0
"""One Slurm of four nodes for all tests of this folder; how long each scenario of the long part took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.cluster.jobs import model_and_data
from tests.cluster.slurm import PACKAGES, SlurmBox, can_install, missing, slurm_box
from tests.long.record import DATA_FOLDER, Row, commit, record

Scenario = Callable[[str, str], AbstractContextManager[None]]
"""Times a `with` block: what happens, what is checked."""


@pytest.fixture(scope="session")
def inputs() -> list[str]:
    return model_and_data()


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SlurmBox]:
    lacking = missing()
    if lacking is not None:
        what = f"a Slurm of our own needs {lacking}; as root: apt-get install {' '.join(PACKAGES)}"
        (pytest.fail if request.config.getoption("--with-slurm") and can_install() else pytest.skip)(what)
    # Sockets have short names.
    with slurm_box(Path(tmp_path_factory.mktemp("slurm")), num_gpus=2) as running:
        yield running


@pytest.fixture(scope="session")
def scenario() -> Scenario:
    file = DATA_FOLDER / "cluster.json"
    # A scenario can be run alone: the others keep what was measured, and of which commit.
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.exists() else []

    @contextmanager
    def timed(what: str, checked: str) -> Iterator[None]:
        since = time.monotonic()
        yield
        measured: Row = {
            "scenario": what,
            "checked": checked,
            "seconds": round(time.monotonic() - since),
            "commit": commit(),
        }
        rows[:] = [row for row in rows if row["scenario"] != what] + [measured]
        record("cluster", rows)

    return timed
