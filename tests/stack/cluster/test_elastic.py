# SPDX-License-Identifier: Apache-2.0
"""Engines that come and go while a run trains: it goes on with those that are there, and ends as undisturbed."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from mrl.loop.rollouts import RolloutSupplier
from mrl.loop.run import Run
from mrl.refit.inputs import Part
from mrl.refit.pull import VerifyReport
from mrl.signals import MARK
from mrl.types import RunState
from tests.drivers import train_step
from tests.faults.attempts import lineage
from tests.stack.ahead.conftest import running
from tests.stack.cluster.conftest import ray_nodes
from tests.stack.cluster.test_dedicated_refit import die_in_round
from tests.waiting import HANG_S, wait_until

ELASTIC = [
    "grpo.async_grpo.enabled=false",
    "grpo.max_num_steps=20",
    "grpo.val_at_start=false",
    "policy.generation.num_cpu_engines=2",
    "policy.generation.min_num_engines=1",
    "policy.generation.max_new_tokens=24",
    "policy.refit_buffer_size_gb=0.0005",  # several rounds
    "env.math.timeout_s=600",
]
TWO_RANKS = ["cluster.num_nodes=2"]


def weights(policy) -> str:
    """Checksum of all weights of a rank."""
    found = hashlib.sha256()
    for slot in sorted(policy._tensors, key=str):
        found.update(policy._tensors[slot].detach().contiguous().view(-1).numpy().tobytes())
    return found.hexdigest()


def weights_of(run: Run[RolloutSupplier]) -> list[object]:
    return run.supplier.session.policies.apply(weights, deadline_s=HANG_S)


def pid_of(run: Run[RolloutSupplier], index: int) -> int:
    (pid,) = run.supplier.session.engines.apply(lambda _: os.getpid(), only=[index], deadline_s=HANG_S)
    return int(str(pid))


def step_in_which(run: Run[RolloutSupplier], state: RunState, index: int, kill: Callable[[], object]) -> None:
    """A step in which `kill` is called while an engine has rollouts under way."""
    book, faults = run.supplier.session.engines.book, list[BaseException]()

    def wait_and_kill() -> None:
        try:
            wait_until(lambda: book._actors[index].owed and book._actors[index].calls, "rollouts under way")
            kill()
        except BaseException as fault:
            faults.append(fault)

    killer = threading.Thread(target=wait_and_kill)
    killer.start()
    train_step(run, state)
    killer.join()
    assert not faults, faults


def add_node(cluster: Cluster) -> None:
    """Adds a node that is not the run's, so that the run does not end it: its processes carry no mark of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK, raising=False)
        cluster.add_node(num_cpus=1)


def num_serving(state: RunState) -> int:
    return int(state.metrics["rollout/num_engines"])


@pytest.mark.long("nodes")
def test_a_run_goes_on_without_a_lost_node_and_takes_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (unbroken := tmp_path / "unbroken").mkdir()
    (broken := tmp_path / "broken").mkdir()
    caplog.set_level(logging.INFO)
    with ray_nodes(tmp_path, monkeypatch, 2, 1, 1) as cluster:
        with running(unbroken, *ELASTIC, *TWO_RANKS) as (run, state):
            for _ in range(8):
                train_step(run, state)
                assert num_serving(state) == 2
            expected, expected_lineage = weights_of(run), lineage(run.folder.path)
        caplog.clear()
        with running(broken, *ELASTIC, *TWO_RANKS) as (run, state):
            engines, placement = run.supplier.session.engines, run.supplier.session.engines.placement
            assert [placement.node_of[slot] for slot in range(4)] == [0, 0, 1, 2]
            train_step(run, state)
            # The node of slot 3 goes while its engine samples.
            nodes = {str(node.node_id): node for node in cluster.list_all_nodes()}
            (name,) = ray.util.placement_group_table(placement._places[3][0])["bundles_to_node_id"].values()
            step_in_which(run, state, 1, lambda: cluster.remove_node(nodes[name], allow_graceful=False))
            wait_until(lambda: engines.serving == [0], "loss of an engine")
            train_step(run, state)
            assert num_serving(state) == 1
            assert "1 of 2 engines go on, also with its requests (" in caplog.text
            add_node(cluster)
            wait_until(lambda: engines.joining == [1], "an engine on the new node")
            train_step(run, state)
            assert engines.serving == [0, 1] and "engine 1 has joined: 2 of 2 engines serve" in caplog.text
            train_step(run, state)
            assert num_serving(state) == 2
            # It dies in a refit, and its node stays.
            engines.apply(die_in_round, 1, only=[1], deadline_s=HANG_S)
            num_restarts = engines.book.num_restarts
            train_step(run, state)
            assert engines.book.num_restarts > num_restarts
            # When the last one that serves dies, the next one that is up gets the step's weights, and its rollouts.
            wait_until(lambda: 1 in {*engines.joining, *engines.serving}, "another engine")
            pid = pid_of(run, 0)
            step_in_which(run, state, 0, lambda: os.kill(pid, signal.SIGKILL))
            train_step(run, state)
            assert state.step == 8 and 1 in engines.serving
            assert weights_of(run) == expected
            assert lineage(run.folder.path) == expected_lineage


@pytest.mark.long("nodes")
def test_a_run_starts_with_fewer_engines_than_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = list[tuple[list[object], dict]]()
    with ray_nodes(tmp_path, monkeypatch, 2, 1) as cluster:
        for number in (1, 2):
            (folder := tmp_path / f"with-{number}").mkdir()
            with running(folder, *ELASTIC, *TWO_RANKS) as (run, state):
                engines = run.supplier.session.engines
                train_step(run, state)
                if number == 1:
                    assert num_serving(state) == 1
                    add_node(cluster)
                # The places of the run before may have been free too late for the start.
                wait_until(lambda: len({*engines.serving, *engines.joining}) == 2, "both engines")  # noqa: B023
                train_step(run, state)
                train_step(run, state)
                assert num_serving(state) == 2
                found.append((weights_of(run), lineage(run.folder.path)))
    assert found[0] == found[1]


@pytest.mark.long("nodes")
def test_an_engine_that_gives_no_answer_in_a_refit_is_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    limit = f"deadlines.refit_s={HANG_S / 5:g}"
    with running(tmp_path, *ELASTIC, limit) as (run, state):
        train_step(run, state)
        engines, refit, pid = run.supplier.session.engines, run.supplier.session.refit, pid_of(run, 1)
        run_rounds = refit._run_rounds

        def stop_and_run(readers: Sequence[int], part: Part) -> list[VerifyReport]:
            setattr(refit, "_run_rounds", run_rounds)  # noqa: B010  a plain assignment is a type error
            os.kill(pid, signal.SIGSTOP)
            return run_rounds(readers, part)

        setattr(refit, "_run_rounds", stop_and_run)  # noqa: B010  a plain assignment is a type error
        train_step(run, state)
        assert "engine 1 died during refit: it gives no answer; 1 of 2 engines go on" in caplog.text
        wait_until(lambda: 1 in {*engines.joining, *engines.serving}, "another engine")
        train_step(run, state)
        train_step(run, state)
        assert num_serving(state) == 2
