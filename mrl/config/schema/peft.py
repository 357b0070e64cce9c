"""Sections `policy.megatron_cfg.peft` and `freeze_config`: what of the model is trained. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FactorInit = Literal["xavier", "normal", "kaiming", "zero"]


@dataclass
class PeftConfig:
    enabled: bool = False
    """Train low-rank adapters (LoRA) beside the linear layers and nothing else. Engines get the merged weights."""
    target_modules: list[str] = field(default_factory=list)
    """Linear layers with adapters: names as linear_qkv, linear_proj, linear_fc1, linear_fc2, in_proj, out_proj, or full names with
    wildcards as *.layers.0.*.linear_qkv, layers counted over the whole model. Empty = all of attention, MLPs, experts and Mamba."""
    exclude_modules: list[str] = field(default_factory=list)
    """Linear layers without adapters, in the same form. Only with empty `target_modules`."""
    dim: int = 8
    """Rank of the adapters."""
    alpha: float = 32
    """The adapters' product is scaled by alpha / dim."""
    dropout: float = 0.0
    """Share of values that adapters drop in training."""
    dropout_position: Literal["pre", "post"] = "post"
    """Drop the adapters' input (pre) or their output (post)."""
    lora_A_init_method: FactorInit = "xavier"
    """Start of A: Xavier or normal (deviation 0.2) or Kaiming numbers, or zeros."""
    lora_B_init_method: FactorInit = "zero"
    """Start of B, likewise. A or B starts as zeros, so that training starts from the model's own weights."""
    a2a_experimental: bool = False
    """Another way of communication in the adapters of Megatron-Bridge. Not supported: must be false."""
    lora_dtype: Literal["float32", "bfloat16", "None"] | None = None
    """Type of the adapters; null = `policy.precision`."""

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied by."""
        return self.alpha / self.dim


@dataclass
class FreezeConfig:
    modules: list[str] = field(default_factory=list)
    """Tensors that are not trained, by their names in the Hugging Face checkpoint, with wildcards: backbone.embeddings.*"""
