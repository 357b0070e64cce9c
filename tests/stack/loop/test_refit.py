# SPDX-License-Identifier: Apache-2.0
"""Refit in the real loop: complete, bitwise, and every kind of damage caught before a token is sampled."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from conversion.boxes import Slot
from mrl.cluster import calls, refit
from mrl.cluster.calls import Actors, wait_all
from mrl.cluster.errors import DeadlineExceeded
from mrl.cluster.refit import Refitter
from mrl.cluster.tasks import in_worker
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.phases import PHASES, Phase
from mrl.shortage import WAY_OUT
from tests.drivers import do, train_step
from tests.schedules import without_box
from tests.stack.loop.conftest import DEADLINE_S, LiveRun
from tests.waiting import HANG_S


def expect_refused(live: LiveRun, pattern: str) -> str:
    """The message of the refit that fails now; no engine may sample after it, until a clean refit."""
    with pytest.raises(RuntimeError, match=pattern) as caught:
        do(live.run.supplier.refit(live.state))
    assert not isinstance(caught.value, DeadlineExceeded)
    return str(caught.value)


def recover(live: LiveRun) -> None:
    do(live.run.supplier.refit(live.state))


def process_id(engine) -> int:
    return os.getpid()


def is_prevented_from_sampling(engine) -> bool:
    try:
        engine.step()
    except RuntimeError:
        return True
    return False


# Functions that run in a rank or an engine.


def flip_byte(policy, rank: int, name: str) -> None:
    if policy._rank == rank:
        tensor = policy._tensors[Slot(name)]
        tensor.detach().view(-1).view(torch.uint8)[3] ^= 1


def remember_weights(policy, rank: int) -> None:
    if policy._rank == rank:
        policy.remembered = {slot: tensor.detach().clone() for slot, tensor in policy.settled_weights().items()}


def go_stale(policy, rank: int) -> None:
    """This rank's parameter gather never happens: its next settle finds the weights of before the step."""
    if policy._rank != rank:
        return
    sync = policy._chunks[0].start_param_sync

    def stale_sync(*arguments: object, **options: object) -> None:
        sync(*arguments, **options)
        policy._chunks[0].start_param_sync = sync
        for slot, tensor in policy.remembered.items():
            policy._tensors[slot].detach().copy_(tensor)

    policy._chunks[0].start_param_sync = stale_sync


def worker_of(engine):
    return engine.llm.model_executor.driver_worker.worker


def keep_stale(engine, name: str) -> None:
    """The next pull leaves one tensor of the engine as it was."""
    puller = worker_of(engine).sides["weights"].puller
    pull, last = puller.pull, len(puller._rounds) - 1

    def pull_but_one(round_index: int) -> int:
        before = puller._live()[Slot(name)].detach().clone() + 1
        copied = pull(round_index)
        puller._live()[Slot(name)].detach().copy_(before)
        if round_index == last:
            puller.pull = pull
        return copied

    puller.pull = pull_but_one


def flip_live_byte(engine, name: str) -> None:
    """The next pull is followed by a flipped bit in the live tensor."""
    puller = worker_of(engine).sides["weights"].puller
    pull = puller.pull

    def pull_and_flip(round_index: int) -> int:
        copied = pull(round_index)
        puller._live()[Slot(name)].detach().view(-1).view(torch.uint8)[0] ^= 1
        if round_index == len(puller._rounds) - 1:
            puller.pull = pull
        return copied

    puller.pull = pull_and_flip


def forbid_other_ways(holder) -> None:
    """Weights may reach an engine by the schedule alone: loaders, files and the object store raise from here on."""
    import ray
    import safetensors
    import safetensors.torch

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("weights took another way than the schedule")

    for module in (safetensors, safetensors.torch):
        for name in ("safe_open", "load_file"):
            setattr(module, name, forbidden)
    put = ray.put

    def put_no_weights(value: object) -> object:
        assert not isinstance(value, torch.Tensor), "a tensor in the object store"
        return put(value)

    setattr(ray, "put", put_no_weights)  # noqa: B010  a plain assignment is a type error
    if hasattr(holder, "llm"):
        worker = worker_of(holder)
        worker.get_model().load_weights = forbidden
        worker.model_runner.reload_weights = forbidden
        worker.load_model = forbidden


