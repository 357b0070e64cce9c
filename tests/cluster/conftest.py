"""One Slurm of four nodes for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import model_and_data
from tests.cluster.slurm import PACKAGES, SlurmBox, can_install, missing, slurm_box


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return model_and_data(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmBox]:
    lacking = missing()
    if lacking is not None:
        what = f"a Slurm of our own needs {lacking}; as root: apt-get install {' '.join(PACKAGES)}"
        # Where it can be installed, its absence is a failure.
        (pytest.fail if can_install() else pytest.skip)(what)
    # Sockets have short names.
    with slurm_box(Path(tmp_path_factory.mktemp("slurm"))) as running:
        yield running
