# SPDX-License-Identifier: Apache-2.0
"""Rules of speculation: what proposes tokens, and what it needs of the model and the run."""

from __future__ import annotations

from mrl.config.errors import Problems
from mrl.config.model import ModelSizes
from mrl.config.schema.run import RunConfig

METHODS = ("mtp", "ngram")
"""The model's own layers of multi-token prediction, and n-grams of the tokens so far: no other weights than a refit brings."""

_KWARGS = "policy.generation.vllm_kwargs"
_SECTION = f"{_KWARGS}.speculative_config"


def check_speculation(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """The method is one of those that a refit keeps right, and the model has what it needs."""
    generation = config.policy.generation
    speculation = generation.vllm_kwargs.get("speculative_config")
    if not config.has_engines or not isinstance(speculation, dict):
        return
    method = generation.speculative_method
    if method not in METHODS:
        rule = "proposes with weights that no refit brings, or by a kernel that mrl has not proven exact"
        problems.add(f"{_SECTION}.method" if method else _SECTION, rule, f"use method {' or '.join(METHODS)}")
    if not speculation.get("num_speculative_tokens"):
        problems.add(_SECTION, "it does not say how many tokens are proposed at once", "set num_speculative_tokens, for example to 1")
    if method == "mtp" and model.num_mtp_steps != 1:
        rule = f"the model's num_nextn_predict_layers is {model.num_mtp_steps}, and vLLM's drafter has 1"
        problems.add(f"{_SECTION}.method", rule, "use ngram, which needs none")
