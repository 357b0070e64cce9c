"""The names of megatron-core whose place or form depends on its version. Written for 0.16.1.

From 0.17 on, megatron.core.models.hybrid holds what is imported here (HybridModel, HybridStack; the pattern argument is
`hybrid_layer_pattern`, and stages are written into it with "|"): such branches belong here and nowhere else.
"""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer

__all__ = [
    "HAVE_TE",
    "MLPLayer",
    "MambaLayer",
    "MambaLayerSubmodules",
    "MambaMixer",
    "MambaMixerSubmodules",
    "MambaModel",
    "MambaStack",
    "MambaStackSubmodules",
]