def test_bytes_copied_are_those_of_the_schedule(live: LiveRun):
    report = do(live.run.supplier.session.refit.run())
    live.state.weight_version = report.weight_version
    schedule = live.run.supplier.session.refit.schedule
    assert schedule.num_rounds > 1
    targets = [slot for slots in live.run.supplier.session.refit.slots.values() for slot in slots]
    assert len(targets) == 2
    assert report.verified_bytes == sum(schedule.class_of(target).written_bytes for target in targets)
    live_bytes = sum(
        live.on_engines(
            lambda engine: sum(tensor.nbytes for tensor in worker_of(engine).sides["weights"].puller._live().values())
        )
    )
    assert report.verified_bytes + report.padding_bytes == live_bytes


def test_a_rank_without_memory_is_the_reason_and_not_its_peers_complaint(live: LiveRun):
    def fail(_: object) -> None:
        if torch.distributed.get_rank() == 0:
            raise RuntimeError("refit exchange: rank 0 did not finish round 1 in time")
        time.sleep(1.0)
        raise MemoryError("std::bad_alloc")

    with pytest.raises(RuntimeError, match=rf"^policy rank [1-9] failed in apply: std::bad_alloc; {WAY_OUT}$"):
        live.run.supplier.session.policies.apply(fail)


def test_the_driver_calls_a_rank_once_and_an_engine_twice_however_many_rounds_there_are(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch
):
    session, asked, waits = live.run.supplier.session, [], []
    assert session.refit.schedule.num_rounds > 4
    start = Actors.start
    monkeypatch.setattr(
        Actors,
        "start",
        lambda self, verb, arguments: asked.append((self.kind, verb.__name__)) or start(self, verb, arguments),
    )
    for module in (calls, refit):
        monkeypatch.setattr(
            module, "wait_all", lambda *arguments, **named: waits.append(named["what"]) or wait_all(*arguments, **named)
        )
    report = do(session.refit.run())
    monkeypatch.undo()
    live.state.weight_version = report.weight_version
    assert waits == ["refit", "serve"]
    assert sorted(asked) == [("engine", "refit"), ("engine", "serve"), ("policy rank", "refit")]


def test_weights_take_no_other_way(live: LiveRun):
    live.on_ranks(forbid_other_ways)
    live.on_engines(forbid_other_ways)
    train_step(live.run, live.state)


def test_live_engines_equal_a_fresh_engine_on_the_export(live: LiveRun, tmp_path: Path):
    import subprocess
    import sys

    from mrl.convert import main as convert
    from mrl.rollout.environment import engine_environment

    train_step(live.run, live.state)
    live.run.saver.begin(live.state)
    live.run.saver.finish()
    step = live.run.folder.path / f"step_{live.state.step}"
    assert convert(["mcore-to-hf", "--mcore", str(step), "--out", str(tmp_path / "export")]) == 0
    script = (
        "import sys, json\nfrom mrl.config.schema.generation import GenerationConfig, VllmConfig\nfrom "
        "mrl.rollout.engine import Engine\nconfig = GenerationConfig(max_new_tokens=8, "
        "vllm_cfg=VllmConfig(precision='float32', enforce_eager=True, max_model_len=256))\nengine = "
        "Engine(sys.argv[1], config, seed=0, worker_timeout_s=3000.0)\nprint('DIGEST', json.dumps({str(slot): crc "
        "for slot, crc in engine.live_digest()[0].items()}))\n"
    )
    import json
    import os

    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "export")],
        env=os.environ | engine_environment(has_gpu=False),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("DIGEST ")]
    fresh = json.loads(line.removeprefix("DIGEST "))
    for (digest,) in live.run.supplier.session.engines.call(EngineVerbs.live_digest).values():
        assert {str(slot): crc for slot, crc in digest.items()} == fresh


def test_a_flipped_byte_in_one_replica_is_caught_before_the_exchange(live: LiveRun):
    name = "decoder.layers.0.mixer.in_proj.weight"
    live.on_ranks(flip_byte, 2, name)
    message = expect_refused(live, re.escape(name))
    assert "2" in message
    live.on_ranks(flip_byte, 2, name)
    recover(live)


