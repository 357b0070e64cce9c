# SPDX-License-Identifier: Apache-2.0
"""Reward actors on real Ray nodes: they share a batch, also on nodes without slots; a dead one is asked again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray

from mrl.cluster.payload import pack
from mrl.cluster.rewards import VERDICTS, Rewards
from mrl.cluster.runtime import placed_slots, wait_for_graders
from mrl.cluster.service import LOOK_S
from mrl.cluster.tasks import started_tasks
from mrl.config.load import load_config
from mrl.types import PayloadRef, Prompt, Rollout, RolloutInfo, Verdict
from tests.drivers import call, do, opened
from tests.rollouts import request
from tests.stack.cluster.conftest import ray_nodes
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import HANG_S, wait_until

NUM_ROLLOUTS = 40
# Slow, and far within the deadline of one, also on a busy host. Of an actor the only child has half of them.
SLOW = """
import time
def slow(response, reference_answer):
    time.sleep(0.3)
    return int(response) + float(reference_answer)
"""
OVERRIDES = [
    *SMALL,
    "cluster.num_nodes=2",
    "cluster.cpu_units_per_node=1",
    "++env.own.functions.slow=slow_rewards:slow",
    # Less than the batch takes: what waits for a child is no failure.
    "deadlines.reward_s=4",
    "deadlines.notice_s=5",
]


def batch(first: int) -> tuple[list[RolloutInfo], list[Prompt], dict[str, float]]:
    """Rollouts that say numbers, their prompts, and the rewards that they deserve, by request id."""
    rollouts = []
    for number in range(first, first + NUM_ROLLOUTS):
        ids = np.frombuffer(str(number).encode(), dtype=np.uint8).astype(np.int32)
        rollouts.append(Rollout(request([1], prompt_id=f"p{number}"), 1, ids, np.zeros(len(ids), np.float32), "stop"))
    payload = ray.put(pack(rollouts))
    infos = [RolloutInfo.of(rollout, PayloadRef(payload, place)) for place, rollout in enumerate(rollouts)]
    prompts = [Prompt(info.prompt_id, (1,), "say a number", "0.5", "slow") for info in infos]
    return infos, prompts, {info.request_id: number + 0.5 for number, info in enumerate(infos, start=first)}


def judge(rewards: Rewards, infos: list[RolloutInfo], prompts: list[Prompt]) -> dict[str, Verdict]:
    """The verdicts, which come in later."""
    verdicts: dict[str, Verdict] = {}

    async def one(info: RolloutInfo, prompt: Prompt) -> None:
        judged = await rewards.book.ask(info.request_id, (info, prompt, None))
        assert not isinstance(judged, PayloadRef) and judged[1] == "over"
        verdicts[info.request_id] = judged[0]
        rewards.tasks.tell(VERDICTS)

    def begin() -> None:
        for info, prompt in zip(infos, prompts, strict=True):
            asyncio.ensure_future(one(info, prompt))

    call(begin)
    return verdicts


@contextmanager
def shown_if_failed(folder: Path) -> Iterator[None]:
    """Prints the end of each actor's log if the `with` block fails: an actor may have died by itself."""
    try:
        yield
    except BaseException:
        for file in sorted(folder.rglob("*.log")):
            print(f"=== {file.name}\n{file.read_text(errors='replace')[-4000:]}")
        raise


def node_and_pid(actor) -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), os.getpid()


