# SPDX-License-Identifier: Apache-2.0
"""Driver's side of checkpoints, with ranks that write and read small files: what it asks of them and reads itself."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from conversion.files.manifest import WRITTEN, FileRecord, WriteReport, file_record, tell_written
from conversion.files.reading import find_difference
from mrl.loop import saving
from mrl.loop.run import Budget
from mrl.loop.saving import CheckpointSaver
from mrl.store.checkpoints import NoWholeCheckpoint, find_damage
from mrl.store.ledger import replay
from mrl.store.run_folder import RunFolder
from mrl.types import RunState
from tests.unit.store.test_run_folder import config
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from mrl.cluster.session import Session

pytestmark = pytest.mark.usefixtures("no_report")

NUM_RANKS = 2


class Ranks:
    """`PolicyGroup`, as the saver sees it."""

    world_size = NUM_RANKS

    def __init__(self) -> None:
        self.hashed: list[tuple[int, str]] = []
        """Rank and file, in order."""
        self.loaded: list[Path] = []
        self.wrote: Path | None = None

    def call(self, verb: Callable, *arguments: Path, deadline_s: float) -> dict[int, object]:
        return {rank: getattr(self, verb.__name__)(rank, *arguments) for rank in range(NUM_RANKS)}

    def call_each(self, verb: Callable, arguments: dict[int, tuple], *, deadline_s: float) -> dict[int, object]:
        return {rank: getattr(self, verb.__name__)(rank, *mine) for rank, mine in arguments.items()}

    def begin_save(self, rank: int, weights: Path) -> str:
        self.wrote = weights
        (weights / "iter_0000000").mkdir(exist_ok=True)
        (weights / "iter_0000000" / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 100)
        return ""

    def finish_save(self, rank: int, timeout_s: float) -> WriteReport:
        assert self.wrote is not None
        name = f"iter_0000000/__{rank}_0.distcp"
        return WriteReport({name: file_record(self.wrote / name)}, 0.0)

    def find_damage(self, rank: int, shards: dict[Path, str]) -> str:
        self.hashed += [(rank, path.name) for path in shards]
        return find_difference(shards)

    def load_checkpoint(self, rank: int, weights: Path) -> None:
        self.loaded.append(weights)


class Attempt:
    """An attempt in the run folder of a test."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.ranks = folder, Ranks()
        session = SimpleNamespace(
            policies=self.ranks, trained_models={"policy": self.ranks}, saving=nullcontext, loading=nullcontext
        )
        self.saver = CheckpointSaver(folder.config, folder, cast("Session", session))
        self.newest = folder.newest_checkpoint()

    def train(self, step: int) -> RunState:
        self.folder.ledger.take(step, [(0, f"p:{step}")])
        self.folder.ledger.train(step, [(0, f"p:{step}")])
        self.folder.log_metrics(step, {"train/loss": float(step)})
        return RunState(step=step)


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Callable[[], Attempt]]:
    """Starts attempts, the first after two steps that have been saved."""
    (tmp_path / "model").mkdir()
    run = config(tmp_path)
    run.checkpointing.metric_name, run.checkpointing.save_period = None, 1

    def start() -> Attempt:
        folder = RunFolder(run)
        folder.open()
        return Attempt(folder)

    first = start()
    for step in (1, 2):
        first.saver.begin(first.train(step))
        first.saver.finish()
    with first.folder:
        pass
    yield start