def test_a_stale_replica_is_caught(live: LiveRun):
    live.on_ranks(remember_weights, 3)
    live.on_ranks(go_stale, 3)
    with pytest.raises(RuntimeError, match=r"decoder\.layers"):
        train_step(live.run, live.state)
    # The stale rank has lost its shard of the main parameters: the run would resume from a checkpoint, the tests start
    # over.
    live.run.supplier.session.policies.call(PolicyVerbs.load_hf, live.config.policy.model_name, deadline_s=DEADLINE_S)
    recover(live)


@pytest.mark.parametrize("name", ["mixer.D", "mixer.A", "mixer.gate.e_score_correction_bias"])
def test_a_stale_buffer_is_caught_by_name(live: LiveRun, name: str):
    layer = 1 if "gate" in name else 0
    slot = f"model.layers.{layer}.{name}"
    live.on_engines(keep_stale, slot)
    expect_refused(live, re.escape(slot))
    assert all(live.on_engines(is_prevented_from_sampling))
    recover(live)


def test_a_flipped_byte_in_an_engine_is_caught_by_name(live: LiveRun):
    slot = "model.layers.3.mixer.qkv_proj.weight"
    live.on_engines(flip_live_byte, slot)
    message = expect_refused(live, re.escape(slot))
    assert "rank" in message
    recover(live)


def test_a_missing_box_is_caught_before_anything_moves(live: LiveRun):
    moving = live.run.supplier.session.refit
    workers = moving.worker_refits(0)
    lost = next(pull.copy for pull in moving.schedule.pulls(0)[0] if pull.offset is not None)
    workers[0] = dataclasses.replace(workers[0], inputs=without_box(moving.inputs, lost.target, lost.box))
    with pytest.raises(RuntimeError, match=re.escape(lost.target.name)):
        live.run.supplier.session.engines.call_each(EngineVerbs.prepare_refit, {0: (workers,)})
    assert isinstance(moving, Refitter)
    moving.prepare_again(0)
    recover(live)


def test_an_engine_that_dies_before_refit_zero_has_looked_at_it_is_started_again(live: LiveRun):
    session = live.run.supplier.session
    session.policies.call(PolicyVerbs.load_hf, live.config.policy.model_name, deadline_s=DEADLINE_S)
    do(live.run.supplier.refit(live.state))
    (pid, _) = live.on_engines(process_id)
    os.kill(pid, signal.SIGKILL)
    num_restarts = session.engines.book.num_restarts
    report = do(session.refit.zero())
    assert session.engines.book.num_restarts == num_restarts + 1
    assert report.verified_bytes == do(live.run.supplier.refit(live.state))["refit/verified_bytes"] > 0


@pytest.mark.long("rehearsal")
def test_an_engine_starts_while_the_policy_holds_nothing_but_weights(live: LiveRun, monkeypatch: pytest.MonkeyPatch):
    engines, policies = live.run.supplier.session.engines, live.run.supplier.session.policies
    found: list[Phase] = []
    restart, call = engines.restart, policies.call

    async def restart_and_look(index: int) -> None:
        found.extend(await in_worker(live.on_ranks, lambda policy: policy._phase))
        await restart(index)

    def call_and_kill(verb, *arguments, **options):
        if verb is PolicyVerbs.train_step:
            monkeypatch.setattr(policies, "call", call)
            os.kill(live.on_engines(process_id)[1], signal.SIGKILL)
        return call(verb, *arguments, **options)

    monkeypatch.setattr(engines, "restart", restart_and_look)
    monkeypatch.setattr(policies, "call", call_and_kill)
    # One dies while it samples, one while the policy trains.
    os.kill(live.on_engines(process_id)[0], signal.SIGKILL)
    train_step(live.run, live.state)
    assert len(found) == 2 * policies.world_size
    assert {(PHASES[phase].gradients, PHASES[phase].optimizer, PHASES[phase].activations) for phase in found} == {
        ("none", "host", "none")
    }
