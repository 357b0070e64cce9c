"""Groups of keys that go to a library by its own names: which names it knows, which values, and which of them are not the user's to set."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal

from mrl.config.partial import NotKnown
from mrl.config.rules.ranges import spell
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import REDACTED
from mrl.env import SECRET_NAME

Library = Literal["EngineArgs", "CompilationConfig", "TransformerConfig", "tool_parser", "reasoning_parser"]

_ENGINE = "policy.generation.vllm_cfg"
KEYS_OF_ENGINE_ARGUMENTS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "seed": "grpo.seed",
    "dtype": f"{_ENGINE}.precision",
    "enable_expert_parallel": f"{_ENGINE}.expert_parallel_size",
    **{
        name: f"{_ENGINE}.{name}"
        for name in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
            "load_format",
            "kv_cache_dtype",
            "logprobs_mode",
            "enable_prefix_caching",
        )
    },
    "enable_return_routed_experts": "policy.router_replay.enabled",
}
"""Engine arguments that follow from keys of ours."""

_ORDER = "with anything but mrl's choice vLLM keeps experts in another order than the checkpoint, where no refit finds them"
_WEIGHTS = "refits write the weights as the checkpoint has them, where the checkpoint has them"
_PLACES = "mrl places engines and their workers itself"
_STEPS = "refits and aborts come between two steps of the engine, which mrl drives"
_TOKENS = "prompts and rollouts are tokens; the engine sees no text and starts no server"
LAYOUT_ARGUMENTS: Mapping[str, object] = {"moe_backend": "triton", "expert_placement_strategy": "linear", "enable_eplb": False}
"""Engine arguments on GPUs under which experts lie as in the checkpoint: other kernels reorder, pad or shuffle them at load time, other
placements give a worker other experts, EPLB during the run. A config may repeat them."""

FIXED_ENGINE_ARGUMENTS = {
    **dict.fromkeys((*LAYOUT_ARGUMENTS, "eplb_config"), _ORDER),
    **dict.fromkeys(
        (
            "quantization",
            "quantization_config",
            "cpu_offload_gb",
            "cpu_offload_params",
            "offload_backend",
            "offload_group_size",
            "offload_num_in_group",
            "offload_params",
            "offload_prefetch_step",
            "enable_lora",
            "hf_overrides",
            "model_class_overrides",
            "model_impl",
            "model_weights",
            "weight_transfer_config",
            "enable_sleep_mode",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(
        (
            "device_ids",
            "distributed_executor_backend",
            "worker_cls",
            "worker_extension_cls",
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
            "data_parallel_size",
            "data_parallel_backend",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        _PLACES,
    ),
    **dict.fromkeys(("async_scheduling", "scheduler_cls", "disable_log_stats"), _STEPS),
    **dict.fromkeys(("skip_tokenizer_init", "generation_config", "reasoning_parser", "reasoning_parser_plugin", "runner"), _TOKENS),
}
"""Engine arguments with one value that works, and why."""

OVERRIDABLE = frozenset(
    {
        "barrier_with_L1_time",
        "batch_invariant_mode",
        "clone_scatter_output_in_embedding",
        "config_logger_dir",
        "cp_comm_type",
        "deallocate_pipeline_outputs",
        "defer_embedding_wgrad_compute",
        "delay_wgrad_compute",
        "deterministic_mode",
        "disable_bf16_reduced_precision_matmul",
        "disable_parameter_transpose_cache",
        "distribute_saved_activations",
        "fused_single_qkv_rope",
        "memory_efficient_layer_norm",
        "microbatch_group_size_per_vp_stage",
        "moe_deepep_num_sms",
        "moe_router_fusion",
        "overlap_p2p_comm_warmup_flush",
        "symmetric_ar_type",
        "tp_comm_bootstrap_backend",
        "tp_comm_overlap",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "use_te_rng_tracker",
        "wgrad_deferral_limit",
    }
)
"""Fields of Megatron's TransformerConfig that say how something is computed. All others say what: the model, or a key of ours, decides."""

RESERVED_VARIABLES = re.compile(
    "RAY_.*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|WORLD_SIZE|PYTHONPATH"
    "|VLLM_ENABLE_V1_MULTIPROCESSING|VLLM_CPU_ATTN_SPLIT_KV"
)
"""Environment variables that say where a process is, and those without which it does something else."""

_SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "mapping", list: "list", type(None): "null"}


def find_passthrough_problems(config: RunConfig) -> list[str]:
    """A problem for every argument that the library does not know, that cannot have its value, or that is not for the user to set."""
    policy = config.policy
    variables = {"policy.megatron_cfg.env_vars": policy.megatron_cfg.env_vars, f"{_ENGINE}.env_vars": policy.generation.vllm_cfg.env_vars}
    return [
        *_vllm_kwargs(policy, is_cpu=config.cluster.gpus_per_node == 0),
        *_model_overrides(policy.megatron_cfg),
        *(problem for prefix, given in variables.items() for problem in _variables(prefix, given or {})),
        *_remote_code("", config),
    ]


