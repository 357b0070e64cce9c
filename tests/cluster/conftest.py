# SPDX-License-Identifier: Apache-2.0
"""One Slurm of four nodes for all tests of this folder; each scenario of the long part prints how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.cluster.jobs import model_and_data
from tests.cluster.slurm import PACKAGES, SlurmBox, can_install, missing, slurm_box

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
    @contextmanager
    def timed(what: str, checked: str) -> Iterator[None]:
        since = time.monotonic()
        yield
        print(f"{what}: {checked}: {time.monotonic() - since:.0f} s")

    return timed
