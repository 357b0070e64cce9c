# SPDX-License-Identifier: Apache-2.0
"""Part "speculation": MTP layers learn from noise to propose what the policy samples; it learns as without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import models
from tests.learn.quickstart import PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S, call

pytestmark = [pytest.mark.long("speculation"), pytest.mark.timeout(2400)]

NUM_STEPS, SHOWN = 80, 8
SETTINGS = [
    "policy.model_name=prepared/tiny/mtp",
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.val_period=40",
    "checkpointing.save_period=40",
    # As where these layers learn.
    "policy.logprob_chunk_size=1024",
    "++policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 2}",
]
LEARN = [
    f"policy.megatron_cfg.mtp_{key}"
    for key in ("num_layers=2", "use_repeated_layer=true", "detach_heads=true", "loss_scaling_factor=0.3")
]


def test_layers_learn_what_the_policy_samples(tmp_path: Path):
    call(tmp_path, "-m", "mrl.prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)
    shutil.copytree(tmp_path / "prepared/tiny/model", tmp_path / "prepared/tiny/mtp")
    models.add_mtp(tmp_path / "prepared/tiny/mtp", seed=0)
    left_alone, learning = (steps(tmp_path, name, settings) for name, settings in (("left", []), ("learning", LEARN)))
    # Detached, their loss reaches nothing else. Four ranks sum norms in another order, which at first changes no
    # answer.
    for one, other in zip(learning[:SHOWN], left_alone[:SHOWN], strict=True):
        assert one["train/reward"] == pytest.approx(other["train/reward"], abs=1e-6), one["step"]
    assert rate(learning[-SHOWN:], "train/reward") == pytest.approx(rate(left_alone[-SHOWN:], "train/reward"), abs=0.05)
    before, after = rate(learning[:SHOWN]), rate(learning[-SHOWN:])
    assert before <= 0.25 and after >= before + 0.2 and after >= 2 * rate(left_alone[-SHOWN:])


def steps(folder: Path, name: str, settings: list[str]) -> list[dict[str, float]]:
    """Metrics of the train steps of a run."""
    run = f"results/{name}"
    call(
        folder,
        "-m",
        "mrl.train",
        "grpo_tiny.yaml",
        *SETTINGS,
        *settings,
        f"checkpointing.checkpoint_dir={run}",
        timeout_s=TRAIN_TIMEOUT_S,
    )
    found = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [step for step in found if step["step"]]


def rate(found: list[dict[str, float]], name: str = "rollout/spec_acceptance_rate") -> float:
    return sum(step[name] for step in found) / len(found)
