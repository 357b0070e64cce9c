# SPDX-License-Identifier: Apache-2.0
"""Families x layouts: each gives transformers' logprobs, and loss and gradients of one rank; one rank transformers'.

test_parity_table.py has what a whole policy makes of rollouts with each feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests import models
from tests.parity import Parity, Scores, hf_scores
from tests.stack.policy.layouts import (
    Gradients,
    assert_close,
    gradients_and_logprobs,
    sequences,
    transformers_gradients,
    transformers_model,
)
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

HYBRID = "nemotron_h"
DENSE = ("qwen2", "qwen3", "llama", "qwen3_5_text")
MOE = ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "gpt_oss")
FAMILIES = (HYBRID, *DENSE, *MOE)
# All kinds of layers, in a number that two stages share evenly.
SIZES: dict[str, dict[str, object]] = {HYBRID: dict(hybrid_override_pattern="MEM*EME-", num_hidden_layers=8)}
PARITY_ROWS = [sequences(700, 2, 32, 260, 6), sequences(*range(20, 60))]

HYBRID_LAYOUTS = (
    *("tp2 sp ep1", "tp2 sp ep2", "tp2 sp etp2", "pp2", "pp2 uneven", "dp2", "ep2 dp2", "tp2 sp pp2 ep2"),
    *("tp2 sp dp2 ep2", "tp2 sp ep1, recomputed", "cp2", "tp2 sp cp2 ep2"),
)
DENSE_LAYOUTS, MOE_LAYOUTS = ("tp2", "tp2 sp pp2"), ("tp2 sp pp2 ep2",)
"""Families differ in their layers, which these cut in every way; one of each kind has the other layouts, too."""
CASES = [
    *((HYBRID, layout) for layout in HYBRID_LAYOUTS),
    *((name, layout) for name in DENSE for layout in DENSE_LAYOUTS),
    *((name, layout) for name in MOE for layout in MOE_LAYOUTS),
    *(("qwen3", layout) for layout in ("tp2 sp", "pp2")),
    *(
        ("qwen3_moe", layout)
        for layout in ("pp2", "tp2 sp ep1", "tp2 sp ep2", "tp2 sp ep2, recomputed", "tp2 sp cp2 ep2")
    ),
    *(
        pytest.param(name, layout, marks=pytest.mark.long("parity"))
        for name, layout in ((HYBRID, "cp2 pp2"), (HYBRID, "tp2 sp cp4 ep2"), ("llama", "pp2 vpp2 cp2"))
    ),
]

EXPERTS_BESIDE_MAMBA: dict[str, object] = dict(hybrid_override_pattern="ME*E", num_hidden_layers=4)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0)
DELTA_NETS: dict[str, object] = dict(layer_types=["linear_attention"] * 3 + ["full_attention"])
STAGE_SIZES = "num_layers_in_{}_pipeline_stage"
# Where a layout could go wrong: settings of a family that its tiny model does not have, and settings of Megatron.
VARIANTS: dict[str, tuple[str, dict[str, object], str, dict[str, object]]] = {
    "dense and expert layers": ("qwen3_moe", dict(mlp_only_layers=[0, 2]), "tp2 sp pp2 ep2", {}),
    "weights of experts do not sum to one": ("qwen3_moe", dict(norm_topk_prob=False), "tp2 sp ep2", {}),
    "experts cut in two": ("qwen3_moe", {}, "tp2 sp etp2 ep2", {}),
    "experts by all-gather": (HYBRID, EXPERTS_BESIDE_MAMBA, "ep2 dp2", dict(moe_token_dispatcher_type="allgather")),
    "all-gather with tensor parallelism": ("qwen3_moe", {}, "tp2 sp ep2", dict(moe_token_dispatcher_type="allgather")),
    "routers in float64": (HYBRID, EXPERTS_BESIDE_MAMBA, "one", dict(moe_router_dtype="fp64")),
    "routers in the model's type": (HYBRID, EXPERTS_BESIDE_MAMBA, "one", dict(moe_router_dtype=None)),
    "latent experts": (
        HYBRID,
        dict(hybrid_override_pattern="ME-*", num_hidden_layers=4, moe_latent_size=32),
        "tp2 sp pp2 ep2",
        {},
    ),
    # Megatron trains mixture-of-experts models with sequence parallelism only.
    "hybrid layers without sequence parallelism": (
        HYBRID,
        dict(hybrid_override_pattern="M*M-", num_hidden_layers=4),
        "tp2",
        {},
    ),
    # Megatron puts parts of rows into pinned memory, which hosts without a GPU lack.
    "long contexts in parts of rows": (
        "qwen3",
        dict(rope_parameters=YARN | dict(original_max_position_embeddings=1024)),
        "cp2",
        {},
    ),
    "latent attention in long contexts": (
        "deepseek_v3",
        dict(
            rope_parameters=YARN
            | dict(original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=1.0)
        ),
        "tp2 sp cp2 ep2",
        {},
    ),
    "latent attention with queries of full rank": ("deepseek_v3", dict(q_lora_rank=None), "tp2 sp pp2 ep2", {}),
    "gated delta nets of one head a rank, dense layers": (
        "qwen3_next",
        DELTA_NETS | dict(mlp_only_layers=[0, 3]),
        "tp2 sp pp2 vpp2 ep2",
        {},
    ),
    "gated delta nets of one head a rank, tied embeddings": (
        "qwen3_5_text",
        DELTA_NETS
        | dict(
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e6,
                partial_rotary_factor=0.5,
                mrope_interleaved=True,
                mrope_section=[4, 2, 2],
            ),
        ),
        "tp2 sp pp2 vpp2",
        {},
    ),
    "one key head for two ranks": ("qwen3", dict(num_key_value_heads=1), "tp2 sp", {}),
    "one key head with bias": ("qwen2", dict(num_key_value_heads=1), "tp2", {}),
    "uneven stages, tied embeddings": (
        "qwen2",
        dict(num_hidden_layers=5, tie_word_embeddings=True),
        "pp2 uneven",
        {},
    ),
    "first and last stage given": (
        "qwen3",
        {},
        "pp3",
        {STAGE_SIZES.format("first"): 1, STAGE_SIZES.format("last"): 1},
    ),
    "uneven virtual stages, tied embeddings": (
        "qwen3_moe",
        dict(num_hidden_layers=6, tie_word_embeddings=True, mlp_only_layers=[3]),
        "pp2 vpp2",
        {STAGE_SIZES.format("last"): 2},
    ),
    "four stages of two virtual ones": ("qwen3_moe", dict(num_hidden_layers=8), "pp4 vpp2, recomputed", {}),
}


@dataclass(frozen=True)
class Example:
    """The folder of a tiny model, and what transformers and one rank make of it."""

    folder: Path
    scores: list[list[Scores]]
    """Scores by row and sequence of PARITY_ROWS."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Example]:
    """Examples by family."""
    return {name: example(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, examples: dict[str, Example]) -> dict[str, tuple[Gradients, list[np.ndarray]]]:
    """Gradients and logprobs of one rank, by family."""
    return {name: gradients_and_logprobs(ranks, examples[name].folder, 1, {}, PARITY_ROWS) for name in FAMILIES}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_gives_the_logprobs_of_transformers_and_loss_and_gradients_of_one_rank(
    ranks: RankPool,
    examples: dict[str, Example],
    one_rank: dict[str, tuple[Gradients, list[np.ndarray]]],
    name: str,
    layout: str,
):
    case, (wanted_loss, wanted_grads) = examples[name], one_rank[name][0]
    (loss, grads), logprobs = gradients_and_logprobs(ranks, case.folder, *sizes(layout), PARITY_ROWS)
    check_logprobs(logprobs, case)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert_close(grads, wanted_grads, 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank_gives_the_logprobs_and_gradients_of_transformers(
    examples: dict[str, Example],
    one_rank: dict[str, tuple[Gradients, list[np.ndarray]]],
    name: str,
    tmp_path: Path,
):
    case, ((found_loss, found), logprobs) = examples[name], one_rank[name]
    check_logprobs(logprobs, case)
    loss, grads = transformers_gradients(case.folder, tmp_path)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert_close(found, grads, 2e-5)


def check_logprobs(rows: list[np.ndarray], case: Example) -> None:
    parity = Parity()
    for row, logprobs, row_scores in zip(PARITY_ROWS, rows, case.scores, strict=True):
        ends = np.cumsum([len(sequence) for sequence in row])
        for sequence, end, scores in zip(row, ends, row_scores, strict=True):
            parity.add(logprobs[end - len(sequence) : end - 1], scores)
    parity.check(min_tokens=2000)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_gives_the_logprobs_loss_and_gradients_of_transformers(ranks: RankPool, tmp_path: Path, variant: str):
    name, settings, layout, megatron = VARIANTS[variant]
    folder = models.save_model(tmp_path / "model", name, 0, pad_token_id=None, **settings)
    case = Example(folder, scores_of(transformers_model(folder)))
    expected_loss, expected = transformers_gradients(folder, tmp_path / "gradients")
    world_size, cut = sizes(layout)
    # With virtual stages, Megatron takes a multiple of as many rows as there are stages.
    scored = PARITY_ROWS * 2 if "pp4" in layout else PARITY_ROWS
    (loss, grads), logprobs = gradients_and_logprobs(ranks, folder, world_size, cut | megatron, scored)
    check_logprobs(logprobs[: len(PARITY_ROWS)], case)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(grads, expected, 2e-5)


def example(name: str, folder: Path) -> Example:
    """A tiny model of a family, trained for some steps."""
    # transformers keeps the embedding of a padding token from training.
    models.save_model(folder, name, 1, pad_token_id=None, **SIZES.get(name, {}))
    model = transformers_model(folder)
    train(model)
    model.save_pretrained(folder)
    return Example(folder, scores_of(model))


def scores_of(model: PreTrainedModel) -> list[list[Scores]]:
    return [[hf_scores(model, sequence[:1], sequence[1:]) for sequence in row] for row in PARITY_ROWS]


def train(model: PreTrainedModel, num_steps: int = 8) -> None:
    """Adam steps towards some sequences."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.tensor(sequences(*[32] * 8))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
