# SPDX-License-Identifier: Apache-2.0
"""Many processes fill the cache at once, and are killed while they do: there is one result, or none, never a part."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.cache import check_entry
from tests.unit.conversion.cached_models import (
    fill,
    fill_and_die,
    fill_in_files,
    fill_unseeing,
    fill_up_to,
    light_processes,
    save_model,
)
from tests.waiting import HANG_S

NUM_PROCESSES = 8
NUM_KILLS = 16


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def leftovers(root: Path) -> list[str]:
    return [*os.listdir(root / "building"), *os.listdir(root / "leases")]


@pytest.mark.parametrize(("function", "is_seeing"), [(fill, True), (fill_unseeing, False)])
def test_of_many_at_once_all_get_one_result(
    hf: Path, tmp_path: Path, function: Callable[[Path, Path, Path], str], is_seeing: bool
):
    root, log = tmp_path / "cache", tmp_path / "log"
    with light_processes().Pool(NUM_PROCESSES) as pool:
        pending = [pool.apply_async(function, (hf, root, log)) for _ in range(NUM_PROCESSES)]
        found = {result.get(timeout=HANG_S) for result in pending}
    (entry,) = (root / "entries").iterdir()
    assert found == {str(entry / "mcore")}
    check_entry(entry / "mcore")
    assert leftovers(root) == []
    num_builds = len(log.read_text().splitlines())
    assert num_builds == 1 if is_seeing else num_builds > 1


def test_a_kill_at_any_moment_leaves_the_cache_usable(hf: Path, tmp_path: Path):
    log = tmp_path / "log"
    run(fill_up_to, hf, tmp_path / "undisturbed", log, None)
    num_operations = int(log.with_suffix(".operations").read_text())
    num_published = 0
    for last in sorted(random.Random(0).sample(range(1, num_operations + 1), NUM_KILLS)):
        root = tmp_path / f"killed{last}"
        assert run(fill_up_to, hf, root, log, last)
        entries = list((root / "entries").iterdir()) if (root / "entries").exists() else []
        num_published += len(entries)
        for entry in entries:
            check_entry(entry / "mcore")
        run(fill_in_files, hf, root, log)
        (entry,) = (root / "entries").iterdir()
        check_entry(entry / "mcore")
        assert os.listdir(root / "building") == []
    assert num_published < NUM_KILLS / 2, "conversions at work"


def test_the_files_that_a_killed_attempt_finished_are_kept(hf: Path, tmp_path: Path):
    root, log = tmp_path / "cache", tmp_path / "log"
    assert run(fill_and_die, hf, root, log)
    assert os.listdir(root / "entries") == []
    run(fill_in_files, hf, root, log)
    assert log.with_suffix(".kept").read_text().splitlines()[:2] == ["__0_0.distcp", "__1_0.distcp"]
    (entry,) = (root / "entries").iterdir()
    check_entry(entry / "mcore")
    assert os.listdir(root / "building") == []


def run(function: Callable[..., None], *arguments: object) -> bool:
    """Runs a process that fills the cache; tells whether it killed itself."""
    process = light_processes().Process(target=function, args=arguments)
    process.start()
    process.join(timeout=HANG_S)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
