# SPDX-License-Identifier: Apache-2.0
"""Transformer families: every parallel layout gives transformers' logprobs, and loss and gradients of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests import models
from tests.parity import Parity, Scores, hf_scores
from tests.stack.policy import layout_ranks
from tests.stack.policy.layouts import (
    CP2,
    CP4,
    EP2,
    PP2,
    TP2,
    TP2_SP,
    VPP2,
    Gradients,
    assert_close,
    gradients_and_logprobs,
    gradients_of,
    sequences,
    transformers_gradients,
    transformers_model,
)
from tests.stack.ranks import RankPool

DENSE = ("qwen2", "qwen3", "llama", "qwen3_5_text")
MOE = ("qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "gpt_oss")
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Of the weights, not of the tokens. The last one is trained for some steps.
SEEDS = (0, 1)
PARITY_ROWS = [sequences(700, 2, 32, 260, 6), sequences(*range(20, 60))]

DENSE_LAYOUTS = {"tp2": (2, TP2), "tp2 sp": (2, TP2_SP), "pp2": (2, PP2), "tp2 sp pp2": (4, TP2_SP | PP2)}
MOE_LAYOUTS = {
    "tp2 sp ep1": (2, TP2_SP),
    "pp2": (2, PP2),
    "tp2 sp ep2": (2, TP2_SP | EP2),
    "tp2 sp pp2 ep2": (4, TP2_SP | PP2 | EP2),
    "tp2 sp ep2, recomputed": (2, TP2_SP | EP2 | dict(activation_checkpointing=True)),
}
CONTEXT_LAYOUTS = {
    "cp2": (2, CP2),
    "cp4": (4, CP4),
    "pp2 vpp2 cp2": (4, VPP2 | CP2),
    "tp2 sp pp2 cp2": (8, TP2_SP | PP2 | CP2),
    "tp2 sp cp2 ep2": (4, TP2_SP | CP2 | EP2),
    "tp2 sp pp2 cp2 ep4": (8, TP2_SP | PP2 | CP2 | dict(expert_model_parallel_size=4)),
}
CONTEXT_CASES = [
    # Gated delta nets have no context parallelism, nor attention with sinks.
    *((name, "cp2") for name in (*DENSE, *MOE) if name not in (*DELTA_NETS, "gpt_oss")),
    *(("llama", layout) for layout in ("cp4", "pp2 vpp2 cp2", "tp2 sp pp2 cp2")),
    *(("qwen3_moe", layout) for layout in ("cp4", "tp2 sp cp2 ep2", "tp2 sp pp2 cp2 ep4")),
]
LAYOUTS = {"one": (1, {}), **DENSE_LAYOUTS, **MOE_LAYOUTS, **CONTEXT_LAYOUTS}
LONG = pytest.mark.long("parity")
IN_CI = [
    ("qwen3_moe", "tp2 sp cp2 ep2"),
    *((name, layout) for name in DENSE for layout in DENSE_LAYOUTS),
    *(("qwen3_moe", layout) for layout in MOE_LAYOUTS),
    *((name, layout) for name in MOE for layout in ("pp2", "tp2 sp pp2 ep2")),
]
"""The other families of experts differ in their layers, which these two layouts cut in every way."""
ALL_CASES = [
    (name, layout)
    for names, layouts in ((DENSE, DENSE_LAYOUTS), (MOE, MOE_LAYOUTS))
    for name in names
    for layout in layouts
]
CASES = [pytest.param(*case, marks=[] if case in IN_CI else LONG) for case in (*ALL_CASES, *CONTEXT_CASES)]

# Settings of a family that its tiny model does not have, where a layout could go wrong.
VARIANTS: dict[str, tuple[str, dict[str, object], int, dict[str, object]]] = {
    "dense and expert layers": ("qwen3_moe", dict(mlp_only_layers=[0, 2]), 4, TP2_SP | PP2 | EP2),
    "weights of experts do not sum to one": ("qwen3_moe", dict(norm_topk_prob=False), 2, TP2_SP | EP2),
    "latent attention in long contexts": (
        "deepseek_v3",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=0.7,
                mscale_all_dim=1.0,
            )
        ),
        4,
        TP2_SP | CP2 | EP2,
    ),
    "latent attention with queries of full rank": ("deepseek_v3", dict(q_lora_rank=None), 4, TP2_SP | PP2 | EP2),
    "gated delta nets of one head a rank, dense layers": (
        "qwen3_next",
        dict(layer_types=["linear_attention"] * 3 + ["full_attention"], mlp_only_layers=[0, 3]),
        4,
        TP2_SP | VPP2 | EP2,
    ),
    "gated delta nets of one head a rank, tied embeddings": (
        "qwen3_5_text",
        dict(
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e6,
                partial_rotary_factor=0.5,
                mrope_interleaved=True,
                mrope_section=[4, 2, 2],
            ),
        ),
        4,
        TP2_SP | VPP2,
    ),
    "one key head for two ranks": ("qwen3", dict(num_key_value_heads=1), 2, TP2_SP),
    "one key head with bias": ("qwen2", dict(num_key_value_heads=1), 2, TP2),
    "uneven stages, tied embeddings": (
        "qwen2",
        dict(num_hidden_layers=5, tie_word_embeddings=True),
        2,
        PP2 | dict(num_layers_in_first_pipeline_stage=3),
    ),
    "first and last stage given": (
        "qwen3",
        {},
        3,
        dict(pipeline_model_parallel_size=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
    ),
    "uneven virtual stages, tied embeddings": (
        "qwen3_moe",
        dict(num_hidden_layers=6, tie_word_embeddings=True, mlp_only_layers=[3]),
        2,
        VPP2 | dict(num_layers_in_last_pipeline_stage=2),
    ),
}


@dataclass(frozen=True)
class Example:
    """The folder of a tiny model, and what transformers and one rank make of it."""

    folder: Path
    scores: list[list[Scores]]
    """Scores by row and sequence of PARITY_ROWS."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Example]:
    """Examples by family and seed."""
    return {
        (name, seed): example(name, seed, tmp_path_factory.mktemp(name)) for name in (*DENSE, *MOE) for seed in SEEDS
    }


