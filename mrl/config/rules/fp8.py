# SPDX-License-Identifier: Apache-2.0
"""Rules of FP8: rollouts from weights in FP8, and products of training in FP8."""

from __future__ import annotations

from mrl.config.errors import Problems
from mrl.config.fp8 import BLOCK, FORMS, MX, MX_BLOCK, form_of, has_whole_blocks, input_widths
from mrl.config.model import ModelSizes
from mrl.config.schema.run import RunConfig

_ENGINE = "policy.generation.vllm_cfg"
_FORM = "policy.generation.vllm_kwargs.quantization"
_PRODUCT = 16
"""Inputs of a product in FP8 by cuBLAS come in multiples of this (`assert_dim_for_fp8_exec` of Transformer Engine)."""


def check_form(config: RunConfig, problems: Problems) -> None:
    """Checks the keys that say how an engine keeps its weights in FP8."""
    generation, vllm = config.policy.generation, config.policy.generation.vllm_cfg
    form = generation.vllm_kwargs.get("quantization")
    if form is not None and form not in FORMS:
        rule = "refits write weights as the checkpoint has them, or as vLLM rounds them to FP8"
        problems.add(_FORM, rule, f"use {' or '.join(FORMS)} with {_ENGINE}.precision=fp8, or remove the key")
    if vllm.is_fp8:
        if vllm.is_mx and form not in (None, MX):
            rule = f"{_FORM}={form} is another form"
            problems.add(f"{_ENGINE}.is_mx", rule, f"set it to false, or leave out {_FORM}")
        if generation.speculative_method == "mtp":
            rule = "drafting with MTP layers in FP8 is not built"
            problems.add(f"{_ENGINE}.precision", rule, "set it to bfloat16, or speculate with method ngram")
        return
    for key, value in {
        f"{_ENGINE}.num_first_layers_in_bf16": vllm.num_first_layers_in_bf16,
        f"{_ENGINE}.num_last_layers_in_bf16": vllm.num_last_layers_in_bf16,
        f"{_ENGINE}.quantization_ignored_layer_kws": vllm.quantization_ignored_layer_kws,
        f"{_ENGINE}.is_mx": vllm.is_mx,
        f"{_ENGINE}.use_deep_gemm": vllm.use_deep_gemm,
        _FORM: form if form in FORMS else None,
    }.items():
        if value:
            problems.add(
                key, f"{_ENGINE}.precision={vllm.precision} has no weights in FP8", "set that to fp8, or leave this out"
            )


def check_blocks(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that the chosen form fits the model's experts."""
    generation = config.policy.generation
    if not (config.has_engines and generation.vllm_cfg.is_fp8):
        return
    if model.window:
        rule = "vLLM 0.32 loads no biases of experts that it rounds to FP8, as those of models with attention sinks"
        problems.add(f"{_ENGINE}.precision", rule, "set it to bfloat16")
    form, key = form_of(generation, model), f"{_ENGINE}.is_mx" if generation.vllm_cfg.is_mx else _FORM
    if form not in ("fp8_per_block", MX):
        return
    way_out = "use fp8_per_channel, or leave it out"
    if key != _FORM:
        way_out = f"leave it out, or use {_FORM}=fp8_per_channel"
    if not has_whole_blocks(generation, model):
        rule = (
            f"an expert of {model.expert_ffn} over the engine's workers, or of {model.latent or model.hidden}, is not "
            f"of whole blocks of {BLOCK}"
        )
        problems.add(key, rule, way_out)
    odd = sorted({width for width in input_widths(generation.parallel.tp, model) if width % MX_BLOCK})
    if form == MX and odd:
        rule = f"linear layers of a worker have {odd} inputs, and a scale is for {MX_BLOCK} of them"
        problems.add(key, rule, way_out)


def check_training(config: RunConfig, model: ModelSizes, problems: Problems) -> None:
    """Checks that training in FP8 has what it needs."""
    section = problems.section
    settings, at = section.megatron_cfg.fp8_cfg, f"{problems.at}megatron_cfg.fp8_cfg"
    if not settings.enabled:
        return
    has_gpus, precision, megatron = config.cluster.gpus_per_node > 0, section.precision, section.megatron_cfg
    widths = {
        *input_widths(megatron.tensor_model_parallel_size, model),
        model.expert_ffn // megatron.expert_tensor_parallel_size,
    }
    multiple = MX_BLOCK if settings.fp8_recipe == MX else _PRODUCT
    odd = sorted(width for width in widths if width % multiple)
    wrong = {
        "enabled": {
            "only Transformer Engine computes in FP8, on GPUs, and cluster.gpus_per_node=0": not has_gpus,
            "training hybrid models with Mamba layers in FP8 is not built": model.model_class == "mamba",
            "training models with gated delta nets in FP8 is not built": model.has_delta_nets,
            "training models with attention sinks in FP8 is not built": bool(model.window),
            f"{problems.at}precision={precision} has no products in FP8": precision != "bfloat16",
            f"linear layers of a rank have {odd} inputs, and {settings.fp8_recipe} takes multiples of {multiple}": bool(
                odd
            ),
        },
        # Transformer Engine changes them after each microbatch with gradients, and keeps them in a pickle.
        "fp8_recipe": {
            "its scales come from earlier microbatches, so that the same weights give other logprobs in the update and "
            "after a resume": settings.fp8_recipe == "delayed"
        },
        "fp8_param": {"optimizer, checkpoints and refits want the weights as they are": settings.fp8_param},
    }
    ways = {"enabled": "set it to false", "fp8_recipe": "use blockwise or tensorwise", "fp8_param": "set it to false"}
    for name, rules in wrong.items():
        for rule, is_broken in rules.items():
            if is_broken:
                problems.add(f"{at}.{name}", rule, ways[name])
    if section.megatron_cfg.first_last_layers_bf16:
        rule = "training in FP8 with the first and last layers in bfloat16 is not built"
        problems.add(f"{problems.at}megatron_cfg.first_last_layers_bf16", rule, "set it to false")
