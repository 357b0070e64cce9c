# SPDX-License-Identifier: Apache-2.0
"""Tokens and activations of a plan whose rows share prefixes, by hand."""

from __future__ import annotations

from mrl.config.load import load_config
from mrl.plan.activations import Row, kept_bytes, part_bytes
from mrl.plan.facts import ComputedTokens, computed_tokens, read_model
from mrl.plan.hardware import GPUS
from mrl.plan.plan import describe, make_plan


def test_tokens_after_sharing_by_hand(folders: dict[str, str]):
    """Prompts of at least 256 tokens of 320: a row has one with 16 replies of 64, 1,280 of 5,120 tokens."""
    words = [
        folders["qwen"],
        "grpo.num_generations_per_prompt=16",
        "policy.generation.max_new_tokens=64",
        "++policy.sequence_packing={train_mb_tokens: 4096, logprob_mb_tokens: 4096}",
    ]
    whole, shared = (
        load_config("grpo_qwen3_30ba3b.yaml", [*words, f"policy.share_prefixes={shares}"])
        for shares in ("auto", "true")
    )
    # On GPUs `auto` is off.
    assert computed_tokens(whole, 320) == ComputedTokens(1.0, 320, 1)
    # Keys of a prompt's token: 128 on average; of a reply's: 256 and 32.
    keys = (256 * 128 + 16 * 64 * (256 + 32)) / 1280
    assert computed_tokens(shared, 320) == ComputedTokens(0.25, 2 * keys, 16)
    # Replies may take up all of 60 tokens; a row of 4,096 has room for 21 of a prompt of 3,000 tokens at most.
    assert computed_tokens(shared, 60).share == 1
    assert computed_tokens(shared, 3936).rollouts_per_row == 3
    plans = [make_plan(config, GPUS["h100-80g"], mean_tokens=320) for config in (whole, shared)]
    of_whole, of_shared = (plan.times.phases["train"] for plan in plans)
    assert of_shared.high < 0.4 * of_whole.high
    assert "25% of which are computed" in "\n".join(describe(plans[1]))
    assert "are computed" not in "\n".join(describe(plans[0]))


def test_continuations_keep_the_keys_of_their_paths(folders: dict[str, str]):
    shape = read_model(load_config("grpo_qwen3_30ba3b.yaml", [folders["qwen"]])).shape
    whole, shared = (part_bytes(shape, "*", Row(1000, tp=2, path_copies=copies)) for copies in (1.0, 16.0))
    # 15 further copies of two key heads and two value heads of 128 channels a token, in bfloat16.
    assert sum(shared.values()) - sum(whole.values()) == 15 * 1000 * 4 * 128 * 2
    assert kept_bytes(shape, "*", Row(1000, tp=2, path_copies=16.0, recompute=frozenset(["core_attn"]))) == kept_bytes(
        shape, "*", Row(1000, tp=2, recompute=frozenset(["core_attn"]))
    )
