# SPDX-License-Identifier: Apache-2.0
"""Section `policy.generation`: the engines and how they sample. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from conversion.families.common import VllmParallel
from mrl.config.fields import (
    AboveZero,
    AtLeastTwo,
    Count,
    EnginePrecision,
    NotNegative,
    Only,
    Port,
    PortEnd,
    Positive,
    Precision,
    ShareAboveZero,
    follows,
)


@dataclass
class EngineResourcesConfig:
    gpus_per_node: Positive | None = None
    """GPUs taken from the policy for engines alone. Needed if cluster.num_nodes is 1; else whole nodes are taken, and
    it stays null.
    """
    num_nodes: Positive | None = None
    """Nodes taken from the policy for engines alone: needed if cluster.num_nodes is above 1."""


@dataclass
class ColocatedConfig:
    enabled: bool = True
    """Engines share the policy ranks' GPUs; false: engines have GPUs of their own, and both keep their memory in all
    phases.
    """
    resources: EngineResourcesConfig = field(default_factory=EngineResourcesConfig)
    """GPUs of the engines if not `enabled`. On hosts without GPUs both stay null: engines are more processes."""


@dataclass
class ServingChatConfig:
    chat_template: str | None = follows("policy.tokenizer.chat_template")
    """Template of the conversations that are asked over HTTP, as policy.tokenizer.chat_template."""
    default_chat_template_kwargs: dict[str, Any] | None = None
    """Values for its variables, where a request gives no others; null = policy.tokenizer.chat_template_kwargs."""
    enable_auto_tools: bool | None = None
    """Look for calls of tools in answers to requests that bring tools, by `tool_parser`; null = true where agents are
    configured.
    """
    tool_parser: str | None = None
    """Parser of tool calls: a name of vLLM's, or one that `tool_parser_plugin` registers.

    Environments read calls by it, too; null = that of the chat template, which `--check` prints, or `qwen3_coder` if it
    names none.
    """
    reasoning_parser: str | None = None
    """Parser of thoughts: a name of vLLM's, `nemotron_v3` for Nemotron 3, or the plugin's; null = they stay in the
    text.

    With one, rows of NeMo Gym are graded by what follows `</think>`, and by nothing where it is missing, as there.
    """


@dataclass
class VllmConfig:
    tensor_parallel_size: Positive = 1
    """TP of an engine: it divides the slots of a node, or is a multiple of them, for engines over several nodes."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of an engine, which has tensor_parallel_size workers for each. vLLM spreads the layers evenly
    over them.
    """
    expert_parallel_size: Positive = 1
    """1 = experts are cut like other matrices; tensor_parallel_size = whole experts are spread over the engine; a
    multiple of it = over so many workers, in groups of tensor_parallel_size that each hold all else and sample rollouts
    of their own, pass by pass together."""
    precision: EnginePrecision = follows("policy.precision")
    """Type of the engine's weights. `fp8`: matrices are rounded to FP8 in the engine after each refit; see
    docs/fp8.md. `vllm_kwargs.quantization` says in which form.
    """
    num_first_layers_in_bf16: Count = 0
    """First layers whose weights stay in bfloat16 with `precision: fp8`."""
    num_last_layers_in_bf16: Count = 0
    """Last layers whose weights stay in bfloat16 with `precision: fp8`."""
    quantization_ignored_layer_kws: list[str] | None = None
    """Parts of names of linear layers whose weights stay in bfloat16 with `precision: fp8`, such as `o_proj`."""
    is_mx: bool = False
    """With `precision: fp8`: weights and inputs in MXFP8: 32 numbers share a power of two as scale. For Blackwell."""
    use_deep_gemm: bool = False
    """Linear layers in FP8 use DeepGEMM's kernels where they can, on GPUs."""
    kv_cache_dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    """Type of cached keys and values; auto = `precision`, the only one without GPUs. 8-bit caches need scales, which no
    refit brings.
    """
    logprobs_mode: Annotated[
        str,
        Only(
            "processed_logprobs",
            "logprobs of another distribution than that of the tokens are no use",
            ("raw_logits", "raw_logprobs", "processed_logits"),
        ),
    ] = "processed_logprobs"
    """Logprobs of the distribution that tokens are drawn from, after temperature, top-k and top-p, with which the
    trainer compares.
    """
    env_vars: dict[str, str] | None = None
    """Environment variables of the engine processes. They win over mrl's own, as those of
    `policy.megatron_cfg.env_vars` do.
    """
    gpu_memory_utilization: ShareAboveZero = 0.6
    """Share of a GPU's memory that the engine may use; hosts without GPUs use `kv_cache_memory_mib`."""
    kv_cache_memory_mib: Positive = 256
    """KV cache of an engine on a host without GPUs, in MiB. Rollouts that do not fit wait, or are computed anew."""
    max_model_len: AtLeastTwo = follows("policy.max_total_sequence_length")
    """Longest prompt plus rollout, in tokens."""
    max_num_seqs: Positive | None = None
    """Rollouts that an engine, or each of its groups, samples at the same time; null = its part of a step or of a
    validation, up to 1,024 and to what fits into its cache. `python -m mrl.plan` shows the number."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one engine step, or of a group's; null = 16,384 (4,096 without GPUs), or fewer if its rollouts have no
    more or the cache needs the room."""
    adaptive_concurrency: bool = False
    """Fewer rollouts run at once where the cache is too small for all, so that under 1% of the tokens are computed
    again (`rollout/recomputed_fraction`); see docs/rollouts.md.
    """
    enable_prefix_caching: bool | None = None
    """Prompts share the cache of a common beginning until the next refit. null = as vLLM does; policy.router_replay
    decides itself.
    """
    enforce_eager: bool = False
    """No CUDA graphs. Must be true on hosts without GPUs."""
    load_format: Literal["auto", "safetensors"] = "auto"
    """Source of the engine's first weights for vLLM. NeMo RL's `dummy` means auto here: the first refit must find them
    right.
    """
    expose_http_server: bool | None = None
    """Every engine answers OpenAI's Chat Completions and Completions over HTTP, for agents and reward functions: see
    docs/http.md.

    null = true where agents are configured.
    """
    http_server_share: ShareAboveZero = 0.25
    """Share of `max_num_seqs`, at least one, that HTTP requests may have at once; more of them wait, and rollouts keep
    the rest.
    """
    http_server_serving_chat_kwargs: ServingChatConfig = field(default_factory=ServingChatConfig)
    tool_parser_plugin: str | None = None
    """A Python file or module that registers a parser of tool calls with vLLM."""
    reasoning_parser_plugin: str | None = None
    """A Python file or module that registers a parser of thoughts with vLLM."""

    @property
    def is_fp8(self) -> bool:
        """True when the engine rounds its matrices to FP8."""
        return self.precision == "fp8"

    @property
    def loaded_precision(self) -> Precision:
        """Type in which weights reach the engine, and in which it computes all that is not quantised."""
        return "bfloat16" if self.precision == "fp8" else self.precision

    @property
    def num_groups(self) -> int:
        """Groups of an engine's workers that sample rollouts of their own; known of sizes that do not fit, too."""
        return max(1, self.expert_parallel_size // self.tensor_parallel_size)

    @property
    def num_http_slots(self) -> int:
        """Answers to requests over HTTP that an engine samples at the same time."""
        return max(1, int(self.http_server_share * (self.max_num_seqs or 0))) * self.num_groups


@dataclass(frozen=True)
class EngineLimits:
    """Rollouts that an engine samples at once, and tokens of one of its steps."""

    num_seqs: int
    num_tokens: int


@dataclass
class GenerationConfig:
    backend: Literal["vllm"] = "vllm"
    """The generator."""
    max_new_tokens: Positive = 256
    """Longest rollout in tokens, the stop token included. `vllm_cfg.max_model_len` or more = the rest of the context
    after the prompt.
    """
    temperature: AboveZero = 1.0
    """Sampling temperature, above 0."""
    top_p: ShareAboveZero = 1.0
    """Sample among the likeliest tokens whose probabilities add up to this; 1.0 = all. The trainer's logprobs follow,
    but not the KL's.
    """
    top_k: Positive | None = None
    """Sample among the k likeliest tokens, before `top_p`; null = all. As for `top_p`, the trainer follows."""
    val_temperature: NotNegative = follows("policy.generation.temperature")
    """Sampling temperature of validation; 0 = the likeliest token."""
    val_top_p: ShareAboveZero = follows("policy.generation.top_p")
    """`top_p` of validation."""
    val_top_k: Positive | None = follows("policy.generation.top_k")
    """`top_k` of validation."""
    stop_token_ids: list[Count] | None = None
    """Tokens that end a rollout; null = the model's end-of-sequence tokens."""
    stop_strings: list[str] | None = None
    """Texts that end a rollout with the token that completes one; null = none."""
    compare_at_start: bool = True
    """Compare trainer and engine on a few tokens before the first step, and end the run if they compute different
    models.
    """
    num_cpu_engines: Positive = 1
    """Engines on hosts without GPUs, over all nodes. With GPUs it follows from the cluster and the engine's TP."""
    min_num_engines: Positive | None = None
    """Dedicated engines may go, with their node, and come back: the run goes on while so many serve, and waits up to
    `deadlines.start_s` for others with fewer. null = it waits for every engine. See docs/rollouts.md.
    """
    port_range_low: Port = 3000
    """The gateway listens at a free port from here to below `port_range_high`."""
    port_range_high: PortEnd = 4999
    """One past the last port of the gateway."""
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's EngineArgs by name, unless a key here or a refit decides them; `compilation_config`
    and `speculative_config` by their fields: see docs/speculation.md."""

    @property
    def speculative_method(self) -> str | None:
        """Returns the method that proposes tokens; None = none."""
        speculative = self.vllm_kwargs.get("speculative_config")
        return str(speculative.get("method") or "") if isinstance(speculative, dict) else None

    @property
    def num_proposed_tokens(self) -> int:
        """Tokens that are proposed at once; 0 = none."""
        speculative = self.vllm_kwargs.get("speculative_config")
        return int(speculative.get("num_speculative_tokens") or 0) if isinstance(speculative, dict) else 0

    @property
    def parallel(self) -> VllmParallel:
        """Returns the part of the model that each worker of an engine holds."""
        vllm = self.vllm_cfg
        has_drafter = self.speculative_method == "mtp"
        return VllmParallel(
            vllm.tensor_parallel_size, vllm.expert_parallel_size, has_drafter, vllm.pipeline_parallel_size
        )

    @property
    def num_workers(self) -> int:
        """Workers of an engine. Unlike `parallel`, known of sizes that do not fit each other, too."""
        return self.vllm_cfg.tensor_parallel_size * self.vllm_cfg.pipeline_parallel_size * self.vllm_cfg.num_groups
