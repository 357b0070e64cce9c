"""What a sequence costs to train on, from the shapes of the model's matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conversion.families.registry import family


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of a forward pass over one sequence; backward passes take a multiple of it."""

    per_token: float
    per_token_squared: float

    def of(self, length: int) -> float:
        """Operations for a sequence of `length` tokens."""
        return self.per_token * length + self.per_token_squared * length**2


@cache
def sequence_cost(model_folder: str) -> SequenceCost:
    """Cost on the model in a Hugging Face folder. The file is read once per process."""
    return cost_of_model(json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8")))


def cost_of_model(hf_config: Mapping[str, object]) -> SequenceCost:
    """Cost on the model of a config.json.

    A token meets every matrix once, of routed experts its top k, with two operations for an element. In an attention layer it meets on
    average half of its sequence, with four operations for each of its query's elements (scores, and their weighted sum). Mamba layers
    carry a state of fixed size: no quadratic term; their scan, a few percent of their projections, is left out.
    """
    found = family(hf_config)
    transformer = found.megatron_arguments(hf_config)["transformer"]
    num_experts, top_k = (int(str(transformer.get(name, 0) or 0)) for name in ("num_moe_experts", "moe_router_topk"))
    shapes = found.canonical(hf_config)
    elements = queries = 0.0
    for name, shape in shapes.items():
        # Vectors and convolutions are no matrix products; the embedding is a lookup, unless the output layer is the same matrix.
        if len(shape) != 2 or ("embed" in name and "lm_head.weight" in shapes):
            continue
        elements += shape[0] * shape[1] * (top_k / num_experts if ".experts." in name else 1.0)
        if name.endswith("q_proj.weight"):
            queries += shape[0]
    return SequenceCost(per_token=2 * elements, per_token_squared=2 * queries)