def test_two_nodes_share_a_batch_and_no_rollout_is_masked_though_an_actor_dies(
    two_nodes: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "slow_rewards.py").write_text(SLOW)
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *OVERRIDES])
    with (
        shown_if_failed(tmp_path / "logs"),
        placed_slots(config, tmp_path / "logs") as placement,
        caplog.at_level(logging.INFO),
        opened(started_tasks()) as tasks,
    ):
        rewards = call(lambda: Rewards(config, placement, log_folder=tmp_path / "logs", tasks=tasks))
        rewards.wait_until_built()
        assert "Rewards, on each of their nodes (2): one actor; workers on" in caplog.text and "slow 1" in caplog.text
        before = rewards.apply(node_and_pid, deadline_s=HANG_S)
        assert len({node for node, _ in before}) == 2
        infos, prompts, expected = batch(10)
        verdicts = judge(rewards, infos, prompts)
        # Each has half of them, and has begun.
        wait_until(lambda: [len(actor.owed) for actor in rewards.book._actors] == [NUM_ROLLOUTS // 2] * 2, "halves")
        rewards.apply(node_and_pid, deadline_s=HANG_S)
        os.kill(before[1][1], signal.SIGKILL)
        do(rewards.wait_for(lambda: len(verdicts) == NUM_ROLLOUTS))
        seconds = rewards.take_seconds()
        assert {name: verdict.reward for name, verdict in verdicts.items()} == expected
        assert all(verdict.is_valid for verdict in verdicts.values())
        assert rewards.book.num_restarts == 1 and "reward actor 1 died during" in caplog.text
        metrics = rewards.take_metrics()
        assert metrics["rollout/reward_wait_max_s"] > config.deadlines.reward_s < seconds
        assert 0 < metrics["rollout/reward_wait_s"] < metrics["rollout/reward_wait_max_s"]
        assert (metrics["rollout/reward_queue_max"], metrics["rollout/reward_restarts"]) == (NUM_ROLLOUTS // 2, 1)

        after = rewards.apply(node_and_pid, deadline_s=HANG_S)
        assert (
            [node for node, _ in after] == [node for node, _ in before]
            and after[0] == before[0]
            and after[1] != before[1]
        )
        # Warns whenever it looks, also beside the last verdict. The batch takes each actor longer than a look at it.
        rewards.deadline_s, rewards._look_s, handle = 0.0, 4 * LOOK_S, rewards.handles[1]
        infos, prompts, expected = batch(50)
        verdicts = judge(rewards, infos, prompts)
        do(rewards.wait_for(lambda: len(verdicts) == NUM_ROLLOUTS))
        assert {name: verdict.reward for name, verdict in verdicts.items()} == expected
        assert rewards.take_metrics()["rollout/reward_restarts"] == 1

        # Its node's lookout reads what the kernel says of it there.
        os.kill(after[1][1], signal.SIGSTOP)
        hangs = f"The run hangs: reward actor 1 (process {after[1][1]} on "
        wait_until(lambda: hangs in caplog.text, "name of the actor that hangs")
        assert "state T" in caplog.text

        # A service with that limit starts it again, as if it had died, also the second time.
        wait_until(lambda: rewards.handles[1] is not handle, "another actor")
        ((_, pid),) = rewards.apply(node_and_pid, only=[1], deadline_s=HANG_S)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: rewards.book.num_restarts == 3, "another actor")
        wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in (after[1][1], pid)), "ends of both")
        assert f"gave no sign of life for {4 * LOOK_S:g} s; starting it again" in caplog.text
        infos, prompts, expected = batch(90)
        verdicts = judge(rewards, infos, prompts)
        do(rewards.wait_for(lambda: len(verdicts) == NUM_ROLLOUTS))
        assert {name: verdict.reward for name, verdict in verdicts.items()} == expected
    folder, signs = tmp_path / "logs", Path(tempfile.gettempdir()) / Path(os.environ["MRL_RUN_FOLDER"]).name
    wait_until(lambda: list(signs.parent.glob(f"{signs.name}*")) == [], "end of the folder of signs")
    assert (
        "=== reward actor 0" in (folder / "stacks-1.txt").read_text()
        and "The run hangs" in (folder / "watchdog.log").read_text()
    )


@pytest.mark.long("nodes")
def test_rewards_stay_on_the_node_without_slots_and_gpus_though_their_actor_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "slow_rewards.py").write_text(SLOW.replace("time.sleep(0.3)", "pass"))
    words = [*write_inputs(tmp_path, num_rows=8), *OVERRIDES, "env.placement.num_nodes=1"]
    config = load_config("grpo_tiny.yaml", words)
    # No slot fits on the last two, which have no processors for one.
    with ray_nodes(tmp_path, monkeypatch, 1, 1, 0, 0, last_gpus=1):
        with (
            placed_slots(config, tmp_path / "logs") as placement,
            caplog.at_level(logging.INFO),
            opened(started_tasks()) as tasks,
        ):
            (grader,) = (node["NodeID"] for node in ray.nodes() if not {"CPU", "GPU"} & node["Resources"].keys())
            rewards = call(lambda: Rewards(config, placement, log_folder=tmp_path / "logs", tasks=tasks))
            rewards.wait_until_built()
            assert "Rewards, on each of their nodes (1): one actor" in caplog.text
            pids = list[int]()
            for first in (10, 50, 90):
                infos, prompts, expected = batch(first)
                verdicts = judge(rewards, infos, prompts)
                do(rewards.wait_for(lambda verdicts=verdicts: len(verdicts) == NUM_ROLLOUTS))
                assert {name: verdict.reward for name, verdict in verdicts.items()} == expected
                ((node, pid),) = rewards.apply(node_and_pid, deadline_s=HANG_S)
                assert node == grader and pid not in pids
                pids.append(pid)
                os.kill(pid, signal.SIGKILL)

            more = load_config("grpo_tiny.yaml", [*words, "env.placement.num_nodes=3"])
            with pytest.raises(RuntimeError, match=r"4 of 5 nodes .* env.placement.num_nodes=3, which join without"):
                wait_for_graders(more, limit_s=0)
            # Another node is there, and has a GPU.
            with pytest.raises(RuntimeError, match="the cluster has 1 nodes without slots and GPUs; let more"):
                placement._reward_places(more, {node["NodeID"] for node in ray.nodes() if "CPU" in node["Resources"]})
