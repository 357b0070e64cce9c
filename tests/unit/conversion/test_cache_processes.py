"""Many processes fill the cache at once, and are killed while they do: there is one result, or none, never a part."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.cache import check_entry
from tests.unit.conversion.cached_models import fill, fill_and_die, fill_marking, fill_unseeing, light_processes, save_model

NUM_PROCESSES = 8
NUM_KILLS = 20
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def leftovers(root: Path) -> list[str]:
    return [*os.listdir(root / "building"), *os.listdir(root / "leases")]


@pytest.mark.parametrize(("function", "is_seeing"), [(fill, True), (fill_unseeing, False)])
def test_of_many_at_once_all_get_one_result(hf: Path, tmp_path: Path, function: Callable[[Path, Path, Path], str], is_seeing: bool):
    root, log = tmp_path / "cache", tmp_path / "log"
    with light_processes().Pool(NUM_PROCESSES) as pool:
        pending = [pool.apply_async(function, (hf, root, log)) for _ in range(NUM_PROCESSES)]
        found = {result.get(timeout=TIMEOUT_S) for result in pending}
    (entry,) = (root / "entries").iterdir()
    assert found == {str(entry / "mcore")}
    check_entry(entry / "mcore")
    assert leftovers(root) == []
    num_builds = len(log.read_text().splitlines())
    assert num_builds == 1 if is_seeing else num_builds > 1


def test_a_kill_at_any_moment_leaves_the_cache_usable(hf: Path, tmp_path: Path):
    root, log = tmp_path / "cache", tmp_path / "log"
    # The first process waits for the import of torch.
    for _ in range(2):
        discard_all(root)
        started = time.monotonic()
        run(fill_marking, hf, root, log)
        whole_s = time.monotonic() - started

    random_delay = random.Random(0)
    num_cut_short = 0
    for _ in range(10 * NUM_KILLS):
        discard_all(root)
        log.write_text("")
        started = time.monotonic()
        is_killed = run(fill_marking, hf, root, log, kill_after_s=random_delay.uniform(0, whole_s))
        entries = list((root / "entries").iterdir()) if (root / "entries").exists() else []
        for entry in entries:
            check_entry(entry / "mcore")
        has_begun = log.read_text() != ""
        num_cut_short += has_begun and not entries
        # Other work makes the machine slow, and lets it go again.
        if not is_killed:
            whole_s = min(whole_s, time.monotonic() - started)
        elif not has_begun:
            whole_s *= 1.1
        if num_cut_short == NUM_KILLS:
            break
    assert num_cut_short == NUM_KILLS, "conversions at work"
    run(fill_marking, hf, root, log)
    (entry,) = (root / "entries").iterdir()
    check_entry(entry / "mcore")
    assert os.listdir(root / "building") == []


def test_a_kill_in_the_middle_of_a_file_is_continued_there(hf: Path, tmp_path: Path):
    root, log = tmp_path / "cache", tmp_path / "log"
    assert run(fill_and_die, hf, root, log)
    assert os.listdir(root / "entries") == []
    run(fill_marking, hf, root, log)
    (num_items,) = log.with_suffix(".continued").read_text().splitlines()
    assert int(num_items) > 1
    (entry,) = (root / "entries").iterdir()
    check_entry(entry / "mcore")
    assert os.listdir(root / "building") == []


def run(function: Callable[[Path, Path, Path], None], hf: Path, root: Path, log: Path, *, kill_after_s: float | None = None) -> bool:
    """Whether a process that fills the cache was killed: after a while, or by itself."""
    process = light_processes().Process(target=function, args=(hf, root, log))
    process.start()
    process.join(timeout=TIMEOUT_S if kill_after_s is None else kill_after_s)
    if kill_after_s is not None:
        # Does nothing to one that has ended.
        process.kill()
        process.join(timeout=TIMEOUT_S)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def discard_all(root: Path) -> None:
    """Removes the entries only: what killed processes left stays."""
    shutil.rmtree(root / "entries", ignore_errors=True)