class Slow(Ranks):
    """Ranks whose files are on disk once `write` is called, and that may fail; they answer no question meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.finished_by = list[str]()
        self.error: Exception | None = None

    def begin_save(self, rank: int, weights: Path) -> str:
        (weights / WRITTEN).touch()
        return super().begin_save(rank, weights)

    def write(self) -> None:
        """Leaves what the ranks leave that have written."""
        assert self.wrote is not None
        tell_written(
            self.wrote, [] if self.error else [super(Slow, self).finish_save(rank, 0.0) for rank in range(NUM_RANKS)]
        )

    def finish_save(self, rank: int, timeout_s: float) -> WriteReport:
        self.finished_by.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return super().finish_save(rank, timeout_s)


def slow(now: Attempt) -> Slow:
    now.ranks = ranks = Slow()
    session = SimpleNamespace(policies=ranks, trained_models={"policy": ranks}, saving=nullcontext, loading=nullcontext)
    now.saver = CheckpointSaver(now.folder.config, now.folder, cast("Session", session))
    return ranks


def test_a_save_is_published_while_the_loop_goes_on(attempt: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saving, "POLL_INTERVAL_S", 0.001)
    now = attempt()
    ranks, marker = slow(now), now.folder.path / "step_3" / "COMPLETE"
    now.saver.begin(now.train(3))
    assert now.saver.take_metrics() == {} and not marker.exists()
    ranks.write()
    wait_until(marker.exists, "the checkpoint")
    assert ranks.finished_by == [], "ranks that train were asked"
    now.saver.finish()
    assert list(marker.parent.rglob(WRITTEN)) == [] and find_damage(marker.parent) is None
    assert now.saver.take_metrics().keys() == {"time/checkpoint_hidden"}


def test_a_checkpoint_waits_for_its_steps_in_the_ledger(
    attempt: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch
):
    now, write = attempt(), os.write
    with monkeypatch.context() as patch:
        # The kernel writes what there is room for, and says how much that was.
        patch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
        state = now.train(3)
        now.saver.begin(state)
        now.saver.finish()
    assert not (now.folder.path / "step_3").exists() and (now.folder.path / "step_2").exists()
    now.saver.save(state)
    assert (now.folder.path / "step_3" / "COMPLETE").exists() and list(replay(now.folder.ledger.path).trained) == [
        1,
        2,
        3,
    ]


def test_whoever_waits_for_a_save_does_not_wait_for_the_next_look(
    attempt: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saving, "POLL_INTERVAL_S", HANG_S)
    now = attempt()
    slow(now)
    now.saver.begin(now.train(3))
    now.saver.save_last(RunState(step=3))
    assert (now.folder.path / "step_3" / "COMPLETE").exists()


def test_what_ends_a_save_ends_the_run_at_the_end_of_its_step(
    attempt: Callable[[], Attempt], caplog: pytest.LogCaptureFixture
):
    now = attempt()
    ranks = slow(now)
    now.saver.load(now.newest, last_step=9)
    ranks.error = OSError("no space left")
    now.saver.begin(now.train(3))
    now.saver.finish()
    assert "the checkpoint of step 3 cannot be written: no space left; the one before it stays: step_2" in caplog.text
    ranks.error = TimeoutError("the file system does not answer")
    now.saver.begin(now.train(4))
    ranks.write()

    def has_ended() -> bool:
        try:
            return now.saver.take_metrics() != {}
        except TimeoutError:
            return True

    wait_until(has_ended, "the error")


def refuse_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has no minutes to hash what hundreds of ranks wrote."""

    def slow(path: Path, **_: object) -> FileRecord:
        assert not path.name.endswith(".distcp"), f"the driver hashes {path}"
        return file_record(path)

    monkeypatch.setattr("conversion.files.reading.sha256_file", lambda path: slow(path).sha256)
    monkeypatch.setattr("mrl.store.checkpoints.sha256_file", lambda path: slow(path).sha256)
    monkeypatch.setattr("mrl.store.checkpoints.file_record", slow)


def flip(folder: Path, rank: int) -> None:
    shard = folder / "policy/weights/iter_0000000" / f"__{rank}_0.distcp"
    content = bytearray(shard.read_bytes())
    content[50] ^= 1
    shard.write_bytes(content)


def test_a_signal_costs_no_look_at_what_has_been_saved(attempt: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch):
    now = attempt()
    refuse_shards(monkeypatch)
    monkeypatch.setattr(now.ranks, "find_damage", lambda rank, shards: "")
    state = now.saver.load(now.newest, last_step=9)
    assert state.step == 2 and now.folder.ledger.state.trained.keys() == {1, 2}
    now.saver.save_last(state)
    assert now.ranks.wrote is None, "the step has been saved"
    now.saver.save_last(now.train(3))
    assert now.ranks.wrote is not None and (now.folder.path / "step_3" / "COMPLETE").exists()
    now.ranks.wrote = None
    now.saver.save_last(RunState(step=3))
    assert now.ranks.wrote is None


