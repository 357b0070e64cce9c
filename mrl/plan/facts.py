# SPDX-License-Identifier: Apache-2.0
"""Facts of a run that a plan needs: model sizes, parallel sizes, rows, optimizer. From config and config.json alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from conversion.adapters import adapted_layers, adapted_weights
from conversion.boxes import DTYPE_BYTES
from conversion.families.common import VllmParallel
from conversion.families.registry import family
from mrl.config.errors import prefix_of
from mrl.config.fp8 import form_of, kept_layers, quantised_bytes
from mrl.config.model import model_folder, read_hf_config, sizes_of
from mrl.config.schema.generation import GenerationConfig
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import AUTO, LEAST_SAVING, sharing_of
from mrl.data.planning import MIN_SAVED_TOKENS, cost_of_model
from mrl.phases import ModelName
from mrl.plan.activations import BF16, FP32, Row
from mrl.plan.states import ModelElements, StateRules

IMBALANCE = 1.3
"""Tokens of the busiest rank's experts over the mean, with natural routing: fitted on runs of docs/plan.md."""


class PlanModel:
    """A model of config.json, with values computed once, and the other models that policy ranks hold."""

    def __init__(
        self,
        hf_config: Mapping[str, object],
        beside: Mapping[ModelName, PlanModel] = MappingProxyType({}),
        folder: Path | None = None,
        apart: Mapping[ModelName, PlanModel] = MappingProxyType({}),
    ) -> None:
        self.hf_config = hf_config
        self.folder = folder
        """Folder of the model's weights; None if unknown."""
        self.beside = beside
        self.apart = apart
        """Models with nodes of their own."""
        self.family = family(hf_config)
        self.shape = sizes_of(hf_config)
        self.mtp_pattern = str(self.family.megatron_arguments(hf_config).get("mtp", {}).get("pattern", ""))
        """A letter for each layer of a step of multi-token prediction."""
        self.elements = ModelElements(self.family.model(hf_config, None))
        self.cost = cache(partial(cost_of_model, hf_config))
        """Cost of a sequence, given how many steps of multi-token prediction learn with the model; none unless told."""
        self.adapted_elements = cache(self._adapted_elements)
        """Elements of the weights with adapters, given the layers that targets and exclusions name."""
        self.num_parameters = self.shape.num_parameters
        self.engine_bytes = cache(self._engine_bytes)

    @property
    def by_name(self) -> dict[ModelName, PlanModel]:
        """The policy and all other models."""
        return {"policy": self, **self.beside}

    def _adapted_elements(self, target_modules: tuple[str, ...], exclude_modules: tuple[str, ...]) -> ModelElements:
        layers = adapted_layers(
            self.family, self.hf_config, target_modules=target_modules, exclude_modules=exclude_modules
        )
        return ModelElements(adapted_weights(self.family.model(self.hf_config, None), layers))

    def fp8_bytes(self, generation: GenerationConfig) -> tuple[int, int]:
        """Bytes by which FP8 makes the weights of an engine's first worker smaller, and those of its largest layer."""
        form, kept = form_of(generation, self.shape), kept_layers(generation, self.shape)
        layout = self.family.vllm_layout(self.hf_config, generation.parallel, 0, generation.vllm_cfg.loaded_precision)
        saved, layers = 0, Counter[str]()
        for slot, content in layout.items():
            quantised = quantised_bytes(slot.name, content.shape, form, kept)
            if quantised is not None:
                num_bytes = math.prod(content.shape) * DTYPE_BYTES[content.dtype]
                saved += num_bytes - quantised
                layers[slot.name.rpartition(".")[0]] += num_bytes
        return saved, max(layers.values(), default=0)

    def _engine_bytes(self, parallel: VllmParallel, dtype: str) -> int:
        """Weights of an engine's worker with the most; the first of each stage, or of all groups, has most experts."""
        workers = range(0, parallel.tp * parallel.pp, parallel.tp)
        layouts = (self.family.vllm_layout(self.hf_config, parallel, worker, dtype) for worker in workers)
        return max(
            sum(math.prod(slot.shape) * DTYPE_BYTES[slot.dtype] for slot in layout.values()) for layout in layouts
        )


def read_model(config: RunConfig) -> PlanModel:
    """A run's policy and other models, with the config's overrides; ValueError if a config.json cannot be read."""
    others = {name: _read(config, name) for name in (*config.models_beside, *config.own_nodes)}
    apart = {name: others.pop(name) for name in config.own_nodes}
    return _read(config, "policy", others, apart)


