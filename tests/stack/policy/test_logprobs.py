# SPDX-License-Identifier: Apache-2.0
"""Logprobs and entropy against torch on whole logits, truncated by vLLM; the chunked output layer against the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy import policy_ranks
from tests.stack.policy.layouts import assert_close, gradients_of, transformers_gradients
from tests.stack.policy.logprob_ranks import Case, inputs, results
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

CHUNKS: dict[str, object] = dict(use_fused_linear_logprobs=True, fused_linear_logprobs_chunk_size=16)

# Where all real columns are in the first half, where a rank has both kinds, and without padding.
PLAIN = [Case(vocab_size=vocab_size) for vocab_size in (200, 264, 512)]
TRUNCATED = [
    Case(top_k=20),
    Case(top_p=0.8),
    Case(top_k=30, top_p=0.9),
    Case(vocab_size=200, top_k=1),
    Case(top_k=400, top_p=0.999),
]
SHARED = [replace(case, is_shared=True) for case in (PLAIN[1], TRUNCATED[2])]
CASES = [replace(case, chunk_tokens=chunk) for case in PLAIN + TRUNCATED + SHARED for chunk in (None, 11)]
BFLOAT16 = [Case(precision="bfloat16", chunk_tokens=chunk) for chunk in (None, 11)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_scores_are_those_of_torch_on_the_logits_that_vllm_keeps(ranks: RankPool, world_size: int):
    by_rank = ranks.run(results, CASES + BFLOAT16, world_size=world_size)
    for case, parts in zip(CASES + BFLOAT16, zip(*by_rank, strict=True), strict=True):
        logits = torch.from_numpy(np.concatenate([part.logits for part in parts], axis=1)).double()
        scores, grad_hidden, grad_weight = expected(case, logits)
        for part in parts:
            for name, value in part.scores.items():
                np.testing.assert_allclose(value, scores[name], atol=2e-5, rtol=1e-6, err_msg=f"{name} of {case}")
        # The logits' own gradient is rounded to their type.
        tolerance = 5e-3 if case.precision == "bfloat16" else 1e-5
        assert relative_error(np.sum([part.grad_hidden for part in parts], axis=0), grad_hidden) <= tolerance, case
        assert relative_error(np.concatenate([part.grad_weight for part in parts]), grad_weight) <= tolerance, case
        assert not np.concatenate([part.grad_weight for part in parts])[case.vocab_size :].any(), case


def test_the_cases_rule_tokens_out():
    outside = [np.isneginf(expected(case, whole_logits(case))[0]["logprobs"]).mean() for case in TRUNCATED]
    assert min(outside) > 0 and max(outside) < 0.6, outside


def expected(case: Case, logits: torch.Tensor) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Scores by name and gradients of hidden states and weight, from float64 logits."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    given = inputs(case)
    logits = logits.requires_grad_()
    sources = torch.arange(len(logits)) if given.sources is None else given.sources
    scaled = logits[sources, : case.vocab_size] / case.temperature
    top_k = torch.full((len(logits),), min(case.top_k or case.vocab_size, case.vocab_size))
    kept = apply_top_k_top_p_pytorch(
        scaled.detach().clone(), top_k, torch.full((len(logits),), case.top_p, dtype=torch.float64)
    )
    truncated = torch.log_softmax(scaled.masked_fill(torch.isneginf(kept), -torch.inf), dim=-1)
    logprobs = truncated.gather(1, given.labels[:, None])[:, 0]
    whole = torch.log_softmax(scaled, dim=-1).gather(1, given.labels[:, None])[:, 0]
    drawable = torch.where(torch.isneginf(logprobs), 0.0, logprobs)
    (drawable * given.token_weights[0] + whole * given.token_weights[1]).sum().backward()
    assert logits.grad is not None
    entropy = torch.distributions.Categorical(logits=kept).entropy()
    scores = {"logprobs": logprobs, "untruncated_logprobs": whole, "entropy": entropy}
    grad_weight = logits.grad.t() @ given.hidden.double()
    return (
        {name: value.detach().numpy() for name, value in scores.items()},
        (logits.grad @ given.weight.double()).numpy(),
        grad_weight.numpy(),
    )


def whole_logits(case: Case) -> torch.Tensor:
    given = inputs(case)
    return given.hidden.double() @ given.weight.double().t()


def relative_error(value: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(value - wanted) / np.linalg.norm(wanted))


def test_a_chunked_output_layer_gives_the_loss_and_gradients_of_transformers(ranks: RankPool, tmp_path: Path):
    folder = models.save_model(tmp_path / "model", "qwen3", 0, pad_token_id=None, tie_word_embeddings=True)
    expected_loss, expected_grads = transformers_gradients(folder, tmp_path / "gradients")
    world_size, megatron = sizes("tp2 sp pp2")
    loss, grads = gradients_of(ranks, folder, world_size, megatron | CHUNKS)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(grads, expected_grads, 2e-5)


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds of layers, in a number that two stages share evenly."""
    return models.save_nemotron_h(
        tmp_path_factory.mktemp("model"), hybrid_override_pattern="MEM*EME-", num_hidden_layers=8
    )


def train_metrics(ranks: RankPool, folder: Path, layout: str, *overrides: str) -> list[dict[str, float]]:
    """Metrics of two on-policy steps."""
    config = policy_ranks.run_config(folder, layout, *overrides)
    return ranks.run(policy_ranks.metrics_of_steps, config, 2, world_size=policy_ranks.world_size(layout))[-1]


def test_train_steps_in_chunks_are_those_of_whole_rows(ranks: RankPool, hybrid_folder: Path):
    chunked = ("policy.logprob_chunk_size=16",)
    whole = train_metrics(ranks, hybrid_folder, "one")
    parts = train_metrics(ranks, hybrid_folder, "tp2 sp pp2 ep2", *chunked)
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        assert 0 < ours["train/entropy"] < np.log(264)
    # The step before the update makes the same numbers as the pass before it, bit for bit.
    assert parts[0]["train/probs_ratio_min"] == parts[0]["train/probs_ratio_max"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "width"),
    [
        ([], 384),  # 264 columns, padded to a multiple of 128
        (["policy.logprob_chunk_size=16", "policy.megatron_cfg.defer_fp32_logits=true"], 64),
        (["policy.megatron_cfg.use_fused_linear_logprobs=true"], 64),
    ],
)
def test_the_model_returns_hidden_states_where_the_config_asks_for_chunks(
    ranks: RankPool, hybrid_folder: Path, overrides: list[str], width: int
):
    config = policy_ranks.run_config(hybrid_folder, "one", *overrides)
    assert ranks.run(policy_ranks.widths_of_output, config, world_size=1) == [{width}]


def test_train_steps_mask_what_top_p_rules_out(ranks: RankPool, hybrid_folder: Path):
    config = policy_ranks.run_config(
        hybrid_folder, "one", "policy.generation.top_p=0.7", "loss_fn.reference_policy_kl_penalty=0.1"
    )
    (((first, second), _),) = ranks.run(policy_ranks.off_policy_steps, config, 2, world_size=1)
    # The rollouts are random tokens, so some of them have no probability.
    assert 0.1 < first["train/outside_truncation_fraction"] < 0.6
    # Of the model with itself, over all tokens.
    assert first["train/kl_penalty"] == 0.0 and second["train/kl_penalty"] > 1e-6
    assert all(np.isfinite(value) for step in (first, second) for value in step.values())