@pytest.fixture(scope="module")
def one_rank(
    ranks: RankPool, examples: dict[tuple[str, int], Example]
) -> dict[str, tuple[Gradients, list[np.ndarray]]]:
    """Gradients and logprobs of one rank, by family."""
    return {
        name: gradients_and_logprobs(ranks, examples[name, SEEDS[-1]].folder, 1, {}, PARITY_ROWS)
        for name in (*DENSE, *MOE)
    }


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_gives_the_logprobs_of_transformers_and_loss_and_gradients_of_one_rank(
    ranks: RankPool,
    examples: dict[tuple[str, int], Example],
    one_rank: dict[str, tuple[Gradients, list[np.ndarray]]],
    name: str,
    layout: str,
):
    case, (wanted_loss, wanted_grads) = examples[name, SEEDS[-1]], one_rank[name][0]
    world_size, megatron = LAYOUTS[layout]
    (loss, grads), logprobs = gradients_and_logprobs(ranks, case.folder, world_size, megatron, PARITY_ROWS)
    check_logprobs(logprobs, case)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert_close(grads, wanted_grads, 1e-5)


@pytest.mark.parametrize("name", [*DENSE, *MOE])
def test_one_rank_gives_the_logprobs_and_gradients_of_transformers(
    ranks: RankPool,
    examples: dict[tuple[str, int], Example],
    one_rank: dict[str, tuple[Gradients, list[np.ndarray]]],
    name: str,
    tmp_path: Path,
):
    for seed in SEEDS[:-1]:
        case = examples[name, seed]
        (logprobs,) = ranks.run(
            layout_ranks.logprobs, layout_ranks.policy_config(), case.folder, PARITY_ROWS, world_size=1
        )
        check_logprobs(logprobs, case)
    case, ((found_loss, found), logprobs) = examples[name, SEEDS[-1]], one_rank[name]
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
def test_a_variant_gives_the_loss_and_gradients_of_transformers(ranks: RankPool, tmp_path: Path, variant: str):
    name, settings, world_size, megatron = VARIANTS[variant]
    folder = models.save_model(tmp_path / "model", name, 0, pad_token_id=None, **settings)
    expected_loss, expected = transformers_gradients(folder, tmp_path / "gradients")
    loss, grads = gradients_of(ranks, folder, world_size, megatron)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(grads, expected, 2e-5)


def example(name: str, seed: int, folder: Path) -> Example:
    """A tiny model of a family; that of the last seed has been trained."""
    # transformers keeps the embedding of a padding token from training.
    models.save_model(folder, name, seed, pad_token_id=None)
    model = transformers_model(folder)
    if seed == SEEDS[-1]:
        train(model)
        model.save_pretrained(folder)
    return Example(folder, [[hf_scores(model, sequence[:1], sequence[1:]) for sequence in row] for row in PARITY_ROWS])


def train(model: PreTrainedModel, num_steps: int = 8) -> None:
    """Adam steps towards some sequences."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.tensor(sequences(*[32] * 8))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
