# SPDX-License-Identifier: Apache-2.0
"""Environments of verifiers, by name and by `examples/verifiers_agent.py`, in real steps: ids trained are ids sampled.

`VERIFIERS_PYTHON` names the Python of an environment of its own: `pip install verifiers==0.4.0 uv`. Its programs are
prepared by uv, which takes a network the first time. `VERIFIERS_CLASSIC_PYTHON` has `'verifiers>=0.1.14,<0.4'`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from tests.learn.quickstart import TRAIN_TIMEOUT_S, call
from tests.long.calling_model import CHAT, Steps, save_calling_model
from tests.sources import ROOT
from tests.stack.loop.conftest import LiveRun, live_run
from tests.stack.loop.test_agents import watch
from tests.waiting import HANG_S, wait_until

PYTHON, CLASSIC_PYTHON = (os.environ.get(f"VERIFIERS_{kind}PYTHON", "") for kind in ("", "CLASSIC_"))
pytestmark = [
    pytest.mark.long("verifiers"),
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="VERIFIERS_PYTHON names no Python"),
]
AGENTS = ("capital", "weather")
PROGRAM = ROOT / "examples" / "verifiers_agent.py"
TASKS = Path(__file__).with_name("verifiers_tasks")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    folder = tmp_path_factory.mktemp("verifiers")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join((str(Path(PYTHON).parent), os.environ["PATH"]))
    variables = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join((str(TASKS), str(PROGRAM.parent)))}

    def lines(taskset: str) -> list[str]:
        command = [PYTHON, str(PROGRAM), "rows", taskset]
        return subprocess.run(
            command, env=variables, check=True, capture_output=True, text=True, timeout=HANG_S
        ).stdout.splitlines()

    # The example's own taskset has rows, too.
    assert json.loads(lines("verifiers_sums")[0]) == {
        "question": "10+80=",
        "answer": "judged by verifiers",
        "env_name": "verifiers_sums",
        "taskset": "verifiers_sums",
        "index": 0,
    }
    server = subprocess.Popen([PYTHON, str(PROGRAM), "serve", str(port)], env=variables)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{line}\n" for pair in zip(*map(lines, AGENTS), strict=True) for line in pair))

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


@pytest.mark.parametrize(
    ("name", "python", "arguments"),
    [("capital", PYTHON, []), ("classic_sums", CLASSIC_PYTHON, ["++env.verifiers_args.classic_sums.largest=40"])],
)
def test_an_environment_trains_by_its_name(tmp_path: Path, name: str, python: str, arguments: list[str]):
    """Two steps, and one after a resume, which reads the rows anew; rewards are those of the environment's judge."""
    if not python:
        pytest.skip("no Python is named for it")
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    (tmp_path / "prepared").symlink_to(ROOT / "prepared")
    (tmp_path / f"{name}.py").write_text((TASKS / f"{name}.py").read_text())
    train = [
        "-m",
        "mrl.train",
        "grpo_tiny.yaml",
        f"++env.verifiers.{name}={python}",
        f"data.train.data_path=verifiers:{name}",
        *arguments,
        "++data.train.split_validation_size=2",
        "data.validation=null",
        "cluster.cpu_units_per_node=2",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=8",
        "grpo.val_at_start=false",
        "checkpointing.checkpoint_dir=run",
    ]
    for num_steps in (2, 3):
        call(tmp_path, *train, f"grpo.max_num_steps={num_steps}", timeout_s=TRAIN_TIMEOUT_S)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3]
    for row in (row for row in rows if "train/loss" in row):
        assert row[f"rollout/{name}/failed"] == row[f"rollout/{name}/lost_attempts"] == 0
        assert row["train/token_mult_prob_error"] <= 1.001
        if name == "classic_sums":  # weights 1 and 0.1 of its rubric
            judged = row[f"rollout/{name}/is_right"] + 0.1 * row[f"rollout/{name}/num_digits"]
            assert row[f"rollout/{name}/reward"] == pytest.approx(judged)