@functools.cache
def arguments_of(library: Library) -> dict[str, list[str]]:
    """By argument: the kinds of values that it takes, as scripts/library_fields.py found them in the library. Of parsers, their names."""
    content = json.loads(Path(__file__).with_name("library_fields.json").read_text(encoding="utf-8"))
    return content[library]["fields"]


def _vllm_kwargs(policy: PolicyConfig, *, is_cpu: bool) -> list[str]:
    prefix, given = "policy.generation.vllm_kwargs", policy.generation.vllm_kwargs
    problems = []
    for name, value in given.items():
        instead = KEYS_OF_ENGINE_ARGUMENTS.get(name)
        if is_cpu and name == "kv_cache_memory_bytes":
            instead = f"{_ENGINE}.kv_cache_memory_mib"
        if instead is not None:
            problems.append(f"{prefix}.{_setting(name, value)}: mrl sets it from {instead}; set that")
        elif name in LAYOUT_ARGUMENTS and value == LAYOUT_ARGUMENTS[name] and type(value) is type(LAYOUT_ARGUMENTS[name]):
            continue
        elif name in FIXED_ENGINE_ARGUMENTS:
            problems.append(f"{prefix}.{_setting(name, value)}: {FIXED_ENGINE_ARGUMENTS[name]}; remove the key")
        else:
            problems += _value("EngineArgs", prefix, name, value)
    compilation = given.get("compilation_config")
    if isinstance(compilation, Mapping):
        for name, value in compilation.items():
            problems += _value("CompilationConfig", f"{prefix}.compilation_config", str(name), value)
    return problems


def _model_overrides(megatron: MegatronConfig) -> list[str]:
    prefix, problems = "policy.megatron_cfg.model_overrides", []
    own = MegatronConfig.__dataclass_fields__
    for name, value in megatron.model_overrides.items():
        if name in own:
            problems.append(f"{prefix}.{_setting(name, value)}: it is a key of its own; set policy.megatron_cfg.{name}")
        elif name in arguments_of("TransformerConfig") and name not in OVERRIDABLE:
            rule = "it says what is computed, and trainer and engines take that from the model's config.json and the keys of policy"
            problems.append(f"{prefix}.{_setting(name, value)}: {rule}; remove it (overridable are {', '.join(sorted(OVERRIDABLE))})")
        else:
            problems += _value("TransformerConfig", prefix, name, value)
    return problems


def _variables(prefix: str, given: Mapping[str, str]) -> list[str]:
    problems = []
    for name in given:  # without values, which may be secrets
        if RESERVED_VARIABLES.fullmatch(name):
            problems.append(f"{prefix}.{name}: mrl sets this variable itself; remove it")
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problems.append(f"{prefix}.{name}: not a name of an environment variable; correct it")
    return problems


def _remote_code(key: str, value: object) -> Iterator[str]:
    """A problem wherever a key would let a library run Python files of a model's folder, in whatever group or depth."""
    if is_dataclass(value) and not isinstance(value, type):
        inner: dict[object, object] = {}
        for section in fields(value):
            with suppress(NotKnown):  # of which there is a problem already
                inner[section.name] = getattr(value, section.name)
    elif isinstance(value, Mapping):
        inner = dict(value)
    else:
        inner = dict(enumerate(value)) if isinstance(value, list) else {}
    for name, setting in inner.items():
        dotted = f"{key}.{name}".lstrip(".")
        if str(name).replace("-", "_") == "trust_remote_code" and setting not in (None, False):
            rule = "mrl runs no Python files of a model's folder; transformers and vLLM have all model types that it trains"
            yield f"{dotted}={spell(setting)}: {rule}; remove the key"
        yield from _remote_code(dotted, setting)


def _value(library: Library, prefix: str, name: str, value: object) -> list[str]:
    known = arguments_of(library)
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        return [f"{prefix}.{_setting(name, value)}: no argument of {_described(library)}; the nearest is {nearest}"]
    if any(_fits(value, kind) for kind in known[name]):
        return []
    kinds = [kind.removeprefix("=") for kind in known[name]]
    return [f"{prefix}.{_setting(name, value)}: not a value of {_described(library)}'s argument; use {' or '.join(kinds)}"]


def _setting(name: str, value: object) -> str:
    return f"{name}={REDACTED if SECRET_NAME.search(name) else spell(value)}"


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("="):
        return isinstance(value, str | int) and str(value) == kind[1:]
    return _SCALARS.get(type(value)) == kind or (kind == "number" and type(value) is int)


def _described(library: Library) -> str:
    described = {
        "EngineArgs": "vLLM's engine",
        "CompilationConfig": "vLLM's compilation",
        "TransformerConfig": "Megatron's TransformerConfig",
    }
    return described[library]
