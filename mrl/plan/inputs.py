# SPDX-License-Identifier: Apache-2.0
"""What a plan reads of a run: sizes of the model, parallel sizes, rows, optimizer. From the config and config.json alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from conversion.boxes import DTYPE_BYTES
from conversion.families.common import VllmParallel
from conversion.families.registry import family
from conversion.files.reading import read_json
from mrl.config.model import cached_folder, is_hub_id, overridden_config
from mrl.config.schema.run import RunConfig
from mrl.config.sections import prefix_of
from mrl.data.planning import cost_of_model
from mrl.phases import ModelName
from mrl.plan.activations import BF16, FP32, LatentAttention, Row, Shape
from mrl.plan.states import ModelElements, StateRules

IMBALANCE = 1.3
"""Tokens of the busiest rank's experts over the mean, with natural routing: fitted on runs of docs/plan.md."""


def hub_folder(name: str) -> Path:
    """A folder with the config.json of a model: `name` itself, or for an id of the Hub its cache, into which this file alone is fetched.

    Raises:
        ValueError: it cannot be had.
    """
    if not is_hub_id(name):
        return Path(name)
    if (cached := cached_folder(name, with_weights=False)) is not None:
        return cached
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"policy.model_name={name}: its config.json is not in the local cache, nor to be had: {error}") from error


def shape_of(hf_config: Mapping[str, object]) -> Shape:
    """Sizes of a config.json."""
    found = family(hf_config)
    arguments = found.megatron_arguments(hf_config)
    given = arguments["transformer"] | arguments["model"]

    def size(name: str) -> int:
        return int(str(given.get(name) or 0))

    pattern, with_experts = given.get("hybrid_override_pattern"), set(found.expert_layers(hf_config))
    layers = tuple(str(pattern)) if pattern else tuple("*E" if index in with_experts else "*-" for index in range(size("num_layers")))
    mla = [size(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")]
    return Shape(
        layers=layers,
        hidden=size("hidden_size"),
        vocabulary=size("vocab_size"),
        heads=size("num_attention_heads"),
        kv_heads=size("num_query_groups"),
        head_dim=size("kv_channels"),
        ffn=size("ffn_hidden_size"),
        is_gated=bool(given["gated_linear_unit"]),
        experts=size("num_moe_experts"),
        topk=size("moe_router_topk"),
        expert_ffn=size("moe_ffn_hidden_size"),
        shared_ffn=size("moe_shared_expert_intermediate_size"),
        latent=size("moe_latent_size"),
        mamba_heads=size("mamba_num_heads") if "M" in layers else 0,
        mamba_head_dim=size("mamba_head_dim"),
        mamba_groups=size("mamba_num_groups"),
        mamba_state=size("mamba_state_dim"),
        mla=LatentAttention(*mla) if given.get("multi_latent_attention") else None,
    )


class Model:
    """A model of config.json, with what is computed of it once, and the models that policy ranks hold beside it."""

    def __init__(
        self, hf_config: Mapping[str, object], beside: Mapping[ModelName, Model] = MappingProxyType({}), folder: Path | None = None
    ) -> None:
        self.hf_config = hf_config
        self.folder = folder
        """That holds its weights; None if that is not known."""
        self.beside = beside
        self.family = family(hf_config)
        self.shape = shape_of(hf_config)
        self.mtp_pattern = str(self.family.megatron_arguments(hf_config).get("mtp", {}).get("pattern", ""))
        """A letter for each layer of a step of multi-token prediction."""
        self.elements = ModelElements(self.family.model(hf_config, None))
        self.cost = cache(partial(cost_of_model, hf_config))
        """Cost of a sequence, given how many steps of multi-token prediction learn with the model; none unless told."""
        self.num_parameters = sum(math.prod(shape) for shape in self.family.canonical(hf_config).values())
        self.engine_bytes = cache(self._engine_bytes)

    @property
    def by_name(self) -> dict[ModelName, Model]:
        """The policy and the models beside it."""
        return {"policy": self, **self.beside}

    def _engine_bytes(self, parallel: VllmParallel, dtype: str) -> int:
        """Weights of the first worker of an engine, which has as many experts as any."""
        layout = self.family.vllm_layout(self.hf_config, parallel, 0, dtype)
        return sum(math.prod(slot.shape) * DTYPE_BYTES[slot.dtype] for slot in layout.values())


def read_model(config: RunConfig) -> Model:
    """The policy of a run and the models beside it, with the config's overrides; ValueError if a config.json cannot be read."""
    return _read(config, "policy", {name: _read(config, name) for name in config.models_beside})


def _read(config: RunConfig, model: ModelName, beside: Mapping[ModelName, Model] = MappingProxyType({})) -> Model:
    section = config.of_model(model).policy
    name = section.model_name
    try:
        folder = hub_folder(name).resolve()
        found = read_json(folder / "config.json")
    except OSError as error:
        raise ValueError(
            f"{prefix_of(model)}model_name={name}: no readable config.json; give a folder that has one, or an id of the Hub"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{prefix_of(model)}model_name={name}: config.json is not a mapping; give the folder of a Hugging Face model")
    return Model(overridden_config(found, section.hf_config_overrides), beside, folder)


def row_of(config: RunConfig, *, is_training: bool, imbalance: float = IMBALANCE) -> Row:
    """The longest row of training, or of logprob passes, as a rank computes it."""
    policy = config.policy
    megatron, packing, dynamic = policy.megatron_cfg, policy.sequence_packing, policy.dynamic_batching
    fills = packing if packing.enabled else dynamic
    tokens = fills.train_mb_tokens if is_training else fills.logprob_mb_tokens
    if not fills.enabled:
        tokens = policy.max_total_sequence_length * (policy.train_micro_batch_size if is_training else policy.logprob_batch_size)
    # A row of pairs holds as many tokens of each kind of answer.
    tokens *= 2 if config.learns_pairs else 1
    recompute = frozenset[str]()
    if megatron.activation_checkpointing and is_training:
        modules = megatron.recompute_modules or ["core_attn"]
        recompute = frozenset(["full"] if megatron.recompute_granularity == "full" else modules)
    return Row(
        tokens=-(-tokens // policy.row_multiple) * policy.row_multiple // megatron.context_parallel_size,
        tp=megatron.tensor_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
        is_sequence_parallel=megatron.sequence_parallel,
        imbalance=imbalance,
        recompute=recompute,
    )


def state_rules(config: RunConfig) -> StateRules:
    """How many bytes the states have of each element, and over how many ranks they are spread."""
    megatron, settings = config.policy.megatron_cfg, config.policy.megatron_cfg.optimizer
    is_bf16, is_sharded = config.policy.precision == "bfloat16", settings.use_distributed_optimizer
    ranks = config.num_policy_ranks // megatron.pipeline_model_parallel_size
    experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
    return StateRules(
        dense_shards=ranks // megatron.tensor_model_parallel_size if is_sharded else 1,
        expert_shards=ranks // experts if is_sharded else 1,
        weight_bytes=BF16 if is_bf16 else FP32,
        gradient_bytes=BF16 if is_bf16 and not megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else FP32,
        is_precision_aware=settings.use_precision_aware_optimizer,
        offloaded=settings.optimizer_offload_fraction if settings.optimizer_cpu_offload else 0.0,
        is_trained=not megatron.peft.enabled,
    )


def num_microbatches(config: RunConfig) -> int:
    """Rows of an update on a data-parallel rank at most: each sequence in a row of its own."""
    per_row = 1 if config.policy.sequence_packing.enabled else config.policy.train_micro_batch_size
    return max(1, config.policy.train_global_batch_size // config.data_parallel_size // per_row)
