# SPDX-License-Identifier: Apache-2.0
"""kill -9 of driver, agent and engine between two turns of agents' conversations: the run ends as undisturbed."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path

import pytest

from tests.faults.attempts import Attempt, lineage
from tests.faults.test_kill import rows, weights
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import wait_until

pytestmark = pytest.mark.long("kills")

STEPS = 4
SETTINGS = [
    *SMALL,
    f"grpo.max_num_steps={STEPS}",
    "grpo.num_prompts_per_step=2",
    "grpo.val_at_start=false",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=10",
    "cluster.cpu_units_per_node=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.megatron_cfg.expert_model_parallel_size=1",
    "policy.generation.vllm_cfg.expose_http_server=true",
    "policy.generation.vllm_cfg.http_server_share=1.0",
    "++env.own.agents.patient=tests.stack.loop.trial_agents:patient",
    "data.default.env_name=patient",
]


def questions_by_step(run_folder: Path) -> list[set[str]]:
    found = []
    for step in range(1, STEPS + 1):
        (path,) = (run_folder / "logs").glob(f"exp_*/train_data_step{step}.jsonl.gz")
        found.append({json.loads(line)["content"][0] for line in gzip.decompress(path.read_bytes()).splitlines()})
    return found


def without_losses(run_folder: Path) -> list[dict]:
    return [
        {name: value for name, value in row.items() if not name.endswith("/lost_attempts")} for row in rows(run_folder)
    ]


def test_kills_in_the_middle_of_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIAL_FOLDER", str(tmp_path))
    monkeypatch.setenv("MRL_CACHE", str(tmp_path / "cache"))
    free, waiting = tmp_path / "free", tmp_path / "waiting"
    (tmp_path / "lonely").touch()
    inputs = write_inputs(tmp_path)

    def attempt(run: str, log: str) -> Attempt:
        folder = tmp_path / run
        return Attempt(
            folder, [*inputs, *SETTINGS, f"checkpointing.checkpoint_dir={folder}"], tmp_path / f"{run}-{log}.log"
        )

    def waits(questions: set[str], not_in: int = 0) -> int:
        """The process in which an agent waits with one of these questions; 0: there is none."""
        lines = [line.split(" ", 1) for line in waiting.read_text().splitlines()]
        return next((int(pid) for pid, question in lines if question in questions and int(pid) != not_in), 0)

    free.write_text("*")
    with attempt("unbroken", "only") as only:
        assert only.finish() == 0, only.text()[-4000:]
    steps = questions_by_step(only.run_folder)
    # The driver dies, and again in the attempt that follows.
    for step in (1, 2):
        waiting.write_text("")
        free.write_text("\n".join(set.union(*steps[:step]) - steps[step]))
        with attempt("broken", str(step)) as current:
            current.wait_until(lambda: bool(waits(steps[step])), f"step {step + 1}")  # noqa: B023  called in this turn of the loop
            os.kill(current.process.pid, signal.SIGKILL)
            assert current.finish() not in (0, 2)
            current.assert_nothing_survives()
    assert sorted(lineage(current.run_folder)) == [1, 2]
    waiting.write_text("")
    free.write_text("\n".join(set.union(*steps[:3]) - steps[3]))
    with attempt("broken", "last") as last:
        last.wait_until(lambda: bool(waits(steps[3])), "step 4")
        os.kill(pid := waits(steps[3]), signal.SIGKILL)
        # All that it had under way begins again, in another process and in sessions of its own.
        last.wait_until(lambda: bool(waits(steps[3], not_in=pid)), "another process")
        os.kill(last.actor_pid("engine-0"), signal.SIGKILL)
        free.write_text("*")
        assert last.finish() == 0, last.text()[-4000:]
        assert "Resuming from" in last.text()
    wait_until(lambda: not last.processes(), "end of all processes")
    assert rows(last.run_folder)[-1]["rollout/patient/lost_attempts"] > 0
    assert lineage(last.run_folder) == lineage(only.run_folder) and sorted(lineage(last.run_folder)) == [1, 2, 3, 4]
    assert without_losses(last.run_folder) == without_losses(only.run_folder)
    assert weights(last.run_folder, tmp_path, STEPS) == weights(only.run_folder, tmp_path, STEPS)