def test_every_rank_hashes_its_own_shard_and_the_driver_none(
    attempt: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        refuse_shards(patch)
        now = attempt()
    now.saver.load(now.newest, last_step=9)
    assert now.ranks.hashed == [(0, "__0_0.distcp"), (1, "__1_0.distcp")]
    assert now.newest is not None and [len(share) for share in now.newest.shards(1)] == [2]
    assert [len(share) for share in now.newest.shards(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_goes_on_before_the_shard_that_a_rank_finds_damaged(
    attempt: Callable[[], Attempt], caplog: pytest.LogCaptureFixture, rank: int
):
    now = attempt()
    path = now.folder.path
    flip(path / "step_2", rank)
    state = now.saver.load(now.newest, last_step=9)
    assert state.step == 1 and now.ranks.loaded == [path / "step_1/policy/weights"] * NUM_RANKS
    assert (
        f"passing over {path / 'step_2'}" in caplog.text
        and f"__{rank}_0.distcp does not have the manifest's sha256" in caplog.text
    )
    assert now.folder.ledger.state.trained.keys() == {1}
    now.folder.log_metrics(2, {"train/loss": 7.0})
    assert [line.count('"train/loss"') for line in (path / "metrics.jsonl").read_text().splitlines()] == [1, 1]
    # The damaged step has a marker, and is saved again.
    now.saver.save_last(now.train(2))
    assert now.folder.checkpoints.newest(with_shards=True) == now.newest


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_found_damaged_is_in_the_way_of_no_later_attempt(attempt: Callable[[], Attempt], rank: int):
    now = attempt()
    path, ledger = now.folder.path, now.folder.ledger.path
    before, find = ledger.read_bytes(), now.ranks.find_damage

    def look(rank: int, shards: dict[Path, str]) -> str:
        assert ledger.read_bytes() == before, "ranks look first"
        return find(rank, shards)

    now.ranks.find_damage = look
    flip(path / "step_2", rank)
    # Each attempt makes a step, and is asked to end: by the third, the run is beyond the step that was damaged.
    for step in (2, 3, 4):
        state = now.saver.load(now.newest, last_step=9)
        assert state.step == step - 1 and sorted(now.folder.ledger.state.trained) == list(range(1, step))
        now.saver.save_last(now.train(step))
        with now.folder:
            pass
        kept = range(max(1, step - 2), step + 1)
        assert {folder.name for folder in path.glob("*step_*")} == {"damaged_step_2", *(f"step_{n}" for n in kept)}
        now = attempt()
    assert now.newest is not None and now.newest.step == 4


def of_another_run(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"p:1", b"p:7"))


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("lose", [of_another_run, a_folder, Path.unlink])
def test_a_ledger_that_is_damaged_or_lost_is_that_of_the_newest_checkpoint(
    attempt: Callable[[], Attempt], caplog: pytest.LogCaptureFixture, lose: Callable[[Path], object]
):
    now = attempt()
    ledger, expected = now.folder.ledger.path, now.folder.ledger.state
    with now.folder:
        lose(ledger)
    is_there = ledger.exists()
    for number in (1, 2, 3):
        now = attempt()
        caplog.clear()
        assert now.saver.load(now.newest, last_step=9).step == 2
        assert (now.folder.ledger.state, replay(ledger)) == (expected, expected)
        restored = [line for line in caplog.messages if f"restored from {now.folder.path}/step_2/ledger.jsonl" in line]
        assert len(restored) == (number == 1)
        with now.folder:
            now.folder.ledger.take(3, [(0, "p:3")])
    assert (now.folder.path / "damaged_ledger.jsonl").exists() == is_there


def test_a_damaged_ledger_without_any_checkpoint_costs_nothing(attempt: Callable[[], Attempt]):
    now = attempt()
    with now.folder:
        for step in (1, 2):
            shutil.rmtree(now.folder.path / f"step_{step}")
        now.folder.ledger.path.write_bytes(b"{")
        now.folder.ledger.path.write_bytes(b"7\n")
    for _ in range(2):
        now = attempt()
        assert now.newest is None and now.saver.load(None, last_step=9) == RunState()
        now.train(1)
        with now.folder:
            pass


def test_a_damaged_ledger_that_no_checkpoint_can_replace_is_refused_before_anything_starts(
    attempt: Callable[[], Attempt],
):
    now = attempt()
    with now.folder:
        # As an older version has saved it.
        now.folder.checkpoints.commit(now.folder.checkpoints.begin(RunState(step=3)), {})
        now.folder.ledger.path.write_bytes(b"7\n")
    with pytest.raises(
        ValueError, match=r"ledger\.jsonl:1: .* step 3 holds no copy of the ledger: restore both, move it away"
    ):
        attempt()


def lose_marker(folder: Path) -> None:
    (folder / "COMPLETE").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def truncate_shard(folder: Path) -> None:
    (folder / "policy/weights/iter_0000000/__0_0.distcp").write_bytes(b"")


def break_marker(folder: Path) -> None:
    """Reading it gives EIO."""
    lose_marker(folder)
    (folder / "COMPLETE").symlink_to("/proc/self/mem")


def goes_on(attempt: Callable[[], Attempt], first: int) -> None:
    """Two attempts train one step each."""
    for step in (first, first + 1):
        now = attempt()
        assert now.saver.load(now.newest, last_step=9).step == step - 1
        now.saver.save_last(now.train(step))
        with now.folder:
            pass


@pytest.mark.parametrize("break_", [lose_marker, lose_manifest, truncate_shard, break_marker])
def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(
    attempt: Callable[[], Attempt], tmp_path: Path, break_: Callable
):
    now, path = attempt(), tmp_path / "run"
    with now.folder:
        shutil.copytree(path / "step_1", tmp_path / "copy")
        for step in (1, 2):
            break_(path / f"step_{step}")
    before = {file: file.read_bytes() for file in path.glob("*.json*")}
    for _ in range(2):
        with pytest.raises(
            NoWholeCheckpoint,
            match=r"run: none of its .* step 0 .* step_2: .+; step_1: .+ Restore .* move these folders",
        ):
            attempt()
        assert {file: file.read_bytes() for file in path.glob("*.json*")} == before and not list(path.glob("damaged_*"))
    # A way out: one of them is restored.
    (path / "step_1").rename(tmp_path / "damaged")
    (tmp_path / "copy").rename(path / "step_1")
    goes_on(attempt, 2)


def test_a_run_whose_last_checkpoints_the_ranks_find_damaged_is_not_begun_anew(
    attempt: Callable[[], Attempt], tmp_path: Path
):
    now, path = attempt(), tmp_path / "run"
    before = now.folder.ledger.path.read_bytes()
    with now.folder:
        for step in (1, 2):
            flip(path / f"step_{step}", 1)
        with pytest.raises(NoWholeCheckpoint, match=r"damaged_step_1: .*shard.*; damaged_step_2: .*shard"):
            now.saver.load(now.newest, last_step=9)
    # Nobody has to start ranks again for that.
    with pytest.raises(NoWholeCheckpoint, match=r"damaged_step_1: .*; damaged_step_2: "):
        attempt()
    assert not now.ranks.loaded and now.folder.ledger.path.read_bytes() == before
    # The other way out: all of them are moved away, and the run is begun anew.
    for folder in path.glob("damaged_step_*"):
        folder.rename(tmp_path / folder.name)
    with pytest.raises(
        NoWholeCheckpoint, match=r"gone, of step 1, 2 .* set checkpointing\.allow_changes=\[checkpoints\]"
    ):
        attempt()
    now.folder.config.checkpointing.allow_changes = ["checkpoints"]
    goes_on(attempt, 1)


def test_a_run_whose_first_save_was_interrupted_begins_at_step_0(tmp_path: Path):
    (tmp_path / "model").mkdir()
    settings = config(tmp_path)
    settings.checkpointing.metric_name, settings.checkpointing.save_period = None, 1

    def attempt() -> Attempt:
        folder = RunFolder(settings)
        folder.open()
        return Attempt(folder)

    now = attempt()
    with now.folder:
        pending = now.folder.checkpoints.begin(now.train(1))
        (pending.weights / "__0_0.distcp").write_bytes(b"half")
    goes_on(attempt, 1)


def test_a_clock_that_jumps_costs_nothing(attempt: Callable[[], Attempt], monkeypatch: pytest.MonkeyPatch):
    clock, jumps = time.time, itertools.cycle([1e6, 0.0, -1e6])
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    budget = Budget(1e5, started=time.monotonic())
    for step in (3, 4):
        now = attempt()
        assert now.saver.load(now.newest, last_step=9).step == step - 1
        now.saver.save_last(now.train(step))
        with now.folder:
            assert not budget.is_over
