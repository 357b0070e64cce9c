# SPDX-License-Identifier: Apache-2.0
"""Megatron models with Transformer Engine layers, as GPU hosts build them: weights as in the tables, calls that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conversion.families.registry import FAMILIES
from mrl.config.schema.policy import FP8_ROWS
from mrl.plan import activations
from tests.rehearsal import te_calls, te_fp8
from tests.rehearsal.te_calls import ATTENTION, CASES, GEMM, LINEAR, PERMUTE, ROTARY, SORT, UNPERMUTE
from tests.rehearsal.te_models import TINY, WITH_EXPERTS, Row, layouts

DENSE = {ATTENTION, LINEAR, "LayerNormLinear.forward", "RMSNorm.forward"}
DELTA_NETS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
EXPERTS = {"GroupedLinear.forward", PERMUTE, UNPERMUTE, SORT, f"{SORT}_with_probs"}


Parts = dict[str, list[dict[str, Any]]]


def test_weights_of_every_family_are_those_of_its_table(rows_by_part: Callable[[str], Parts], version: str):
    rows = [Row(**row) for row in rows_by_part(version)["te_models"]]
    assert {model_type for model_type, _ in TINY.values()} == set(FAMILIES)
    assert [f"{row.case}, {row.layout}, rank {row.rank}: {row.fault}" for row in rows if row.fault] == []
    seen = {(row.case, row.layout) for row in rows}
    assert seen >= {(case, layout) for case, (model_type, _) in TINY.items() for layout in layouts(model_type)}
    assert {row.layout for row in rows} >= {
        "grpo_nanov3.yaml",
        "grpo_qwen3_30ba3b.yaml",
        "grpo_qwen3_30ba3b.yaml in FP8",
    }
    assert all(row.num_weights for row in rows)


def test_calls_of_kernels_fit_and_give_what_transformers_computes(rows_by_part: Callable[[str], Parts], version: str):
    rows = [te_calls.Row(**row) for row in rows_by_part(version)["te_calls"]]
    assert [row.model_type for row in rows] == list(CASES) == sorted(FAMILIES)
    for row in rows:
        assert row.num_tokens >= 100 and row.num_excluded <= 1 and row.num_wrong == 0, row
        assert row.without_gradient == [], row
        if row.model_type in te_calls.WITHOUT_TREES:
            assert row.shared_difference is None, row
        else:
            assert row.shared_difference is not None and row.shared_difference <= 1e-5, row
        # Megatron rotates parts of latent heads itself, and with the factor of YaRN.
        rotary = set() if row.model_type in ("deepseek_v3", "gpt_oss", "nemotron_h") else {ROTARY}
        experts = EXPERTS if row.model_type in ("nemotron_h", *WITH_EXPERTS) else set()
        # 0.16.1 knows the router's kernel only from older versions of Transformer Engine.
        assert set(row.kernels) - {GEMM} == DENSE | rotary | experts, row
        assert (GEMM in row.kernels) == bool(experts and version == "newest"), row


def test_training_in_fp8_gets_its_recipe_and_sizes(rows_by_part: Callable[[str], Parts], version: str):
    rows = [te_fp8.Row(**row) for row in rows_by_part(version)["te_fp8"]]
    chosen = {"blockwise": "Float8BlockScaling", "tensorwise": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling"}
    assert {row.recipe for row in rows} == chosen.keys() == te_fp8.CAPABILITIES.keys()
    assert {row.model_type for row in rows} == set(FAMILIES) - {"nemotron_h", "gpt_oss", *DELTA_NETS}
    for row in rows:
        assert row.chosen == [chosen[row.recipe]] and row.num_calls and row.faults == [], row
        assert row.row_tokens and all(tokens % FP8_ROWS[row.recipe] == 0 for tokens in row.row_tokens), row
        # No expert has to have tokens.
        assert all(tokens % (32 if row.recipe == "mxfp8" else 16) == 0 for tokens in row.expert_tokens), row
        assert bool(row.expert_tokens) == (row.model_type in WITH_EXPERTS), row
        # The plan counts what Transformer Engine's quantisers make, but for what rounds a column of scales up to 4.
        planned = activations.Row(tokens=1, fp8=row.recipe)
        assert row.input_bytes == pytest.approx(planned.input_bytes, rel=1e-4), row
        assert row.weight_bytes == pytest.approx(planned.weight_copy_bytes, rel=1e-4), row
