"""Many processes fill the cache at once, and are killed while they do: there is one result, or none, never a part."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from conversion.cache import check_entry
from tests.unit.conversion.cached_models import fill, fill_unseeing, light_processes, save_model

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
    context = light_processes()
    # The first process waits for the import of torch.
    for _ in range(2):
        discard_all(root)
        started = time.monotonic()
        run_and_kill(context, hf, root, log, after_s=None)
        whole_s = time.monotonic() - started
    discard_all(root)

    random_delay = random.Random(0)
    num_cut_short = 0
    log.unlink()
    for _ in range(NUM_KILLS):
        run_and_kill(context, hf, root, log, after_s=random_delay.uniform(0, whole_s))
        entries = list((root / "entries").iterdir()) if root.exists() and (root / "entries").exists() else []
        num_cut_short += not entries
        for entry in entries:
            check_entry(entry / "mcore")
        discard_all(root)
    num_begun = len(log.read_text().splitlines())
    assert num_begun >= NUM_KILLS // 2 and num_cut_short >= NUM_KILLS // 2, "most kills hit a conversion at work"
    run_and_kill(context, hf, root, log, after_s=None)
    (entry,) = (root / "entries").iterdir()
    check_entry(entry / "mcore")
    assert os.listdir(root / "building") == []


def run_and_kill(context: ForkServerContext, hf: Path, root: Path, log: Path, *, after_s: float | None) -> None:
    """One process that fills the cache, killed after a while, or waited for."""
    process = context.Process(target=fill, args=(hf, root, log))
    process.start()
    process.join(timeout=TIMEOUT_S if after_s is None else after_s)
    if after_s is None:
        assert process.exitcode == 0
    elif process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join(timeout=TIMEOUT_S)


def discard_all(root: Path) -> None:
    """Removes the entries only: what killed processes left stays."""
    shutil.rmtree(root / "entries", ignore_errors=True)
