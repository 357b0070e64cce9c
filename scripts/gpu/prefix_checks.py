# SPDX-License-Identifier: Apache-2.0
"""Check of the trainer with shared prefixes: equal gradients, and the seconds and memory that they save on a GPU."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from scripts.bench.prefix import GENERATIONS, rollouts
from scripts.bench.shapes import narrowed
from scripts.bench.turns import take_turns
from scripts.gpu.plan import Missed, Row, Setup, elapsed, environment, gpu_columns
from scripts.gpu.policy_checks import MAX_GRADIENT_ERROR, SMALL, layers, one_policy

if TYPE_CHECKING:
    from mrl.config.fields import Precision
    from mrl.data.packing import PackedRow
    from mrl.policy.policy import PolicyRank

# Layers of the 30B model at their real size, and an output layer that is no larger a part than the 30B model's.
LARGE = dict(hybrid_override_pattern="MEM*EM", num_hidden_layers=6, vocab_size=32768)
PROMPTS = (1, 4, 16)
"""Tokens of a prompt for one of its replies."""
REPEATS = 3


def prefix(setup: Setup) -> list[Row]:
    """Old logprobs and a train step of a group of 16 rollouts, with shared prefixes and with whole rows, in turns.

    First in float32, on small layers: the gradients of both. Then in bfloat16, on layers of the real size: the seconds
    and the memory of both, by the tokens of the prompt for one of a reply.

    Raises:
        Missed: a gradient in float32 differs by more than rounding.
    """
    # Imported here, as nothing that the first of the checks needs.
    from mrl.env import FULL_FLOAT32, ONE_CONFIGURATION

    with environment(FULL_FLOAT32 | ONE_CONFIGURATION):
        found = [_compare_gradients(setup)]
        if setup.device == "cuda":
            torch.cuda.empty_cache()
        found += [_measure(setup, times) for times in PROMPTS]
    error = found[0]["worst relative difference of a gradient"]
    if not float(str(error)) <= MAX_GRADIENT_ERROR:
        raise Missed(f"a gradient of shared prefixes is off by {error}", found)
    return found


def _compare_gradients(setup: Setup) -> Row:
    from tests.stack.policy.parity_ranks import _gradients

    found, logprobs = list[dict[str, np.ndarray]](), list[np.ndarray]()
    for shares in (True, False):
        with _policy(setup, {**narrowed(1), **SMALL}, "float32") as policy:
            rows = _rows(policy, prompt_tokens=64, reply_tokens=16, shares=shares)
            _update(policy, rows)
            found.append(_gradients(policy))
            logprobs.append(_old_logprobs(policy))
    shared, whole = found
    errors = {
        name: float(np.linalg.norm(shared[name] - grad) / max(np.linalg.norm(grad), 1e-30))
        for name, grad in whole.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return {
        "layers": layers(),
        "dtype": "float32",
        "prompt : reply": "4 : 1",
        "worst relative difference of a gradient": errors[worst],
        "of": worst,
        "largest difference of a logprob": float(np.abs(logprobs[0] - logprobs[1]).max()),
        **gpu_columns(),
    }


def _measure(setup: Setup, times: int) -> Row:
    is_large = setup.device == "cuda"
    hf_config = {**narrowed(1), **(LARGE if is_large else SMALL)}
    reply_tokens = 256 if is_large else 16
    logprobs, peaks = dict[bool, np.ndarray](), dict[bool, float]()
    with _policy(setup, hf_config, "bfloat16" if is_large else "float32") as policy:
        rows = {
            shares: _rows(policy, prompt_tokens=times * reply_tokens, reply_tokens=reply_tokens, shares=shares)
            for shares in (True, False)
        }
        # Before any step: both under the same weights.
        for shares, of_way in rows.items():
            policy.enter("logprob")
            policy.set_batch(of_way)
            policy.compute_old_logprobs()
            logprobs[shares] = _old_logprobs(policy)

        def update(shares: bool) -> float:
            if is_large:
                torch.cuda.reset_peak_memory_stats()
            taken = elapsed(setup.device, partial(_update, policy, rows[shares]))
            peaks[shares] = (torch.cuda.max_memory_allocated() if is_large else 0) / 1e9
            return taken

        seconds = take_turns({shares: partial(update, shares) for shares in rows}, REPEATS)
    computed, whole = (
        sum(len(row.token_ids_T if row.tree is None else row.tree.positions_U) for row in rows[shares])
        for shares in (True, False)
    )
    return {
        "layers": layers(),
        "dtype": "bfloat16" if is_large else "float32",
        "prompt : reply": f"{times} : 1",
        "largest difference of a logprob": float(np.abs(logprobs[True] - logprobs[False]).max()),
        "tokens, whole": whole,
        "fewer tokens": whole / computed,
        "shared s": statistics.median(seconds[True]),
        "whole s": statistics.median(seconds[False]),
        "speed of whole rows'": statistics.median(b / a for a, b in zip(seconds[True], seconds[False], strict=True)),
        "shared, GB at most": peaks[True],
        "whole, GB at most": peaks[False],
        **gpu_columns(),
    }


def _policy(setup: Setup, hf_config: dict[str, object], precision: Precision):
    return one_policy(
        hf_config, precision=precision, num_gpus=int(setup.device == "cuda"), colocated=False, share_prefixes=True
    )


def _rows(policy: PolicyRank, *, prompt_tokens: int, reply_tokens: int, shares: bool) -> list[PackedRow]:
    """The group in rows as long as it is with its prompt once; as trees, or in as many whole rows as it takes."""
    from mrl.data.prefixes import add_trees
    from tests.stack.policy.policy_ranks import pack_rows

    made = dict(enumerate(rollouts(prompt_tokens, reply_tokens)))
    if shares:
        rows = pack_rows(policy._section, [list(made)], made)
        add_trees(rows, divisible_by=policy._section.row_multiple)
        assert all(row.tree is not None for row in rows)
        return rows
    room = (prompt_tokens + GENERATIONS * reply_tokens) // (prompt_tokens + reply_tokens)
    plan = [list(made)[start : start + room] for start in range(0, len(made), room)]
    return pack_rows(policy._section, plan, made)


def _update(policy: PolicyRank, rows: list[PackedRow]) -> None:
    policy.enter("logprob")
    policy.set_batch(rows)
    policy.compute_old_logprobs()
    policy.enter("train")
    policy.train_step()


def _old_logprobs(policy: PolicyRank) -> np.ndarray:
    """Old logprobs of the batch's generated tokens, rollout by rollout."""
    from mrl.data.packing import by_sequence

    found = {}
    for row in policy.batches()[0].rows:
        assert row.old_logprobs_T is not None
        found |= by_sequence(row, row.old_logprobs_T.cpu() * row.generated_mask_T.cpu())
    return np.concatenate([found[index] for index in sorted(found)])
