# SPDX-License-Identifier: Apache-2.0
"""Start of a run: what waits for what, how many threads a rank gets, and engines that enter a phase together."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch.distributed as dist

from mrl.cluster import calls, policies, runtime, session
from mrl.cluster.calls import ask, start_actor, wait_all
from mrl.cluster.engines import EngineGroup
from mrl.cluster.errors import ActorLost, ActorName, DeadlineExceeded, NoCluster
from mrl.cluster.policies import PolicyGroup, Ranks, hold_port
from mrl.cluster.runtime import RAY_LIMITS, Placement, placed_slots
from mrl.cluster.scheduling import ENGINE, until_no_engine_dies
from mrl.cluster.session import start_models
from mrl.cluster.tasks import BackgroundTasks, started_tasks
from mrl.config.load import load_config
from mrl.phases import Phase
from mrl.plan.deadlines import start_deadline
from mrl.policy.parallel import Meeting
from tests.drivers import call, do, opened
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import HANG_S, wait_until


class StandIn:
    """A group of actors, of which only the order of its calls counts."""

    world_size = 1

    def __init__(self, calls: list[str], name: str) -> None:
        self.calls = calls
        self.calls.append(f"start {name}")

    def wait_until_up(self) -> None:
        self.calls.append("engines are built")


@pytest.mark.parametrize(
    ("overrides", "order"),
    [
        (
            ["cluster.gpus_per_node=2"],
            ["start engines", "start ranks", "convert", "engines are built", "start policy", "engines are built"],
        ),
        (["cluster.gpus_per_node=0"], ["start engines", "start ranks", "start policy", "engines are built"]),
        (
            ["cluster.gpus_per_node=2", "policy.generation.colocated.enabled=false"],
            ["start engines", "start ranks", "start policy", "engines are built"],
        ),
    ],
)
def test_engines_measure_a_shared_gpu_before_the_policy_is_there(
    overrides: list[str], order: list[str], monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    monkeypatch.setattr(session, "EngineGroup", lambda *_, **__: StandIn(calls, "engines"))
    monkeypatch.setattr(session, "Ranks", lambda *_, **__: calls.append("start ranks"))
    monkeypatch.setattr(session, "PolicyGroup", lambda *_, **__: StandIn(calls, "policy"))
    monkeypatch.setattr(session, "Refitter", lambda *_: None)
    monkeypatch.setattr(session, "convert_if_new", lambda _: calls.append("convert"))
    placement = Placement.__new__(Placement)
    placement.num_slots, placement.num_policy_ranks, placement.own_slots = 1, 1, {}
    placement.absent_engines = set()
    config, log_folder = load_config("grpo_tiny.yaml", overrides), Path("logs")
    do(start_models(config, placement, pad_token_id=0, log_folder=log_folder, tasks=BackgroundTasks()))
    assert calls == order


class Threads(policies.PolicyActor):
    """A rank that builds no model, as this host has no GPU for it."""

    def num_threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]


def test_a_rank_on_a_gpu_gets_its_share_of_the_cores_that_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # To Ray a GPU is a number.
    monkeypatch.setattr(policies, "PolicyActor", Threads)
    one_rank = ["tensor_model_parallel_size=1", "expert_model_parallel_size=1", "sequence_parallel=false"]
    sizes = ["cluster.gpus_per_node=1", *(f"policy.megatron_cfg.{size}" for size in one_rank)]
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *SMALL, *sizes])
    cores = os.sched_getaffinity(0)
    with placed_slots(config) as placement:
        ranks = Ranks(config, placement, log_folder=tmp_path / "logs")
        asked = {ActorName("rank", 0): ask(ranks.handles[0], Threads.num_threads)}
        assert list(wait_all(asked, deadline_s=HANG_S, what="threads").values()) == [str(len(cores))]


@pytest.mark.parametrize(("variables", "expected"), [("{}", 1), ("{OMP_NUM_THREADS: '2'}", 2)])
def test_a_rank_on_a_cpu_host_has_one_thread_or_as_many_as_its_variables_say(
    tmp_path: Path, variables: str, expected: int
):
    one_rank = [
        "tensor_model_parallel_size=1",
        "expert_model_parallel_size=1",
        "sequence_parallel=false",
        f"env_vars={variables}",
    ]
    sizes = ["cluster.cpu_units_per_node=1", *(f"policy.megatron_cfg.{size}" for size in one_rank)]
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *SMALL, *sizes])
    with placed_slots(config) as placement:
        group = PolicyGroup(config, Ranks(config, placement, log_folder=tmp_path / "logs"), pad_token_id=256)
        assert group.apply(threads_of_torch, deadline_s=HANG_S) == [expected]


def threads_of_torch(policy) -> int:
    import torch

    return torch.get_num_threads()


def test_engines_enter_a_phase_together_and_without_those_that_died(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    sizes = ["cluster.cpu_units_per_node=2", "policy.generation.num_cpu_engines=2"]
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *SMALL, *sizes])
    with placed_slots(config) as placement, opened(started_tasks()) as tasks:
        engines = call(lambda: EngineGroup(config, placement, log_folder=tmp_path / "logs", tasks=tasks))
        engines.wait_until_up()
        (meeting := tmp_path / "meeting").mkdir()
        pids = engines.apply(enter_together, meeting, deadline_s=HANG_S)
        engines.enter("refit", deadline_s=2 * HANG_S)
        assert [entered(engines, index) for index in range(2)] == ["refit"] * 2
        os.kill(pids[0], signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            engines.enter("generate", deadline_s=HANG_S)
        assert entered(engines, 1) == "generate"
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert [text.partition(" during")[0] for text in warnings] == ["engine 0 died"]


def enter_together(engine, meeting: Path) -> int:
    """From here on the engine enters a phase only once both have begun to, and remembers which one it was."""
    enter = engine.enter

    def meet(phase: Phase) -> None:
        (meeting / str(os.getpid())).touch()
        wait_until(lambda: len(list(meeting.iterdir())) == 2, "other engine")
        enter(phase)
        engine.entered = phase

    engine.enter = meet
    return os.getpid()


def entered(engines: EngineGroup, index: int) -> Phase:
    """The last phase that the engine has entered."""
    return ray.get(engines.handles[index].apply.remote(lambda engine: engine.entered), timeout=HANG_S)


def test_a_ray_that_does_not_start_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "0")
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *SMALL])
    line = (
        r"Ray does not start on this host, tried 3 times: \w+: .+; this host has \d+ cores, load .+; .+ raise "
        r"deadlines\.start_s; [^\n]+"
    )
    with pytest.raises(NoCluster) as failed, placed_slots(config):
        pytest.fail("it starts")
    assert re.fullmatch(line, str(failed.value)), failed.value
    assert not ray.is_initialized()


def test_a_start_that_never_returns_is_not_tried_again_by_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A head that stops in the middle: Ray waits for it, and ends the process after the time for a start."""
    is_over, starts = threading.Event(), list[str]()

    def hang(**options):
        starts.append(options["address"])
        is_over.wait(HANG_S)

    monkeypatch.setattr(ray, "init", hang)
    monkeypatch.setattr(runtime, "STARTS", (1e-3, 1e-3))
    monkeypatch.setattr(runtime, "SHUTDOWN_SHARE", 1e-3)
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *SMALL])
    line = r"Ray does not start .+, tried 1 time: .+no answer within 0\.3 s; .+ only a new process can try again; .+"
    with pytest.raises(NoCluster, match=line), placed_slots(config):
        pytest.fail("it starts")
    is_over.set()
    assert starts == ["local"]


