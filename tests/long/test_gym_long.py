# SPDX-License-Identifier: Apache-2.0
"""Real servers of NeMo Gym, started by the run, in real steps: ids trained are ids sampled, and rewards are those of our graders.

`NEMO_GYM_RUN` names the `ng_run` of an environment with nemo-gym and what its servers need (as scripts/bench/gym_rewards.py makes one).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.cluster.payload import pull
from mrl.envs import mcqa
from mrl.envs.task import Task
from mrl.loop.run import Step
from mrl.train import train_step
from mrl.types import RolloutGroup, RunState
from tests.stack.loop.conftest import LiveRun, live_run
from tests.stack.loop.test_agents import rounded, take_drawn, turns, watch
from tests.waiting import HANG_S

NG_RUN = os.environ.get("NEMO_GYM_RUN", "")
pytestmark = [
    pytest.mark.long("gym"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not NG_RUN, reason="NEMO_GYM_RUN names no ng_run"),
]

SERVERS = ("mcqa", "example_session_state_mgmt", "example_single_tool_call")
AGENTS = tuple(f"{server}_simple_agent" for server in SERVERS)
PATHS = [
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    *(f"resources_servers/{name}/configs/{name}.yaml" for name in SERVERS),
]
STATE_TOOL = {"type": "function", "name": "get_counter_value", "parameters": {"type": "object", "properties": {}}, "strict": True}


def rows_of(number: int) -> Iterator[dict]:
    """A row for each agent, in the form of Gym's example rows, as short as a tiny model's context is."""

    def row(server: str, question: str, tools: list[dict], **fields: object) -> dict:
        request = {"input": [{"role": "user", "content": question}], "tools": tools}
        return {"responses_create_params": request, "agent_ref": {"name": f"{server}_simple_agent"}, **fields}

    yield row("mcqa", f"{number}? A or B, in a box.", [], options=[{"A": "one"}, {"B": "two"}], expected_answer="B")
    yield row("example_session_state_mgmt", f"count to {number}", [STATE_TOOL], expected_count=number, initial_count=3)
    yield row("example_single_tool_call", f"weather in {number}", [{**STATE_TOOL, "name": "get_weather"}])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("gym")
    environment = Path(NG_RUN).parents[1]
    # All servers in the one environment of ng_run.
    for place in (
        *(f"resources_servers/{name}" for name in SERVERS),
        "responses_api_agents/simple_agent",
        "responses_api_models/vllm_model",
    ):
        (folder / "venvs" / place).mkdir(parents=True)
        (folder / "venvs" / place / ".venv").symlink_to(environment)
    rows = folder / "gym.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for number in range(10, 20) for row in rows_of(number)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        yield from live_run(
            folder,
            "policy.generation.vllm_cfg.expose_http_server=true",
            "policy.generation.vllm_cfg.http_server_share=1.0",
            f"data.train.data_path={rows}",
            f"data.validation.data_path={rows}",
            "data.shuffle=false",
            "data.default.processor=nemo_gym_data_processor",
            "data.default.env_name=nemo_gym",
            "env.should_use_nemo_gym=true",
            "env.nemo_gym.embedded=false",
            f"env.nemo_gym.command={NG_RUN}",
            f"env.nemo_gym.config_paths=[{','.join(PATHS)}]",
            "env.nemo_gym.skip_venv_if_present=true",
            f"env.nemo_gym.uv_venv_dir={folder / 'venvs'}",
            f"grpo.num_prompts_per_step={len(AGENTS)}",
            f"policy.train_global_batch_size={len(AGENTS) * 4}",
            "cluster.cpu_units_per_node=2",
            "policy.megatron_cfg.expert_model_parallel_size=1",
        )


def test_three_steps_train_what_was_sampled(live: LiveRun, monkeypatch: pytest.MonkeyPatch):
    live.on_engines(watch)
    supplier, steps = live.run.supplier, list[list[RolloutGroup]]()
    sample = supplier.sample

    def noted(state: RunState, step: Step) -> list[RolloutGroup]:
        steps.append(sample(state, step))
        return steps[-1]

    monkeypatch.setattr(supplier, "sample", noted)
    judge = mcqa.make()
    for _ in range(3):
        train_step(live.run, live.state)
        groups, metrics = steps[-1], live.state.metrics
        assert {group.prompt.env_name for group in groups} == set(AGENTS)
        infos = [info for group in groups for rollout in group.rollouts for info in rollout.sequences]
        trained = rounded(turns(pull(infos, timeout_s=HANG_S)))
        # Every answer that an engine gave came back by Gym's servers, and is trained once.
        assert trained == rounded([one for engine in live.on_engines(take_drawn) for one in engine]) and trained.total() >= 12
        assert metrics["train/token_mult_prob_error"] <= 1.001
        for name in AGENTS:
            assert metrics[f"rollout/{name}/num_rollouts"] == 4, name
            assert not any(key.startswith(f"rollout/{name}/untrained") for key in metrics), name
        for group in groups:
            assert all(verdict.is_valid for verdict in group.verdicts), [verdict.reason for verdict in group.verdicts]
            for verdict in group.verdicts if group.prompt.env_name == AGENTS[0] else ():
                assert verdict.reward == judge(Task((verdict.text,), "B", group.prompt.text, group.prompt.row)).reward
    assert live.state.weight_version > 1
