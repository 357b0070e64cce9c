# SPDX-License-Identifier: Apache-2.0
"""Work beside the rollouts: rewards of those that have finished, and the writing of the checkpoint before them."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mrl.envs.task import Task
from mrl.loop.saving import SaveFailed
from mrl.store.checkpoints import find_damage
from mrl.types import Prompt, RolloutGroup, Verdict
from tests.drivers import call, do, train_step
from tests.stack.loop.conftest import CoinToss, LiveRun, toss
from tests.waiting import wait_until

TEST_EPOCH = -2


def wait_for(path: Path) -> None:
    wait_until(path.exists, str(path))


class HeldBack(CoinToss):
    """Judges nothing before there is a file `may_score`; `has_begun` says that it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def judge(self, task: Task) -> Verdict:
        (self.folder / "has_begun").touch()
        while not (self.folder / "may_score").exists():
            await asyncio.sleep(0.05)
        return await super().judge(task)


def set_environment(actor, environment: object) -> None:
    actor.scorer.environments["math"] = environment


def test_rewards_begin_during_the_generation_and_do_not_hold_it_up(live: LiveRun, tmp_path: Path):
    run = live.run
    run.supplier.session.rewards.apply(set_environment, HeldBack(tmp_path))
    collector, prompts = run.supplier.session.collector, list(run.supplier.data.train[:64])

    def ask(prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        asked, version = [(TEST_EPOCH, prompt) for prompt in prompts], live.state.weight_version
        sampling = run.supplier.data.sampling
        return call(lambda: collector.ask(asked, sampling, num_generations=4, weight_version=version))

    first = ask(prompts[:1])
    wait_until(lambda: first[0].num_missing == 0, "first group")
    book = run.supplier.session.engines.book
    call(book.hold, True)
    others = ask(prompts[1:])
    # These wait until the first ones are being judged, and end although no verdict is given.
    wait_for(tmp_path / "has_begun")
    assert all(group.num_missing == 4 for group in others)
    call(book.hold, False)
    do(collector.wait(lambda: all(group.num_missing == 0 for group in others)))
    assert all(group.num_unjudged == 4 for group in (*first, *others))
    (tmp_path / "may_score").touch()
    groups, seconds = do(collector.judge([*first, *others]))
    assert [group.prompt for group in groups] == prompts
    for group in groups:
        assert [rollout.rollout_index for rollout in group.rollouts] == [0, 1, 2, 3]
        assert list(group.verdicts) == [toss(verdict.text) for verdict in group.verdicts]
    assert seconds > 0
    run.supplier.session.rewards.apply(set_environment, CoinToss())


def hold_back_writing(_: object, may_write: Path) -> None:
    from mrl.policy.checkpoint import CheckpointWrite

    write_own = CheckpointWrite._write_own

    def write_later(self: CheckpointWrite, write: Callable[[], None]):
        wait_for(may_write)
        return write_own(self, write)

    CheckpointWrite._write_own = write_later


def test_the_next_step_does_not_wait_for_the_checkpoint(live: LiveRun, tmp_path: Path):
    # Before the first step the optimizer has no state to save.
    train_step(live.run, live.state)
    step, folder = live.state.step, live.run.folder.path
    live.on_ranks(hold_back_writing, tmp_path / "may_write")
    live.run.saver.begin(live.state)
    train_step(live.run, live.state)
    assert (folder / f"tmp_step_{step}").exists() and not (folder / f"step_{step}").exists()
    assert "time/checkpoint_hidden" not in live.state.metrics
    (tmp_path / "may_write").touch()
    live.run.saver.finish()
    assert find_damage(folder / f"step_{step}") is None and not list(folder.glob("tmp_*"))
    newest = live.run.folder.checkpoints.newest()
    assert newest is not None and newest.state().step == step == live.state.step - 1
    assert live.run.saver.take_metrics().keys() == {"time/checkpoint_hidden"}


def test_a_checkpoint_is_published_during_the_next_rollouts(live: LiveRun):
    step, folder = live.state.step, live.run.folder.path
    live.run.saver.begin(live.state)
    train_step(live.run, live.state)
    during = live.state.metrics
    wait_until(lambda: find_damage(folder / f"step_{step}") is None, "published checkpoint")
    train_step(live.run, live.state)
    # Told at the end of the step in which it is published, or of the next one.
    (hidden,) = [
        metrics[key] for metrics in (during, live.state.metrics) if (key := "time/checkpoint_hidden") in metrics
    ]
    assert hidden > 0 and live.state.metrics["time/reward_hidden"] >= 0


def wait_in_rank(_: object, asked: Path, may_end: Path) -> None:
    asked.touch()
    wait_for(may_end)


def test_a_checkpoint_is_published_while_the_ranks_are_at_work(live: LiveRun, tmp_path: Path):
    """The ranks answer nothing before they are done, as in a step whose rollouts were ready when it began."""
    train_step(live.run, live.state)
    published = live.run.folder.path / f"step_{live.state.step}"
    live.on_ranks(hold_back_writing, tmp_path / "may_write")
    live.run.saver.begin(live.state)
    work = threading.Thread(target=live.on_ranks, args=(wait_in_rank, tmp_path / "asked", tmp_path / "may_end"))
    work.start()
    try:
        wait_for(tmp_path / "asked")
        assert not published.exists()
        (tmp_path / "may_write").touch()
        wait_until(lambda: find_damage(published) is None, "published checkpoint")
        assert work.is_alive()
    finally:
        (tmp_path / "may_end").touch()
        work.join()
    live.run.saver.finish()
    assert live.run.saver.take_metrics()["time/checkpoint_hidden"] > 0


def limit_files(policy, ranks: tuple[int, ...], limit: int) -> None:
    """Lets processes of these ranks write files of at most `limit` bytes: beyond that writes fail as on a full disk."""
    if policy._rank in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


@pytest.mark.parametrize("full", [(0, 1, 2, 3), (2,)], ids=["before a rank writes", "while ranks write"])
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    live: LiveRun, caplog: pytest.LogCaptureFixture, full: tuple[int, ...]
):
    saver, folder = live.run.saver, live.run.folder
    train_step(live.run, live.state)
    saver.begin(live.state, waits=True)
    before = live.state.step
    train_step(live.run, live.state)
    live.on_ranks(limit_files, full, 2**12)
    saver.begin(live.state)
    saver.finish()
    assert (
        f"the checkpoint of step {live.state.step} cannot be written: " in caplog.text
        and "File too large" in caplog.text
    )
    with pytest.raises(RuntimeError, match="cannot be written"):
        saver.begin(live.state, waits=True)
    live.on_ranks(limit_files, full, resource.RLIM_INFINITY)
    newest = folder.checkpoints.newest()
    assert newest is not None and newest.step == before and not list(folder.path.glob("tmp_*"))
    train_step(live.run, live.state)
    saver.begin(live.state, waits=True)
    newest = folder.checkpoints.newest()
    assert newest is not None and newest.step == live.state.step


def move_common_file(policy, name: str) -> None:
    """Names Megatron's small file, which rank 0 writes. One that cannot be made stands for a disk without inodes."""
    from mrl.policy import checkpoint

    checkpoint.COMMON_FILE = name


def test_small_files_that_rank_0_cannot_write_cost_the_checkpoint_and_not_the_run(
    live: LiveRun, caplog: pytest.LogCaptureFixture
):
    saver, folder = live.run.saver, live.run.folder
    train_step(live.run, live.state)
    live.on_ranks(move_common_file, "no/common.pt")
    saver.begin(live.state)
    saver.finish()
    with pytest.raises(
        SaveFailed,
        match=rf"step {live.state.step} cannot be written: .*iter_0000000: .*; (the one before|there is none)",
    ):
        saver.begin(live.state, waits=True)
    assert "Traceback" not in caplog.text and not list(folder.path.glob("tmp_*"))
    live.on_ranks(move_common_file, "common.pt")
    for _ in range(2):
        train_step(live.run, live.state)
        saver.begin(live.state, waits=True)
        newest = folder.checkpoints.newest()
        assert newest is not None and newest.step == live.state.step