class Idle:
    def wait(self) -> None:
        time.sleep(HANG_S)


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placement]:
    """Ray on a bad day: its first start is too slow, and its memory monitor kills every actor."""
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path_factory.mktemp("bad"), num_rows=8), *SMALL])
    start_ray, starts = ray.init, list[str]()

    def start_late(**options):
        starts.append(os.environ["RAY_raylet_start_wait_time_s"])
        if len(starts) == 1:
            # As ray/_private/node.py in 2.60, when a raylet is not there after 30 s.
            raise Exception("The current node timed out during startup.")
        return start_ray(**options)

    with pytest.MonkeyPatch.context() as patch:
        # Every host uses more than a hundredth of its memory.
        patch.setenv("RAY_memory_usage_threshold", "0.01")
        patch.setenv("RAY_memory_monitor_refresh_ms", "50")
        patch.setattr(ray, "init", start_late)
        for name in RAY_LIMITS:  # an earlier start of this process may have set them
            patch.delenv(name, raising=False)
        with placed_slots(config) as placement:
            assert starts == [str(round(start_deadline(config).seconds))] * 2
            yield placement


def test_an_actor_that_rays_memory_monitor_kills_is_started_again_like_any_other(placement: Placement):
    idle = start_actor(Idle, placement.options(0, {}))

    async def attempt(restarted: set[int]) -> str:
        if not restarted:
            wait_all({ActorName(ENGINE, 0): ask(idle, Idle.wait)}, deadline_s=HANG_S, what="waiting")
        return "done"

    with pytest.raises(
        ActorLost, match=r"engine 0 died during waiting: Ray's memory monitor killed it, .* Memory on the node"
    ):
        do(attempt(set()))

    async def restart(_: int) -> None: ...

    assert do(until_no_engine_dies(attempt, restart)) == ("done", {0})


