# SPDX-License-Identifier: Apache-2.0
"""Routes of sequences: transformers' choices, routes that nobody would choose, and transformers made to follow them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from conversion.families.registry import family
from mrl.types import Rollout
from tests.parity import MAX_EXCLUDED, MIN_ROUTER_MARGIN

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def forced_routes(token_ids: Sequence[int], hf_config: Mapping[str, object]) -> np.ndarray:
    """Random distinct experts for all tokens but the last, as `Rollout.routes`; a function of the tokens."""
    layers = family(hf_config).expert_layers(hf_config)
    num_experts = int(
        str(
            next(hf_config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in hf_config)
        )
    )
    draw = np.random.default_rng([len(token_ids), *token_ids])
    order = draw.random((len(token_ids) - 1, len(layers), num_experts)).argsort(axis=-1)
    return order[..., : int(str(hf_config["num_experts_per_tok"]))].astype(np.uint8)


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The routers of a transformers model, in the order of its layers."""
    return [module for name, module in model.named_modules() if name.endswith(".gate")]


@torch.no_grad()
def own_routes(model: PreTrainedModel, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Router choices: ids [tokens, layers, experts per token], and by how much the last one leads, [tokens, layers]."""
    chosen, leads = [], []

    def note(router: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        best = _scores(router, output[0]).topk(output[2].shape[-1] + 1, dim=-1).values
        chosen.append(output[2])
        leads.append(best[:, -2] - best[:, -1])

    handles = [router.register_forward_hook(note) for router in routers(model)]
    try:
        model(torch.tensor([list(token_ids)]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(chosen, dim=1).numpy(), torch.stack(leads, dim=1).numpy()


def assert_own_routes(model: PreTrainedModel, rollouts: Mapping[str, Rollout], *, more_than: int = 3000) -> None:
    """Asserts that the rollouts' routes are what the model's routers choose, unless rounding could decide otherwise."""
    num_clear = num_all = 0
    for rollout in rollouts.values():
        tokens = [*rollout.request.token_ids, *rollout.token_ids.tolist()]
        assert rollout.routes is not None and rollout.routes.dtype == np.uint8
        expected, leads = own_routes(model, tokens)
        assert rollout.routes.shape == (len(tokens) - 1, *expected.shape[1:])
        is_clear = leads[:-1] >= MIN_ROUTER_MARGIN
        is_same = (np.sort(rollout.routes.astype(np.int64)) == np.sort(expected[:-1])).all(axis=-1)
        assert is_same[is_clear].all()
        num_clear, num_all = num_clear + int(is_clear.sum()), num_all + is_clear.size
    assert num_clear >= (1 - MAX_EXCLUDED) * num_all > more_than


@contextmanager
def followed(model: PreTrainedModel, routes: np.ndarray) -> Iterator[None]:
    """Sends a sequence's tokens through these experts, [tokens, layers, experts per token]; routers choose the rest."""

    def follow(index: int):
        def hook(router: torch.nn.Module, arguments: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]):
            logits, own_weights, own_ids = output
            ids = own_ids.clone()
            ids[: len(routes)] = torch.from_numpy(routes[:, index].astype(np.int64))
            is_sigmoid = "e_score_correction_bias" in dict(router.named_buffers())
            scores = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits.float(), dim=-1)
            weights = scores.gather(1, ids)
            weights = weights / weights.sum(dim=-1, keepdim=True) * getattr(router, "routed_scaling_factor", 1.0)
            return logits, weights.to(own_weights.dtype), ids

        return hook

    handles = [router.register_forward_hook(follow(index)) for index, router in enumerate(routers(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scores(router: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    bias = dict(router.named_buffers()).get("e_score_correction_bias")
    return logits if bias is None else torch.sigmoid(logits) + bias
