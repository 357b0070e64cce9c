# SPDX-License-Identifier: Apache-2.0
"""Differences between the trainer's and the engine's logprobs of the same tokens, and limits of rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MAX_MEAN_ERROR: Mapping[str, float] = {"float32": 0.01, "bfloat16": 0.05, "fp8": 0.2}
"""Limits by precision. Rounding gives 1e-6 in float32, 5e-4 in TF32, 0.02 in bfloat16; other positions or other weights
give more.

FP8 (e4m3) keeps 4 binary digits: a significand uniform in its logarithm has a relative error of 1/16 / sqrt(3) x
sqrt(3 / (8 ln 2)) = 2.65 % (root mean square), and a product of two such numbers one of 3.75 %. Random models of four
to seven layers measure 0.019 to 0.044 on average against float32, in all forms, and 0.004 to 0.007 in bfloat16
(tests/stack/rollout/test_fp8.py). The limit is 4.5 times the largest, as models of real size have more layers.
"""
MAX_MEAN_ERROR_OF_EXPERTS: Mapping[str, float] = {"float32": 0.01, "bfloat16": 0.1, "fp8": 0.25}
FLIPPED_SHARE = 0.1
"""Share of the tokens, those that differ most, that does not count: where scores of experts are nearly equal, rounding
makes the two sides choose different experts for a few tokens, which then differ by nats."""


class Disagreement(RuntimeError):
    """Trainer and engine compute different models from equal weights."""


@dataclass(frozen=True)
class Errors:
    """Differences between the log-probabilities of tokens."""

    num_tokens: int
    mean: float
    largest: float
    num_ruled_out: int
    """Tokens that the trainer's top-k or top-p rules out, whatever the others say."""

    @property
    def figures(self) -> str:
        return (
            f"over {self.num_tokens} tokens logprobs differ by {self.mean:.2g} on average, by "
            f"{self.largest:.2g} at most"
        )


def measure(generator: Sequence[np.ndarray], trainer: Sequence[np.ndarray], *, flipped_share: float) -> Errors:
    """Measures the trainer's logprobs against the generator's; the mean omits the `flipped_share` that differ most."""
    error_T = np.abs(np.concatenate(list(trainer)) - np.concatenate(list(generator)))
    drawn_T = np.sort(error_T[~np.isinf(error_T)])
    num_ruled_out = len(error_T) - len(drawn_T)
    if not len(drawn_T) or np.isnan(drawn_T[-1]):
        return Errors(len(error_T), float("nan"), float("nan"), num_ruled_out)
    counted_T = drawn_T[: len(drawn_T) - int(flipped_share * len(drawn_T))]
    return Errors(len(error_T), float(counted_T.mean()), float(drawn_T[-1]), num_ruled_out)


def find_disagreement(errors: Errors, precision: str, *, chooses: bool, after: str = "") -> str:
    """Says why these errors are no rounding; "" if they are. `chooses`: each side routes tokens to experts by itself.

    `after` describes the prompt of the tokens, in the words of the message.
    """
    limit = (MAX_MEAN_ERROR_OF_EXPERTS if chooses else MAX_MEAN_ERROR)[precision]
    # Written as the condition that must hold, so that NaN fails it.
    if errors.mean <= limit and 2 * errors.num_ruled_out <= errors.num_tokens:
        return ""
    return (
        f"trainer and engine compute different models of the same weights: {errors.figures}{after}; in {precision} "
        f"at most {limit} on average is rounding ({errors.num_ruled_out} tokens are ruled out by the trainer's "
        "top-k or top-p). Likely causes: config.json says something twice that the two read differently "
        "(positions, windows, tied embeddings), or policy.generation.vllm_kwargs, env_vars or "
        "policy.megatron_cfg.model_overrides change one side alone. python -m mrl.doctor CONFIG --refit examines "
        "both; policy.generation.compare_at_start=false starts without this check"
    )