def test_a_store_that_takes_nothing_is_not_waited_for_for_ever(placement: Placement, monkeypatch: pytest.MonkeyPatch):
    raylet = next(
        child
        for child in psutil.Process().children()
        if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE
    )
    array = np.zeros(10**7, np.uint8)
    raylet.suspend()
    try:
        monkeypatch.setattr(calls, "FETCH_TIMEOUT_S", 0.5)
        with pytest.raises(
            DeadlineExceeded, match=r"ray\.put: no answer within 0\.5 s: Ray's daemon .* \(raylet\) hangs"
        ):
            calls.put(array)
    finally:
        raylet.resume()
    monkeypatch.undo()
    assert ray.get(calls.put(array), timeout=HANG_S).nbytes == array.nbytes


def test_the_port_where_ranks_meet_is_theirs_until_they_do():
    with hold_port(range(0), "127.0.0.1") as held:
        port = held.getsockname()[1]
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("", port))
        with pytest.raises(RuntimeError, match=f"no free port from {port} to {port} on 127.0.0.1 "):
            hold_port(range(port, port + 1), "127.0.0.1")
    hold_port(range(port, port + 1), "127.0.0.1").close()


def any_answers(held: socket.socket, others: Sequence[str]) -> bool:
    """True if somebody listens at this port of one of these addresses."""
    for other in others:
        with socket.socket() as asked:
            if asked.connect_ex((other, held.getsockname()[1])) == 0:
                return True
    return False


def test_the_store_of_ranks_is_heard_at_the_address_of_its_node_alone():
    """Two networks: what the ranks' address answers, the host's other addresses do not."""
    others = ("127.0.0.1", "127.0.0.3")
    # At another's port, one that listens everywhere would answer.
    held = next(one for one in iter(lambda: hold_port(range(0), "127.0.0.2"), None) if not any_answers(one, others))
    port = held.getsockname()[1]
    meeting = Meeting("127.0.0.2", port, held)
    store = meeting.place(1, timedelta(seconds=HANG_S))["store"]
    store.set("key", "value")
    with socket.create_connection(("127.0.0.2", port), timeout=HANG_S):
        pass
    for other in others:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=HANG_S)
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1, is that of none of its network interfaces; start its Ray"):
        hold_port(range(0), "192.0.2.1")  # RFC 5737: nobody's
    reader = dist.TCPStore("127.0.0.2", port, is_master=False, wait_for_workers=False)
    assert dist.PrefixStore("default_pg", reader).get("key") == b"value"
