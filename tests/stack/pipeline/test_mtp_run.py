# SPDX-License-Identifier: Apache-2.0
"""A run of a model with multi-token prediction layers, which propose tokens in its rollouts, from folder to export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from conversion.families.registry import family
from mrl.convert import main as convert
from mrl.recipes import tokenizer
from tests import models
from tests.sources import ROOT
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.stack.pipeline.test_pipeline_run import LAYOUT, TIMEOUT_S, rows

SPECULATE = "policy.generation.vllm_kwargs.speculative_config={method: mtp, num_speculative_tokens: 2}"

_MEGATRON = "policy.megatron_cfg"
LEARN = [
    f"{_MEGATRON}.mtp_{key}"
    for key in ("num_layers=2", "use_repeated_layer=true", "detach_heads=true", "loss_scaling_factor=0.3")
]
TWO_RANKS = ["cluster.cpu_units_per_node=2", "policy.megatron_cfg.expert_model_parallel_size=1"]
# A random model is never right, so that no reward moves it.
DECAY = "policy.megatron_cfg.optimizer.weight_decay=1.0"


def test_every_tensor_of_a_trained_model_is_accounted_for(tmp_path: Path):
    inputs = write_inputs(tmp_path)
    model = tmp_path / "model"
    generation = (model / "generation_config.json").read_text()
    # Two stages share six layers.
    models.save_foreseeing(model, hybrid_override_pattern="MEM*-E", num_hidden_layers=6)
    (model / "generation_config.json").write_text(generation)
    tokenizer.save(model, model_max_length=1280)
    steps = run(
        tmp_path / "run", inputs, ["grpo.max_num_steps=2", "checkpointing.save_period=2", SPECULATE, DECAY, *LEARN]
    )
    assert len(steps) == 2 and max(step["rollout/spec_acceptance_rate"] for step in steps) > 0
    for step in steps:
        assert 0 <= step["rollout/spec_acceptance_rate"] <= 1 <= step["rollout/spec_acceptance_length"] <= 3
        assert step["rollout/tokens_per_s"] > 0
        # Logprobs are those of the tokens that were accepted, under the weights of the trainer.
        assert step["train/token_mult_prob_error"] <= 1.001
        assert step["train/mtp_grad_norm"] > 0 and all(step[f"train/mtp_{ahead}_loss"] > 0 for ahead in (1, 2))
    # The export holds every tensor, and those of the MTP layers have learned as the others have. Routers are frozen,
    # biases stay.
    assert convert(["mcore-to-hf", "--mcore", str(tmp_path / "run" / "step_2"), "--out", str(tmp_path / "export")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "export"))
    hf_config = json.loads((model / "config.json").read_text())
    layers = family(hf_config).mtp(hf_config)
    assert before.keys() == after.keys() == family(hf_config).canonical(hf_config).keys()
    assert {name for name in before if name.startswith("mtp.")} == layers
    same = {name for name in layers if torch.equal(before[name], after[name])}
    assert same == {name for name in layers if name.endswith("e_score_correction_bias")}
    trained = [name for name in before.keys() - layers if not torch.equal(before[name], after[name])]
    assert len(trained) > 0.5 * len(before.keys() - layers)


def run(folder: Path, inputs: list[str], overrides: list[str]) -> list[dict[str, float]]:
    """Metrics of the train steps of a run that ends well."""
    settings = [*inputs[:-1], f"checkpointing.checkpoint_dir={folder}", *SMALL, *LAYOUT, *TWO_RANKS, *overrides]
    command = [sys.executable, "-m", "mrl.train", "grpo_tiny.yaml", *settings, "policy.router_replay.enabled=false"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return [row for row in rows(folder) if row["step"]]
