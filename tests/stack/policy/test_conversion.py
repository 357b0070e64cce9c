# SPDX-License-Identifier: Apache-2.0
"""A converted checkpoint is loaded by real Megatron ranks, saved by them, and converted back without a changed bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conversion.files.torch_dist import TorchDistFolder
from mrl.convert import main as convert
from tests import models
from tests.sources import ROOT
from tests.stack.policy import conversion_ranks, policy_ranks, save_ranks
from tests.stack.ranks import RankPool
from tests.waiting import HANG_S

LONG = pytest.mark.long("conversion")
LAYOUTS = ["tp2 sp dp2 ep2", "pp2 dp2 ep2"]
DENSE = ("llama", "qwen2", "qwen3", "qwen3_5_text")
MOE = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text")
CASES = [
    *(("nemotron_h", layout) for layout in LAYOUTS),
    *((model_type, "tp2 sp pp2") for model_type in DENSE),
    *((model_type, "tp2 sp pp2 ep2") for model_type in MOE),
]


def _with_mtp(model_type: str) -> dict[str, Any]:
    return dict(num_nextn_predict_layers=2) if model_type == "nemotron_h" else {}


@pytest.mark.parametrize(("model_type", "layout"), CASES)
def test_hugging_face_to_megatron_and_back_is_bit_identical(
    ranks: RankPool, tmp_path: Path, model_type: str, layout: str
):
    hf_folder = models.save_model(tmp_path / "hf", model_type, **_with_mtp(model_type))
    # Before its first step an optimizer has no state to save.
    config = policy_ranks.run_config(hf_folder, layout, "checkpointing.save_optimizer=false")
    # Files of one, of two and of four ranks.
    cut = ["--tp", "2", "--pp", "2", "--ep", "2"] if model_type in MOE else ["--tp", "2"] if model_type in DENSE else []
    assert convert(["hf-to-mcore", "--hf", str(hf_folder), "--out", str(tmp_path / "mcore"), *cut]) == 0
    arguments = (config, hf_folder, tmp_path / "mcore", tmp_path / "saved")
    differing = ranks.run(conversion_ranks.load_and_save, *arguments, world_size=policy_ranks.world_size(layout))
    assert differing == [[]] * policy_ranks.world_size(layout)
    assert_back_unchanged(hf_folder, tmp_path / "saved", tmp_path / "back")
    # Without ranks in between.
    assert_back_unchanged(hf_folder, tmp_path / "mcore", tmp_path / "straight")


# test_layouts.py holds what the policy loads of every family to transformers, the test above what it saves: here one of
# each kind of layer.
@pytest.mark.parametrize(
    ("model_type", "layout"),
    [case for case in CASES if case[0] in ("nemotron_h", "qwen3", "gpt_oss", "deepseek_v3", "qwen3_next")],
)
def test_a_folder_that_the_policy_has_loaded_is_saved_without_a_changed_bit(
    ranks: RankPool, tmp_path: Path, model_type: str, layout: str
):
    hf_folder = models.save_model(tmp_path / "hf", model_type)
    config = policy_ranks.run_config(hf_folder, layout, "checkpointing.save_optimizer=false")
    ranks.run(
        conversion_ranks.save_loaded_folder, config, tmp_path / "saved", world_size=policy_ranks.world_size(layout)
    )
    assert_back_unchanged(hf_folder, tmp_path / "saved", tmp_path / "back")


FIVE_LAYOUTS = {
    **dict.fromkeys(DENSE, ("one", "dp2", "tp2 sp", "pp2 dp2", "tp2 sp pp2")),
    **dict.fromkeys(
        (*MOE, "nemotron_h"), ("one", "tp2 sp dp2 ep2", "tp2 sp ep2 etp2", "tp2 sp pp2 ep2", "pp2 dp4 ep4")
    ),
}


@LONG
@pytest.mark.parametrize(
    ("model_type", "layout"), [(name, layout) for name, layouts in FIVE_LAYOUTS.items() for layout in layouts]
)
def test_five_layouts_of_real_ranks_change_no_bit(ranks: RankPool, tmp_path: Path, model_type: str, layout: str):
    # Layers that two stages can share.
    even: dict[str, Any] = (
        dict(hybrid_override_pattern="MEM*-E", num_hidden_layers=6) if model_type == "nemotron_h" else {}
    )
    hf_folder = models.save_model(tmp_path / "hf", model_type, **even, **_with_mtp(model_type))
    config = policy_ranks.run_config(hf_folder, layout, "checkpointing.save_optimizer=false")
    assert convert(["hf-to-mcore", "--hf", str(hf_folder), "--out", str(tmp_path / "mcore")]) == 0
    arguments = (config, hf_folder, tmp_path / "mcore", tmp_path / "saved")
    differing = ranks.run(conversion_ranks.load_and_save, *arguments, world_size=policy_ranks.world_size(layout))
    assert differing == [[]] * policy_ranks.world_size(layout)
    assert_back_unchanged(hf_folder, tmp_path / "saved", tmp_path / "back")


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_stacked_layers_as_other_trainers_write_them_are_read(ranks: RankPool, tmp_path: Path, model_type: str):
    hf_folder = models.save_model(tmp_path / "hf", model_type)
    layout = "tp2 sp dp2 ep2" if model_type == "qwen3_moe" else "pp2 dp2"
    config = policy_ranks.run_config(hf_folder, layout, "checkpointing.save_optimizer=false")
    ranks.run(
        conversion_ranks.save_with_stacked_layers,
        config,
        tmp_path / "saved",
        world_size=policy_ranks.world_size(layout),
    )
    (iteration,) = tmp_path.glob("saved/iter_*")
    assert TorchDistFolder(iteration).shape("decoder.layers.self_attention.linear_proj.weight")[0] == 4
    assert_back_unchanged(hf_folder, tmp_path / "saved", tmp_path / "back")


# The other families differ in their layers, whose bits the tests above follow through these layouts.
@pytest.mark.parametrize(
    ("model_type", "target"),
    [
        ("qwen3", "pp2 dp2"),
        pytest.param("qwen3", "one", marks=LONG),
        *(pytest.param(name, "pp2 dp4 ep4", marks=[] if name == "qwen3_moe" else LONG) for name in MOE),
        ("nemotron_h", "pp2 dp4 ep4"),
    ],
)
def test_a_trained_checkpoint_goes_to_another_layout_without_a_changed_bit(
    ranks: RankPool, tmp_path: Path, model_type: str, target: str
):
    # Layers that two stages can share.
    even: dict[str, Any] = (
        dict(hybrid_override_pattern="MEM*-E", num_hidden_layers=6) if model_type == "nemotron_h" else {}
    )
    hf_folder = models.save_model(tmp_path / "hf", model_type, **even, **_with_mtp(model_type))
    source = "tp2 sp pp2" if model_type in DENSE else "tp2 sp pp2 ep2"
    config, first = policy_ranks.run_config(hf_folder, source), tmp_path / "first"
    unbroken, _, _ = ranks.run(
        save_ranks.save_after_steps, config, first, 2, world_size=policy_ranks.world_size(source)
    )[0]
    config, second = policy_ranks.run_config(hf_folder, target), tmp_path / "second"
    resumed = ranks.run(
        conversion_ranks.load_save_and_step, config, first, second, world_size=policy_ranks.world_size(target)
    )[0]
    assert convert(["mcore-to-hf", "--mcore", str(first), "--out", str(tmp_path / "trained")]) == 0
    assert_back_unchanged(tmp_path / "trained", second, tmp_path / "back")
    assert convert(["compare", str(hf_folder), str(tmp_path / "back")]) == 1
    for name, tolerance in (("train/loss", 5e-7), ("train/grad_norm", 5e-6)):
        np.testing.assert_allclose(
            [step[name] for step in resumed], [step[name] for step in unbroken], atol=tolerance, rtol=tolerance
        )


def test_the_command_ends_with_exit_code_2_and_one_message(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "mrl.convert",
        "mcore-to-hf",
        "--mcore",
        str(tmp_path / "none"),
        "--out",
        str(tmp_path / "out"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (2, "")
    (message,) = ended.stdout.splitlines()
    assert "is not a folder; name a step_N folder" in message
    assert not (tmp_path / "out").exists()


def assert_back_unchanged(hf_folder: Path, mcore: Path, out: Path) -> None:
    """`mcore` exported to `out` is `hf_folder`, bit for bit, and transformers loads it."""
    assert convert(["mcore-to-hf", "--mcore", str(mcore), "--out", str(out)]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (hf_folder, out))
    assert before.keys() == after.keys()
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (first.dtype, first.shape, first.numpy().tobytes()) == (second.dtype, second.shape, second.numpy().tobytes())
