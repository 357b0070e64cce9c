# SPDX-License-Identifier: Apache-2.0
"""Engines on GPUs nobody here has: vLLM's classes, built as for compute capability 8.0, 9.0 and 10.0, can be refitted.

vLLM chooses dtypes of weights, and kernels that reorder them, by the capability.
"""

from __future__ import annotations

import pytest

from conversion.families.registry import FAMILIES
from tests.rehearsal.capabilities import CAPABILITIES, PUBLISHED, TINY, Row
from tests.rehearsal.children import rows_of
from tests.stack.rollout.set_ranks import CASES, WITH_EXPERTS, layouts

MODEL_TYPES = {name: model_type for name, (model_type, _) in PUBLISHED.items()} | {
    name: CASES[name][0] for name in TINY
}
WIDER = "Engines keep as float32 what the trainer holds as bfloat16: "


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return [Row(**found) for found in rows_of("capabilities", tmp_path_factory.mktemp("models"))]


def test_refits_can_be_prepared_on_every_capability_in_every_layout(rows: list[Row]) -> None:
    assert set(MODEL_TYPES.values()) == set(FAMILIES)
    seen = [(row.case, row.capability, row.tp, row.ep) for row in rows]
    wanted = [
        (case, capability, layout.tp, layout.ep)
        for capability in CAPABILITIES
        for case, model_type in MODEL_TYPES.items()
        for layout in layouts(model_type)
    ]
    assert sorted(seen) == sorted(wanted)
    assert [f"{row.case} {row.capability} tp{row.tp} ep{row.ep}: {row.fault}" for row in rows if row.fault] == []


def test_dtypes_that_the_capability_decides_are_in_the_log(rows: list[Row]) -> None:
    # vLLM's GateLinear: float32 where there is no kernel for bfloat16 weights and float32 scores.
    # Its class of GLM-4.5 asks for float32 by itself.
    always = {
        "nemotron_h": ["model.layers.*.mixer.A"],
        "glm4_moe": ["model.layers.*.mlp.gate.weight"],
        **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), ["model.layers.*.linear_attn.A_log"]),
    }
    gates = {"nemotron_h": ["model.layers.*.mixer.gate.weight"]}
    for row in rows:
        model_type = MODEL_TYPES[row.case]
        names = always.get(model_type, []) + (gates.get(model_type, []) if row.capability == "8.0" else [])
        assert row.casts == ([WIDER + ", ".join(names)] if names else []), row


def test_experts_are_those_that_keep_the_order_of_the_checkpoint(rows: list[Row]) -> None:
    for row in rows:
        assert row.expert_backends == (["TRITON"] if MODEL_TYPES[row.case] in WITH_EXPERTS else []), row