def _read(
    config: RunConfig,
    model: ModelName,
    beside: Mapping[ModelName, PlanModel] = MappingProxyType({}),
    apart: Mapping[ModelName, PlanModel] = MappingProxyType({}),
) -> PlanModel:
    section = config.model(model)
    try:
        folder = model_folder(section.model_name, with_weights=False).resolve()
        return PlanModel(read_hf_config(folder, section.hf_config_overrides), beside, folder, apart)
    except ValueError as error:
        raise ValueError(f"{prefix_of(model)}model_name={section.model_name}: {error}") from error


def row_of(config: RunConfig, model: ModelName = "policy", *, is_training: bool, imbalance: float = IMBALANCE) -> Row:
    """The longest row of a model's training, or of its logprob passes, as a rank computes it."""
    policy = config.model(model)
    megatron, packing, dynamic = policy.megatron_cfg, policy.sequence_packing, policy.dynamic_batching
    fills = packing if packing.enabled else dynamic
    tokens = fills.train_mb_tokens if is_training else fills.logprob_mb_tokens
    if not fills.enabled:
        tokens = policy.max_total_sequence_length * (
            policy.train_micro_batch_size if is_training else policy.logprob_batch_size
        )
    # A row of pairs holds as many tokens of each kind of answer.
    tokens *= 2 if config.learns_pairs else 1
    recompute = frozenset[str]()
    if megatron.activation_checkpointing and is_training:
        modules = megatron.recompute_modules or ["core_attn"]
        recompute = frozenset(["full"] if megatron.recompute_granularity == "full" else modules)
    return Row(
        tokens=-(-tokens // policy.row_multiple) * policy.row_multiple // megatron.context_parallel_size,
        tp=megatron.tensor_model_parallel_size,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        is_sequence_parallel=megatron.sequence_parallel,
        imbalance=imbalance,
        recompute=recompute,
        # With replies of few tokens, each of a prompt's rollouts reads as many keys as a row has.
        path_copies=config.rollouts.num_generations_per_prompt if sharing_of(config, model) else 1.0,
        fp8=megatron.fp8_cfg.fp8_recipe if megatron.fp8_cfg.enabled else "",
    )


@dataclass(frozen=True)
class ComputedTokens:
    """Tokens that a model computes in a pass over rollouts that share their prompts."""

    share: float
    """Share of all tokens of the rollouts."""
    length: float
    """Twice the mean number of keys of a token, as that of a sequence is its length."""
    rollouts_per_row: int


def computed_tokens(config: RunConfig, mean_tokens: float) -> ComputedTokens:
    """Tokens of rollouts of a mean length that a policy computes, as `policy.share_prefixes` says.

    A prompt has at least the tokens that are not drawn (`max_new_tokens`); of rollouts of several turns none are known.
    """
    policy, shares = config.policy, sharing_of(config)
    reply = min(mean_tokens, float(policy.generation.max_new_tokens))
    prompt, alone = mean_tokens - reply, ComputedTokens(1.0, mean_tokens, 1)
    if not shares or prompt < MIN_SAVED_TOKENS or config.max_rollout_turns > 1:
        return alone
    row_tokens = min(policy.sequence_packing.train_mb_tokens, policy.sequence_packing.logprob_mb_tokens)
    number = min(config.rollouts.num_generations_per_prompt, max(1, int((row_tokens - prompt) / reply)))
    tokens = prompt + number * reply
    share = tokens / (number * mean_tokens)
    if shares == AUTO and share * LEAST_SAVING > 1:
        return alone
    return ComputedTokens(share, (prompt**2 + number * reply * (2 * prompt + reply)) / tokens, number)


def state_rules(config: RunConfig, model: ModelName = "policy") -> StateRules:
    """The bytes of each state of a model per element, and the number of ranks that share it."""
    section = config.model(model)
    megatron, settings = section.megatron_cfg, section.megatron_cfg.optimizer
    is_bf16, is_sharded = section.precision == "bfloat16", settings.use_distributed_optimizer
    ranks = config.num_ranks_of(model) // megatron.pipeline_model_parallel_size
    experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return StateRules(
        dense_shards=ranks // megatron.tensor_model_parallel_size if is_sharded else 1,
        expert_shards=ranks // experts if is_sharded else 1,
        weight_bytes=BF16 if is_bf16 else FP32,
        gradient_bytes=BF16 if is_bf16 and not megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else FP32,
        moment_bytes=FP32 if settings.is_muon else 2 * FP32,
        is_precision_aware=settings.use_precision_aware_optimizer,
        offloaded=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
        is_trained=not megatron.peft.enabled,
    )


def num_microbatches(config: RunConfig, model: ModelName = "policy") -> int:
    """Most rows of a model's update on a data-parallel rank: each sequence in a row of its own."""
    section = config.model(model)
    per_row = 1 if section.sequence_packing.enabled else section.train_micro_batch_size
    return max(1, section.train_global_batch_size // config.replicas_of(model) // per_row)
