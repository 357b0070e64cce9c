# SPDX-License-Identifier: Apache-2.0
"""Differences between megatron-core 0.16.1 and 0.19, which mrl runs on: names, arguments, specs and module state.

Only this module reads the version. Layers themselves stand in specs.py, patches of hosts without libraries in cpu.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron.core import package_info
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig

IS_OLD = (package_info.MAJOR, package_info.MINOR) < (0, 17)
"""True for 0.16.1, the newest version for Python 3.11."""

if IS_OLD:
    from megatron.core.models.mamba import MambaModel as HybridModel
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as hybrid_stack_spec
    from megatron.core.ssm.mamba_block import MambaStack as HybridStack
    from megatron.core.transformer.moe import moe_utils

    EXPERT_STATISTICS: tuple[ModuleType, str] = (moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER")
else:
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.moe import moe_logging

    EXPERT_STATISTICS = (moe_logging, "_MOE_METRICS_TRACKER")

__all__ = [
    "EXPERT_STATISTICS",
    "IS_OLD",
    "HybridStack",
    "build_hybrid",
    "flex_arguments",
    "hybrid_stack_spec",
    "packed_arguments",
    "stack_arguments",
    "submodules_of",
]


def build_hybrid(
    config: TransformerConfig,
    spec: ModuleSpec,
    stages: Sequence[range],
    *,
    hybrid_override_pattern: str,
    **arguments: Any,
) -> MegatronModule:
    """This rank's hybrid model part. `stages`: layers by pipeline stage; `arguments`: those of Megatron's class."""
    pattern = hybrid_override_pattern
    if IS_OLD:
        return HybridModel(config, spec, hybrid_override_pattern=pattern, **arguments)
    # Stages stand in the pattern, or else in the config.
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    parts = "|".join(pattern[stage.start : stage.stop] for stage in stages)
    return HybridModel(config, spec, hybrid_layer_pattern=parts, **arguments)


def stack_arguments(pattern: str) -> dict[str, object]:
    """Arguments that give a hybrid stack, which is not cut into stages, the layers of `pattern`."""
    return {"hybrid_override_pattern": pattern} if IS_OLD else {"layer_type_list": list(pattern)}


def packed_arguments(num_tokens: int) -> dict[str, Any]:
    """Arguments of `PackedSeqParams` with which Mamba layers keep the sequences of a row of `num_tokens` apart.

    From 0.17 on they mix the sequences without them, and say nothing.
    """
    return {} if IS_OLD else {"total_tokens": num_tokens}


def flex_arguments(config: MegatronConfig) -> dict[str, object]:
    """Arguments of TransformerConfig by which HybridEP carries tokens; {} for other dispatchers.

    Its ranks exchange equal numbers of tokens, and rows of data-parallel ranks differ: from 0.17 on Megatron pads them.

    Raises:
        ValueError: megatron-core 0.16.1, which does not.
    """
    if not config.uses_hybridep:
        return {}
    if IS_OLD:
        raise ValueError(
            "policy.megatron_cfg.moe_flex_dispatcher_backend=hybridep: the ranks of HybridEP exchange equal numbers of "
            f"tokens, to which megatron-core {package_info.__version__} does not pad rows; install 0.19 (Python 3.12), "
            "or set it to deepep"
        )
    return {
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_hybridep_pad_uneven_dispatch_inputs": True,
        "moe_flex_dispatcher_num_sms": config.moe_hybridep_num_sms,
    }


def submodules_of(spec: object) -> Any:
    """Submodules in the spec of a layer's MLP or experts, which 0.19 writes as a `functools.partial` of the class."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else getattr(spec, "submodules")  # noqa: B009
