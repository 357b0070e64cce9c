# SPDX-License-Identifier: Apache-2.0
"""A logits processor for an engine of a test: every other token is likelier than the model says."""

from __future__ import annotations

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class Biased(LogitsProcessor):
    """Adds 1 to the logits of even tokens."""

    def __init__(self, *given: object) -> None:
        """Takes what vLLM gives."""

    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits."""
        logits[:, ::2] += 1.0
        return logits

    def is_argmax_invariant(self) -> bool:
        """False: vLLM applies it always."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keeps nothing of requests."""
