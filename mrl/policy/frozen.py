"""Parameters that are not trained: those that the config names, and the routers'."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from conversion.boxes import Slot
from conversion.families.common import HfConfig, MegatronCoords
from conversion.families.registry import family
from mrl.policy import compat, parallel

if TYPE_CHECKING:
    from mrl.config.schema.policy import PolicyConfig


def freeze(chunks: list[MegatronModule], config: PolicyConfig, hf_config: HfConfig) -> None:
    """Excludes from training what `megatron_cfg.freeze_moe_router` and `freeze_config` name. For chunks bare of wrappers."""
    place = parallel.coordinates()
    # The parts of tp rank 0 are never all padding, so that every rank freezes the same.
    coords = MegatronCoords(pp=place.pp, ep=place.ep)
    layout = family(hf_config).megatron_layout(
        hf_config, config.megatron_cfg.parallel, coords, config.precision, "te" if compat.HAVE_TE else "local"
    )
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            tensors = {piece.name for piece in layout[Slot(name, index)].pieces}
            is_router = name.endswith("mlp.router.weight") and config.megatron_cfg.freeze_moe_router
            if is_router or is_frozen(tensors, config.megatron_cfg.freeze_config.modules):
                parameter.requires_grad_(False)
        keep_gradients_flowing(chunk)


def is_frozen(names: set[str], patterns: list[str]) -> bool:
    """Whether patterns match the canonical tensors that a parameter is made of.

    Raises:
        ValueError: they match only some of them.
    """
    matched = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if matched and matched != names:
        raise ValueError(
            f"policy.megatron_cfg.freeze_config.modules={patterns} names {', '.join(sorted(matched))}, which Megatron holds in one tensor "
            f"with {', '.join(sorted(names - matched))}; name all of them or none"
        )
    return bool(matched)


def keep_gradients_flowing(chunk: MegatronModule) -> None:
    """Makes what comes out of a frozen embedding require a gradient, without which recomputed layers would get none."""
    if chunk.pre_process and not any(parameter.requires_grad for parameter in chunk.embedding.parameters()):
        chunk.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
