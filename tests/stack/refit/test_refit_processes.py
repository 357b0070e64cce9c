# SPDX-License-Identifier: Apache-2.0
"""Refits between real processes over gloo: Megatron layouts at TP2 x DP2 x EP2 to engine layouts, by conversion tables.

Four trainer ranks and two engine workers live as long as the module; each test prepares the schedule it needs.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conversion.boxes import Layout, Slot
from conversion.families.common import MegatronParallel, VllmParallel
from conversion.families.registry import family
from conversion.reshard import reshard
from conversion.schedule import Schedule
from mrl.refit import RefitError
from mrl.refit.exchange import GpuHandles, handles_for
from mrl.refit.group import GroupAddress
from mrl.refit.pull import VerifyReport
from tests.models import save_nemotron_h
from tests.stack.refit import children
from tests.stack.refit.children import Child, call_all, fill
from tests.waiting import HANG_S

WORLD_SIZE = 4
PARALLEL = MegatronParallel(tp=2, ep=2)
ONE_ROUND = 1 << 30


@dataclass
class Models:
    """A config and two canonical checkpoints of it."""

    hf_config: dict[str, object]
    checkpoints: list[dict[str, Tensor]]

    def trainers(self, dtype: str) -> dict[int, Layout]:
        coords = [PARALLEL.coords_of(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
        return {
            rank: family(self.hf_config).megatron_layout(self.hf_config, PARALLEL, coords[rank], dtype)
            for rank in range(WORLD_SIZE)
        }

    def engines(self, tp: int, dtype: str) -> dict[int, Layout]:
        return {
            worker: family(self.hf_config).vllm_layout(self.hf_config, VllmParallel(tp=tp), worker, dtype)
            for worker in range(tp)
        }


@dataclass
class Refit:
    """A prepared refit: worker i of the engines is workers[i]."""

    trainers: list[Child]
    workers: list[Child]
    sources: dict[int, Layout]
    targets: dict[int, Layout]
    schedule: Schedule
    gpu_of: dict[int, int]
    handles: dict[int, GpuHandles]
    """Handles by GPU."""
    attempt: int = 0

    @property
    def participants(self) -> list[Child]:
        """Participants of the exchange: trainer ranks, and the workers of dedicated engines."""
        return [*self.trainers, *(self.workers if min(self.gpu_of.values()) >= len(self.trainers) else [])]

    def prepare_pulls(self) -> None:
        for target, worker in enumerate(self.workers):
            worker.call(children.prepare_pull, self.schedule, target, handles_for(self.schedule, target, self.handles))

    def exchange_first(self) -> None:
        """Round 0 alone."""
        self.attempt += 1
        call_all(self.participants, children.exchange_first, self.attempt)

    def pull_first(self, worker: int = 0) -> None:
        """Round 0 alone."""
        self.workers[worker].call(children.pull_first, self.attempt)

    def start(self, timeout_s: float = HANG_S) -> None:
        """Has all sides begin an attempt with all rounds."""
        self.attempt += 1
        for trainer in self.trainers:
            trainer.send(children.exchange, self.attempt, list(range(len(self.workers))), timeout_s)
        for worker in self.workers:
            worker.send(children.pull_all, self.attempt, timeout_s)

    def run(self) -> list[int]:
        """Runs all rounds; bytes that each worker has written."""
        self.start()
        for trainer in self.trainers:
            trainer.result()
        return [int(str(worker.result())) for worker in self.workers]

    def refit(self) -> list[VerifyReport]:
        """A whole refit."""
        self.run()
        return [report for report in call_all(self.workers, children.finish) if isinstance(report, VerifyReport)]

    def assert_equals(self, canonical: dict[str, Tensor]) -> None:
        """Every live byte is what the engine's layout makes of the checkpoint, as the trainer's dtypes round it."""
        dtypes = {
            piece.name: item.dtype
            for layout in self.sources.values()
            for item in layout.values()
            for piece in item.pieces
        }
        rounded = {name: canonical[name].to(getattr(torch, dtype)) for name, dtype in dtypes.items()}
        for target, worker in enumerate(self.workers):
            live = worker.call(children.live)
            assert isinstance(live, dict)
            expected = fill(self.targets[target], rounded)
            assert live.keys() == expected.keys()
            for slot in expected:
                assert torch.equal(live[slot].view(torch.uint8), expected[slot].view(torch.uint8)), slot


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folders = [save_nemotron_h(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in range(2)]
    config = json.loads((folders[0] / "config.json").read_text())
    return Models(config, [load_file(folder / "model.safetensors") for folder in folders])


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[list[Child], list[Child]]]:
    every = [Child() for _ in range(WORLD_SIZE + 4)]
    try:
        every[0].call(children.open_store)
        join_world(every[:WORLD_SIZE], timeout_s=HANG_S)
        yield every[:WORLD_SIZE], every[WORLD_SIZE:]
    finally:
        for child in every:
            child.stop()


def join_world(participants: list[Child], *, timeout_s: float, join: Callable = children.join_world) -> GroupAddress:
    """Makes a group of all, which replaces an earlier one."""
    port, num_groups = cast(tuple[int, int], participants[0].call(children.count_group))
    address = GroupAddress("127.0.0.1", port, f"exchange {num_groups}", tuple(range(len(participants))))
    for rank, child in enumerate(participants):
        child.send(join, rank, address, timeout_s)
    for child in participants:
        child.result()
    return address


def prepare(
    processes: tuple[list[Child], list[Child]],
    models: Models,
    *,
    tp: int = 1,
    num_engines: int = 1,
    first_gpu: int = 0,
    gpu_of: dict[int, int] | None = None,
    dtypes: tuple[str, str] = ("float32", "float32"),
    buffer_bytes: int = ONE_ROUND,
    on_one_node: bool = False,
) -> Refit:
    """Engines of `tp` workers on GPUs from `first_gpu`, or as `gpu_of` says, refitted from checkpoint 0.

    From WORLD_SIZE on they are dedicated engines. GPUs are nodes of their own, which exchange what GPUs of one node
    read from each other.
    """
    sources, engine = models.trainers(dtypes[0]), models.engines(tp, dtypes[1])
    targets = {worker: engine[worker % tp] for worker in gpu_of or range(tp * num_engines)}
    gpu_of = gpu_of or {worker: first_gpu + worker for worker in targets}
    nodes = {gpu: 0 if on_one_node else gpu for gpu in [*sources, *gpu_of.values()]}
    schedule = reshard(sources, targets, gpu_of=gpu_of, node_of=nodes, buffer_bytes=buffer_bytes)
    trainers, workers = processes[0], processes[1][: len(targets)]
    call_all(trainers, children.build_trainer, sources, models.checkpoints[0])
    for target, worker in enumerate(workers):
        worker.call(children.build_engine, targets[target])
    if first_gpu >= WORLD_SIZE:
        join_world([*trainers, *workers], timeout_s=HANG_S)
    handles = {rank: trainer.call(children.prepare_exchange, schedule) for rank, trainer in enumerate(trainers)}
    for gpu, worker in enumerate(workers, first_gpu):
        if gpu >= WORLD_SIZE:
            handles[gpu] = worker.call(children.receive_alone, schedule)
        else:
            worker.call(children.read_trainer)
    refit = Refit(trainers, workers, sources, targets, schedule, gpu_of, cast(dict[int, GpuHandles], handles))
    refit.prepare_pulls()
    return refit


@pytest.mark.parametrize(
    "case",
    [
        dict(tp=1),
        dict(tp=2),
        dict(tp=2, num_engines=2),
        dict(gpu_of={0: 0, 1: 0}),
        dict(gpu_of={0: 1, 1: 2}),
        dict(tp=2, buffer_bytes=32 << 10),
        # Ranks send in later rounds what their own workers have read in the first.
        dict(gpu_of={0: 0, 1: 1, 2: 2, 3: 3}, buffer_bytes=16 << 10),
        dict(tp=1, dtypes=("bfloat16", "bfloat16")),
        dict(tp=2, dtypes=("bfloat16", "float32")),
        dict(tp=2, num_engines=2, on_one_node=True),
        dict(tp=1, on_one_node=True, buffer_bytes=32 << 10, dtypes=("bfloat16", "float32")),
        dict(tp=1, first_gpu=WORLD_SIZE, on_one_node=True),
        dict(tp=2, num_engines=2, first_gpu=WORLD_SIZE, buffer_bytes=64 << 10),
        dict(tp=2, first_gpu=WORLD_SIZE, dtypes=("bfloat16", "float32")),
    ],
    ids=(
        "tp1 tp2 two_engines_of_tp2 two_engines_one_gpu two_engines_two_gpus many_rounds "
        "many_rounds_to_four_engines bf16 bf16_to_fp32 two_engines_on_one_node many_rounds_on_one_node "
        "dedicated_tp1_on_one_node dedicated_two_engines_of_tp2 dedicated_tp2_bf16_to_fp32"
    ).split(),
)
def test_the_engine_holds_the_checkpoint_after_each_refit(processes, models, case):
    refit = prepare(processes, models, **case)
    for report in refit.refit():
        assert report.num_bytes + report.padding_bytes == report.total_bytes
    refit.assert_equals(models.checkpoints[0])
    call_all(refit.trainers, children.train, refit.sources, models.checkpoints[1])
    refit.refit()
    refit.assert_equals(models.checkpoints[1])


def test_a_byte_flipped_on_its_way_is_caught(processes, models):
    refit = prepare(processes, models)
    refit.exchange_first()
    pull = next(pull for pull in refit.schedule.pulls(0)[0] if pull.offset is not None)
    assert pull.offset is not None
    refit.trainers[0].call(children.flip_exchanged_byte, pull.offset + 5)
    assert_one_mismatch(refit, pull.copy.target, pull.rank)


def assert_one_mismatch(refit: Refit, slot: Slot, source_rank: int) -> None:
    refit.pull_first()
    report = refit.workers[0].call(children.verify, 0)
    assert isinstance(report, VerifyReport)
    assert len(report.mismatches) == 1
    assert (
        report.mismatches[0].startswith(f"{slot} box")
        and f"source rank {source_rank} (pulled on GPU 0)" in report.mismatches[0]
    )
    with pytest.raises(RefitError, match=slot.name):
        refit.workers[0].call(children.finish)


def test_a_byte_flipped_in_a_dedicated_worker_is_caught(processes, models):
    refit = prepare(processes, models, first_gpu=WORLD_SIZE)
    refit.exchange_first()
    pulls = refit.schedule.pulls(0)[0]
    assert not any(pull.offset is None for pull in pulls)
    refit.workers[0].call(children.flip_exchanged_byte, pulls[3].offset)
    refit.pull_first()
    with pytest.raises(RefitError, match=rf"{pulls[3].copy.target.name} box .* \(pulled on GPU {WORLD_SIZE}\)"):
        refit.workers[0].call(children.verify, 0)
        refit.workers[0].call(children.finish)


def test_on_one_node_only_checksums_travel_and_a_changed_weight_of_another_rank_is_caught(processes, models):
    refit = prepare(processes, models, on_one_node=True)
    refit.exchange_first()
    pull = next(pull for pull in refit.schedule.pulls(0)[0] if pull.offset is not None)
    assert pull.rank != 0
    # What the box would have occupied in the exchange memory was not written and is not read.
    refit.trainers[0].call(children.flip_exchanged_byte, pull.offset)
    refit.trainers[pull.rank].call(children.flip_weight_byte, pull.holding.slot, pull.holding.box)
    assert_one_mismatch(refit, pull.copy.target, pull.rank)


def test_a_wrong_byte_is_caught_in_every_round(processes, models):
    refit = prepare(processes, models, tp=2, buffer_bytes=32 << 10)
    assert refit.schedule.num_rounds > 3
    for index, pulls in enumerate(refit.schedule.pulls(1)):
        pull = next(pull for pull in reversed(pulls) if pull.offset is not None)
        assert pull.offset is not None
        refit.trainers[1].call(children.flip_in_round, index, pull.offset)
        refit.run()
        refit.workers[0].call(children.finish)
        with pytest.raises(
            RefitError, match=re.escape(f"{pull.copy.target} box {pull.copy.box} differs from source rank {pull.rank} ")
        ):
            refit.workers[1].call(children.finish)
    refit.refit()
    refit.assert_equals(models.checkpoints[0])


def errors_of(participants: list[Child]) -> list[str]:
    """Reasons why they have left the attempt, of those that had not done their part."""
    messages = []
    for child in participants:
        try:
            child.result()
        except RefitError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize(
    ("kind", "signal_in", "reason"),
    [
        ("workers", children.signal_in_pull, "the engine worker on slot 1 has not verified round 1 on GPU 1 in time"),
        ("trainers", children.signal_in_exchange, "policy rank 1 has not exchanged round 2 of its GPU in time"),
    ],
)
def test_a_rank_or_worker_that_hangs_in_a_later_round_is_named_and_all_others_leave(
    processes, models, kind, signal_in, reason
):
    refit = prepare(processes, models, tp=2, buffer_bytes=32 << 10)
    victim = getattr(refit, kind)[1]
    victim.call(signal_in, 1, signal.SIGSTOP)
    refit.start(timeout_s=5.0)
    messages = errors_of([child for child in refit.trainers + refit.workers if child is not victim])
    assert any(reason in message for message in messages), messages
    os.kill(victim.pid, signal.SIGCONT)
    assert errors_of([victim])
    join_world(refit.trainers, timeout_s=HANG_S, join=children.join_again)
    refit.refit()
    refit.assert_equals(models.checkpoints[0])


def test_after_a_death_the_others_leave_when_they_are_told_and_the_next_attempt_is_whole(models):
    trainers, workers = [Child() for _ in range(WORLD_SIZE)], [Child() for _ in range(3)]
    try:
        trainers[0].call(children.open_store)
        address = join_world(trainers, timeout_s=HANG_S)
        refit = prepare((trainers, workers), models, tp=2, buffer_bytes=32 << 10)
        workers[1].call(children.signal_in_pull, 1, signal.SIGKILL)
        refit.start(timeout_s=2 * HANG_S)
        workers[1].stop()
        address.give_up(refit.attempt)
        messages = errors_of([*trainers, workers[0]])
        assert any("attempt 1 at the refit was given up" in message for message in messages)
        refit.workers[1] = workers[2]
        workers[2].call(children.build_engine, refit.targets[1])
        refit.prepare_pulls()
        join_world(trainers, timeout_s=HANG_S, join=children.join_again)
        refit.refit()
        refit.assert_equals(models.checkpoints[0])
    finally:
        for child in trainers + workers:
            child.stop()


def test_stale_epochs_and_skipped_exchanges_are_refused(processes, models):
    refit = prepare(processes, models)
    refit.refit()
    with pytest.raises(RefitError, match="has not exchanged round 0 in attempt 2"):
        refit.workers[0].call(children.pull_first, refit.attempt + 1)
    refit.exchange_first()
    refit.trainers[0].call(children.bump_arena)
    with pytest.raises(RefitError, match="stale handle"):
        refit.pull_first()


def test_an_absent_and_a_dead_trainer_rank_end_the_refit(models):
    trainers, worker = [Child() for _ in range(WORLD_SIZE)], Child()
    try:
        trainers[0].call(children.open_store)
        join_world(trainers, timeout_s=HANG_S)
        refit = prepare((trainers, [worker]), models)
        with pytest.raises(RefitError, match=r"did not finish round 0.*sending to ranks \[0\]"):
            call_all(trainers[1:], children.exchange_first, 1, 3.0)
        trainers[0].stop()
        with pytest.raises(RefitError, match="owner.*gone"):
            worker.call(children.pull_all, 1, 60.0)
        # What a worker is told again after a restart of the rank fails as clearly.
        with pytest.raises(RefitError, match="cannot map memory 'mrl-exchange-0'"):
            refit.prepare_pulls()
    finally:
        for child in [*trainers, worker]:
            child.stop()
