# SPDX-License-Identifier: Apache-2.0
"""Environments of verifiers, behind a URL, in real steps: ids trained are ids sampled.

`VERIFIERS_PYTHON` names the Python of an environment of its own: `pip install verifiers==0.4.0 uv`. Its programs are prepared by uv, which
takes a network the first time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.long.calling_model import CHAT, Steps, save_calling_model
from tests.stack.loop.conftest import LiveRun, live_run
from tests.stack.loop.test_agents import watch
from tests.waiting import wait_until

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")
pytestmark = [
    pytest.mark.long("verifiers"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="VERIFIERS_PYTHON names no Python"),
]
AGENTS = {"capital": "CapitalTaskset", "weather": "WeatherTaskset"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("verifiers")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(__file__).with_name("verifiers_server.py")
    path = os.pathsep.join((str(Path(PYTHON).parent), os.environ["PATH"]))
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(program.parent)}
    server = subprocess.Popen([PYTHON, str(program), str(port)], env=variables)
    rows = folder / "rows.jsonl"
    fields = [{"taskset": AGENTS[name], "index": index, "agent_ref": {"name": name}} for index in range(10) for name in AGENTS]
    rows.write_text(
        "".join(
            json.dumps(one | {"responses_create_params": {"input": [{"role": "user", "content": "see the task"}]}}) + "\n" for one in fields
        )
    )

    def answers() -> bool:
        assert server.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, "server")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        for running in live_run(
            folder,
            f"policy.model_name={save_calling_model(folder / 'caller')}",
            *CHAT,
            *(f"++env.remote.{name}=http://127.0.0.1:{port}/" for name in AGENTS),
            f"data.train.data_path={rows}",
            f"data.validation.data_path={rows}",
            "data.shuffle=false",
            "data.default.processor=nemo_gym_data_processor",
            "data.default.env_name=nemo_gym",
            "env.should_use_nemo_gym=true",
            "grpo.num_prompts_per_step=2",
            "policy.train_global_batch_size=8",
            "cluster.cpu_units_per_node=2",
            "policy.megatron_cfg.expert_model_parallel_size=1",
        ):
            running.on_engines(watch)
            yield running
    server.terminate()
    server.wait()


def test_three_steps_train_what_was_sampled(live: LiveRun, monkeypatch: pytest.MonkeyPatch):
    steps = Steps(live, monkeypatch)
    for _ in range(3):
        metrics = steps.step(AGENTS)
        trained = steps.trained()
        # Every answer that an engine gave is trained once.
        assert trained == steps.drawn() and trained.total() > 8
        assert metrics["rollout/capital/turns"] == 1 and metrics["rollout/weather/turns"] > 1
        assert metrics["rollout/capital/sequences"] == metrics["rollout/weather/sequences"] == 1
        for name in AGENTS:
            assert not any(key.startswith(f"rollout/{name}/untrained") for key in metrics), name
    assert live.state.weight_version > 1
