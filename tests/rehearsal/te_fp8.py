# SPDX-License-Identifier: Apache-2.0
"""Training in FP8 by Transformer Engine's own Python: the recipe that layers get, sizes that products take, and bytes.

Runs in the process of gpu_rows.py, after te_calls, whose kernels of plain torch stay: no product is in FP8 here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conversion.files.safetensors import fill_layout
from tests import models
from tests.rehearsal.gpu_host import Rank, as_rank
from tests.rehearsal.te_calls import FUSED
from tests.rehearsal.te_models import BF16

CAPABILITIES = {"blockwise": (9, 0), "tensorwise": (9, 0), "mxfp8": (10, 0)}
"""Recipes, and a GPU that has each."""
MODEL_TYPES = ("deepseek_v3", "glm4_moe", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
INPUT, WEIGHT = (4096, 2048), (1536, 2048)


@dataclass(frozen=True)
class Row:
    """One model, trained in one recipe."""

    model_type: str
    recipe: str
    chosen: list[str]
    """Recipes of Transformer Engine in which layers compute, with the type of gradients; "" is none."""
    num_calls: int
    faults: list[str]
    """Products whose sizes FP8 does not take."""
    row_tokens: list[int]
    expert_tokens: list[int]
    """Tokens of an expert, each number once."""
    input_bytes: float
    """Bytes of an element of an input that waits for the backward pass."""
    weight_bytes: float
    """Bytes of the copies of a weight's element."""


def quantisers(recipe: Any) -> tuple[Any, Any]:
    """Transformer Engine's quantisers of the input and of the weight of a product."""
    from transformer_engine.pytorch.quantization import RecipeState

    first, second, *_ = RecipeState.create(recipe, mode="forward", num_quantizers=3).make_quantizers()
    return first, second


def bytes_of(quantiser: Any, shape: tuple[int, ...], *, rowwise: bool, columnwise: bool) -> float:
    """Bytes of an element of a tensor in FP8, with its scales."""
    quantiser.set_usage(rowwise=rowwise, columnwise=columnwise)
    specs = quantiser.inner_tensor_specs(shape).values()
    return sum(math.prod(size) * dtype.itemsize for size, dtype in specs) / math.prod(shape)


def watch(calls: list[tuple[Any, Any, Any]]) -> None:
    """Notes the layer, its input and its recipe of each call of a layer that Transformer Engine computes in FP8."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    def watched(forward: Any) -> Any:
        def call(self: Any, inp: Any, *args: Any, **kwargs: Any) -> Any:
            assert kwargs["is_first_microbatch"] is None  # else weights of an earlier step would compute
            calls.append((self, inp, State.get_fp8_recipe() if State.is_fp8_enabled() else None))
            if isinstance(self, te.GroupedLinear):
                calls[-1] = (self, list(map(int, args[0])), calls[-1][2])
            return forward(self, inp, *args, **kwargs)

        return call

    for layer in (te.Linear, te.LayerNormLinear, te.GroupedLinear):
        layer.forward = watched(layer.forward)


def fault_of(layer: Any, inputs: Any) -> str:
    """Returns what Transformer Engine says of the sizes of a product; "" if it takes them."""
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    weights = [weight for name, weight in layer.named_parameters() if name.startswith("weight")]
    columns = weights[0].shape[1]
    tensors = [torch.empty(rows, columns, device="meta") for rows in inputs] if isinstance(inputs, list) else [inputs]
    try:
        assert_dim_for_fp8_exec(*tensors, *weights)
    except ValueError as error:
        return str(error)
    return ""


def rows(folder: Path) -> Iterator[Row]:
    """Every family that may train in FP8, in blocks, and two of them in the other recipes."""
    import transformer_engine.pytorch.utils as te_utils
    from megatron.core.fp8_utils import get_fp8_recipe

    from mrl.policy.step import _forward
    from tests.stack.policy.policy_ranks import pack_rows, plan_of, run_config

    calls: list[tuple[Any, Any, Any]] = []
    watch(calls)
    setattr(torch.version, "cuda", "13.0")  # noqa: B010  torch types it as a constant
    for recipe, capability in CAPABILITIES.items():
        te_utils._get_device_compute_capability = lambda device, capability=capability: capability
        torch.cuda.get_device_capability = lambda device=None, capability=capability: capability
        te_utils.is_non_tn_fp8_gemm_supported.cache_clear()
        words = [*BF16, f"policy.megatron_cfg.fp8_cfg.fp8_recipe={recipe}", "policy.megatron_cfg.fp8_cfg.enabled=true"]
        for model_type in MODEL_TYPES if recipe == "blockwise" else ("deepseek_v3", "qwen3_moe"):
            calls.clear()
            place = folder / f"{model_type}-{recipe}"
            models.tiny_model(model_type, 0).save_pretrained(place)
            # Recomputation would ask the GPU for its random numbers.
            config = run_config(place, "one", *FUSED[:2], *words)
            hf_config = json.loads((place / "config.json").read_text())
            with as_rank(config.policy, 0, 1):
                built = Rank(config.policy, hf_config, "cpu")
                fill_layout(place, built.layout, built.tensors)
                packed = pack_rows(config.policy, plan_of("balanced", 1)[0][0])
                for row in packed:
                    _forward(built.chunks[0], row).float().sum().backward()
                of_te = get_fp8_recipe(built.chunks[0].config)
            faults = [fault_of(layer, inputs) for layer, inputs, _ in calls]
            read, weight = quantisers(of_te)
            yield Row(
                model_type,
                recipe,
                sorted({"" if chosen is None else type(chosen).__name__ for _, _, chosen in calls}),
                len(calls),
                sorted({fault for fault in faults if fault}),
                sorted({inp.shape[0] for _, inp, _ in calls if not isinstance(inp, list)}),
                sorted({number for _, inp, _ in calls if isinstance(inp, list) for number in inp}),
                bytes_of(read, INPUT, rowwise=False, columnwise=True),
                bytes_of(weight, WEIGHT, rowwise=True, columnwise=True),
            )
