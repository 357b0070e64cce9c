"""A converted checkpoint is loaded by real Megatron ranks, saved by them, and converted back without a changed bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl.convert import main as convert
from tests import models
from tests.stack.policy import conversion_ranks, policy_ranks
from tests.stack.ranks import RankPool


@pytest.mark.parametrize("layout", ["tp2 sp dp2 ep2", "pp2 dp2 ep2"])
def test_hugging_face_to_megatron_and_back_is_bit_identical(ranks: RankPool, tmp_path: Path, layout: str):
    hf_folder = models.save_nemotron_h(tmp_path / "hf")
    # Before its first step an optimizer has no state to save.
    config = policy_ranks.run_config(hf_folder, layout, "checkpointing.save_optimizer=false")
    assert convert(["hf-to-mcore", "--hf", str(hf_folder), "--out", str(tmp_path / "mcore")]) == 0
    arguments = (config, hf_folder, tmp_path / "mcore", tmp_path / "saved")
    differing = ranks.run(conversion_ranks.load_and_save, *arguments, world_size=policy_ranks.world_size(layout))
    assert differing == [[]] * policy_ranks.world_size(layout)
    assert convert(["mcore-to-hf", "--mcore", str(tmp_path / "saved"), "--out", str(tmp_path / "back")]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (hf_folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float32
