# SPDX-License-Identifier: Apache-2.0
"""Models converted but not trained: their tables hold for megatron-core's models, whose logits equal transformers'."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy.converted_ranks import latent_attention_logits
from tests.stack.ranks import RankPool

YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=1024,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)


CASES: dict[str, tuple[int, dict[str, object]]] = {"tp2": (2, dict()), "yarn": (2, dict(rope_parameters=YARN))}
if version("megatron-core").startswith("0.16."):
    # Later versions normalize queries of full rank wherever they normalize keys, as no DeepSeek does.
    CASES["full-rank"] = (1, dict(q_lora_rank=None))


@pytest.mark.parametrize(("tp", "changes"), CASES.values(), ids=CASES)
def test_deepseek_logits_equal_those_of_transformers(
    tmp_path: Path, ranks: RankPool, tp: int, changes: dict[str, object]
):
    model = models.tiny_model("deepseek_v3", 0, **changes)
    model.save_pretrained(tmp_path)
    sequence = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([sequence])).logits[0].numpy()
    parts = ranks.run(latent_attention_logits, tp, tmp_path, sequence, world_size=tp)
    logits = np.concatenate(parts, axis=1)[:, : expected.shape[1]]
    assert np.abs(logits - expected).max() <= 1e-5
