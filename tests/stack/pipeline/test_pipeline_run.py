# SPDX-License-Identifier: Apache-2.0
"""The whole run as its command, at PP2 x DP2 x EP2 with router replay: from the warm-started model to a checkpoint
resumed with two engines of TP2, and with a dedicated engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mrl.store.checkpoints import find_damage
from tests import models
from tests.faults.attempts import tiny_inputs
from tests.learn.quickstart import PREFIX
from tests.sources import ROOT, search_path
from tests.stack.loop.conftest import SMALL
from tests.waiting import HANG_S

TIMEOUT_S = 3 * HANG_S
LAYOUT = [
    f"policy.megatron_cfg.{setting}"
    for setting in (
        "tensor_model_parallel_size=1",
        "sequence_parallel=false",
        "pipeline_model_parallel_size=2",
        "expert_model_parallel_size=2",
    )
]
REPLAY = ["policy.router_replay.enabled=true"]
LOGGERS = [
    f"logger.{setting}"
    for setting in (
        "wandb_enabled=true",
        "wandb.mode=offline",
        "gpu_monitoring.collection_interval=1",
        "num_val_samples_to_print=2",
    )
]


MRL, OWN_LOOP = ["-m", "mrl.train"], [str(Path(__file__).parent / "own_loop.py")]


def train(folder: Path, *overrides: str, config: str = "grpo_tiny.yaml", program: Sequence[str] = MRL) -> str:
    """Output of a run of a packaged config on the tiny model, which ends well."""
    inputs = [*tiny_inputs(), f"checkpointing.checkpoint_dir={folder}"]
    command = [sys.executable, *program, config, *inputs, *SMALL, *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return re.sub(PREFIX, "", ended.stdout, flags=re.MULTILINE)


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def is_of_time(name: str) -> bool:
    of_time = ("time/", "performance/", "rollout/reward_wait", "rollout/reward_queue")
    return name.startswith(of_time) or name.endswith(("seconds", "_per_s", "idle_fraction"))


def numbers(folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps that no clock and no count of refits or attempts has a part in."""
    return [
        {
            name: value
            for name, value in row.items()
            if not is_of_time(name) and name not in ("refit/weight_version", "logger/attempt")
        }
        for row in rows(folder)
    ]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    train(folder, *LAYOUT, *REPLAY, "grpo.max_num_steps=2", *LOGGERS)
    return folder


@pytest.mark.long("async")
def test_a_dedicated_engine_trains_bit_for_bit_as_a_colocated_one(two_steps: Path, tmp_path: Path):
    # Two rounds at least, so that the engine's exchange memory is used again.
    dedicated = ["policy.generation.colocated.enabled=false", "policy.refit_buffer_size_gb=0.0008"]
    printed = train(tmp_path / "run", *LAYOUT, *REPLAY, "grpo.max_num_steps=2", *dedicated)
    assert "Number of actors online: 5/5" in printed
    assert re.search(r"^4 +\S+ +- +0\.0$", printed, re.MULTILINE), printed
    assert re.search(r"in [2-9] rounds: 0\.0 MiB from their own slots", printed), printed
    colocated, other = (
        [{name: value for name, value in row.items() if not is_of_time(name)} for row in rows(folder)[:3]]
        for folder in (two_steps, tmp_path / "run")
    )
    assert other[-1]["refit/verified_bytes"] > 1e6
    assert other == colocated


@pytest.mark.long("async")
@pytest.mark.parametrize("kind", ["pipeline", "expert"])
def test_an_engine_of_two_stages_or_groups_serves_a_run(tmp_path: Path, kind: str):
    # Attention and experts on both stages, as vLLM needs them.
    model = models.save_model(tmp_path / "model", "nemotron_h", hybrid_override_pattern="M*EM*EM")
    sizes = [
        "cluster.cpu_units_per_node=2",
        f"policy.generation.vllm_cfg.{kind}_parallel_size=2",
        "grpo.max_num_steps=2",
    ]
    given = [
        f"policy.model_name={model}",
        f"policy.tokenizer.name={ROOT}/prepared/tiny/model",
        *(REPLAY if kind == "expert" else []),
    ]
    printed = train(tmp_path / "run", *sizes, *given)
    assert re.findall(r"^\d +\S+ +(\d) +(\d\.\d)$", printed, re.MULTILINE) == [("0", "0.0"), ("1", "0.1")], printed
    first, second = rows(tmp_path / "run")[1:]
    for row in (first, second):
        assert kind == "pipeline" or row["train/router_mismatch"] <= 0.001
        assert row["train/token_mult_prob_error"] <= 1.001 and row["rollout/failed"] == 0
        assert (row["train/grad_norm"] > 0) == (row["train/reward_std"] > 0)
    assert second["refit/weight_version"] > first["refit/weight_version"] and second["refit/verified_bytes"] > 1e5


def check_loggers_files(folder: Path) -> None:
    """Loggers have run and resume as one, with training and host metrics; loggers/test_services.py has all of them."""
    assert all("logger/lost" not in row for row in rows(folder))
    for pattern in ("events.out.tfevents.*", "run-*.wandb"):
        first, second = sorted((folder / "logs").rglob(pattern))
        assert pattern.startswith("events") or first.name == second.name
        for name in (b"train/token_mult_prob_error", b"timing/train/total_step_time", b"ray/node.0.rss_gb"):
            assert name in first.read_bytes() and name in second.read_bytes(), (name, pattern)


def test_a_run_over_two_stages_trains_saves_and_resumes(two_steps: Path):
    folder = two_steps
    assert [row["step"] for row in rows(folder)] == [0, 1, 2]
    assert find_damage(folder / "step_2") is None
    # Resumed with two engines that each take two ranks' weights.
    engines = ["policy.generation.vllm_cfg.tensor_parallel_size=2", "policy.generation.num_cpu_engines=2"]
    printed = train(folder, *LAYOUT, *REPLAY, "grpo.max_num_steps=3", "grpo.val_at_end=true", *LOGGERS, *engines)
    placed = re.findall(r"^\d +\S+ +(\d) +(\d\.\d)$", printed, re.MULTILINE)
    assert placed == [("0", "0.0"), ("1", "0.1"), ("2", "1.0"), ("3", "1.1")], printed
    assert re.search(r"^Validation sample 2 of 2 at step 3\nPrompt: ", printed, re.MULTILINE), printed
    check_loggers_files(folder)
    assert "Resuming from" in printed and "(step 2 of 3)" in printed
    *_, before, after = rows(folder)
    assert (before["step"], after["step"]) == (2, 3)
    assert find_damage(folder / "step_3") is None
    for row in rows(folder):
        # What was not finite is written as null.
        assert None not in row.values(), row
    for row in rows(folder)[1:]:
        assert row["train/token_mult_prob_error"] <= 1.001
        # In float32 a choice differs from the engine's where two experts are all but equal.
        assert 0 <= row["train/router_mismatch"] <= row["train/router_mismatch_worst_layer"] <= 0.001
        # Without a right answer, or with nothing else, there is nothing to learn.
        assert (row["train/grad_norm"] > 0) == (row["train/reward_std"] > 0)
        assert row["rollout/failed"] == 0
    assert after["train/grad_norm"] > 0
    assert {path.name for path in (folder / "step_3" / "policy").iterdir()} == {"weights", "tokenizer"}
