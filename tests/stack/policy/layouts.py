# SPDX-License-Identifier: Apache-2.0
"""Loss, gradients and logprobs under a parallel layout, put together from all ranks, and the same by transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tests import models
from tests.reading import read_canonical
from tests.stack.policy import layout_ranks
from tests.stack.ranks import RankPool

Gradients = tuple[float, dict[str, np.ndarray]]
"""Loss, and gradients by canonical name."""


def sequences(*lengths: int) -> list[list[int]]:
    """Random sequences of these lengths."""
    draw = random.Random(sum(lengths))
    return [[draw.randrange(264) for _ in range(length)] for length in lengths]


# Even numbers of tokens for sequence parallelism, an even number of rows for data parallelism. Rows differ in length;
# in the shortest most experts get no token.
ROWS = [
    sequences(9, 30, 17),
    sequences(150, 2),
    sequences(*[12] * 10),
    sequences(1, 70, 65),
    sequences(2),
    sequences(3, 1),
]


def gradients_of(ranks: RankPool, folder: Path, world_size: int, megatron: dict) -> Gradients:
    """Loss over all data-parallel ranks, and whole gradients put together from all ranks; several copies must agree."""
    return gradients_and_logprobs(ranks, folder, world_size, megatron, None)[0]


def gradients_and_logprobs(
    ranks: RankPool, folder: Path, world_size: int, megatron: dict, scored: list[list[list[int]]] | None
) -> tuple[Gradients, list[np.ndarray]]:
    """The same, and the logprobs of the `scored` rows."""
    results = ranks.run(
        layout_ranks.gradients, layout_ranks.policy_config(**megatron), folder, ROWS, scored, world_size=world_size
    )
    replicas = megatron.get("tensor_model_parallel_size", 1)
    gradients = sum(loss for loss, _, _ in results) / replicas, put_together([part for _, part, _ in results])
    # The last rank is in the last stage.
    return gradients, results[-1][2]


def put_together(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Whole gradients from the ranks' parts, which are NaN where a rank has nothing."""
    grads: dict[str, np.ndarray] = {}
    for part in parts:
        for name, grad in part.items():
            whole = grads.setdefault(name, grad)
            both = ~np.isnan(whole) & ~np.isnan(grad)
            assert np.array_equal(whole[both], grad[both]), f"copies of the gradient of {name} differ"
            grads[name] = np.where(np.isnan(whole), grad, whole)
    return grads


def transformers_gradients(
    folder: Path, scratch: Path, auxiliary: Callable[[PreTrainedModel], torch.Tensor] | None = None
) -> Gradients:
    """Computes `gradients_of` by transformers, which writes the gradients to `scratch` as if they were weights.

    `auxiliary` adds to the gradients, not to the loss. Gated delta nets go token by token: their rule by chunks rounds
    gradients of decays to three digits.
    """
    model = transformers_model(folder)
    loss = torch.zeros(())
    with ExitStack() as stack:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
            rule = module.torch_recurrent_gated_delta_rule
            stack.enter_context(patch.object(module, "torch_chunk_gated_delta_rule", rule))
        for row in ROWS:
            advantages_T = layout_ranks.packed_row(row).advantages_T
            loss = loss + (transformers_logprobs(model, row) * advantages_T).sum() / len(ROWS)
        (loss if auxiliary is None else loss + auxiliary(model)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        parameter.data = parameter.grad
    # Files name tensors canonically, with experts apart that are stacked in memory.
    model.save_pretrained(scratch)
    return loss.item(), {
        name: tensor.numpy()
        for name, tensor in read_canonical(scratch).items()
        if not name.endswith("e_score_correction_bias")
    }


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> None:
    """Asserts that every tensor is the same up to this relative L2 error."""
    worst, error = worst_error(ours, theirs)
    assert error <= tolerance, f"{worst}: {error:.1e}"


def worst_error(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> tuple[str, float]:
    """The tensor with the largest relative L2 error, and that error; infinite where a value is missing."""
    assert ours.keys() == theirs.keys()
    # What no token reaches must be exactly 0.
    errors = {
        name: float(np.linalg.norm(ours[name] - theirs[name]) / (np.linalg.norm(theirs[name]) or 1e-30))
        for name in ours
    }
    errors = {name: float("inf") if np.isnan(error) else error for name, error in errors.items()}
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def transformers_model(folder: Path) -> PreTrainedModel:
    """The model of a folder, float32, in evaluation mode."""
    return models.unclamp_dt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def transformers_logprobs(model: PreTrainedModel, row: list[list[int]]) -> torch.Tensor:
    """Log-probability of the next token at every position of a packed row; 0 at the end of each sequence."""
    parts = []
    for sequence in row:
        tokens = torch.tensor([sequence])
        logprobs = torch.log_softmax(model(tokens).logits[0], dim=-1)
        parts += [logprobs[:-1].gather(1, tokens[0, 1:, None])[:, 0], torch.zeros(1)]
    return torch.cat(parts)
