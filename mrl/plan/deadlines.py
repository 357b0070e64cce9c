# SPDX-License-Identifier: Apache-2.0
"""Time limits of start, train step and checkpoint: values of section `deadlines`, else by bytes, tokens, nodes, GPUs.

Imports neither Ray nor torch, as `--check` prints them. Rates are pessimistic: a deadline is for hangs, not for slow
work.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.hf_folder import weight_files
from mrl.config.model import read_model
from mrl.config.rules.checks import checkpoint_bytes
from mrl.config.schema.run import RunConfig
from mrl.config.texts import counted, spell_bytes
from mrl.data.planning import sequence_cost
from mrl.phases import ModelName

# Starting Ray, importing vLLM and Megatron, and making process groups on a busy host.
PROCESSES_S = 300.0
# With empty caches vLLM, Triton and FlashInfer compile kernels of a GPU, and CUDA graphs are captured.
KERNELS_S = 300.0
# A busy host, the first kernels of a step; a file system that stalls.
BUSY_S = 600.0
# One node's share of a file system that all nodes read at once: 1.6 GB/s over 32 nodes.
READ_BYTES_PER_S = 50e6
# The rate of one node alone, and of all together.
NODE_BYTES_PER_S, SHARED_BYTES_PER_S = 200e6, 1.6e9
# A tenth of an A100's peak in bfloat16 and in float32, and a core of a laptop.
GPU_FLOPS = {"bfloat16": 30e12, "float32": 2e12}
CPU_FLOPS = 1e9
# Forward passes in a train step: a backward pass counts as two, and recomputation as one.
TRAIN_PASSES = 4
# bfloat16, in which large models are published.
BYTES_PER_PARAMETER = 2
# A tiny model's weights are read in less.
LEAST_TOLD_S = 0.5


@dataclass(frozen=True)
class Deadline:
    """A deadline in seconds, and its breakdown."""

    what: str
    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"{self.what} deadline {self.seconds:,.0f} s: {self.reason}"


def all_deadlines(config: RunConfig, *, trains: bool = True) -> list[Deadline]:
    """Lists the deadlines that follow the size of the run, for display; an evaluation has only the first."""
    training = [train_deadline(config), checkpoint_deadline(config)] if trains else []
    return [start_deadline(config), *training]


def start_deadline(config: RunConfig) -> Deadline:
    """Deadline of each start wait, for slots, engines, policy ranks and rewards: deadlines.start_s, or by weight size.

    Policy ranks load their models one after another, each within this deadline.
    """
    parts = {f"{PROCESSES_S:g} s for processes": PROCESSES_S}
    if config.cluster.gpus_per_node:
        parts[f"{KERNELS_S:g} s for kernels of GPUs"] = KERNELS_S
    sizes = {section.model_name: weight_bytes(Path(section.model_name)) for section in config.sections.values()}
    num_bytes = max((size for size in sizes.values() if size is not None), default=None)
    if num_bytes is not None:
        read_s = num_bytes / READ_BYTES_PER_S
        what = "of weights" if len(sizes) == 1 else "of weights of the largest model"
        parts[f"{read_s:,.0f} s for {spell_bytes(num_bytes)} {what} at {READ_BYTES_PER_S / 1e6:g} MB/s"] = read_s
    missing = [name for name, size in sizes.items() if size is None]
    rest = f"; the time to read the weights of {' and '.join(missing)} is added once they are here" if missing else ""
    return _deadline("start", config.deadlines.start_s, parts, rest)


def describe_engine_start(config: RunConfig, num_seqs: int) -> str:
    """Describes the longest part of starting engines that sample `num_seqs` rollouts at once; "" without GPU or engine.

    vLLM captures graphs for 1, 2, 4, each 8 up to 256 and each 16 up to twice that number, 512 at most, and a few more
    with speculation or on Blackwell (`_set_cudagraph_sizes` of vllm/config/vllm.py). A first start on an H100 took over
    60 s for a tiny model.
    """
    vllm = config.policy.generation.vllm_cfg
    if not (config.has_engines and config.cluster.gpus_per_node):
        return ""
    if vllm.enforce_eager:
        return "Engines start without CUDA graphs (vllm_cfg.enforce_eager)"
    compilation = config.policy.generation.vllm_kwargs.get("compilation_config") or {}
    given = compilation.get("cudagraph_capture_sizes") if isinstance(compilation, dict) else None
    most = min(512, 2 * num_seqs)
    sizes = given or [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]
    return (
        f"Engines compile the model and capture CUDA graphs of about {len(sizes)} batch sizes: minutes at the "
        "first start, less later, as compiled code is kept (no start is measured to its end yet)"
    )


def train_deadline(config: RunConfig) -> Deadline:
    """Deadline of each logprob pass, train step and phase switch: deadlines.train_s, or by the longest's operations."""
    return max((_train_deadline(config, model) for model in config.models), key=lambda found: found.seconds)


def _train_deadline(config: RunConfig, model: ModelName) -> Deadline:
    policy, parts = config.model(model), {f"{BUSY_S:g} s for a busy host": BUSY_S}
    num_sequences = TRAIN_PASSES * policy.train_global_batch_size * (2 if config.learns_pairs else 1)
    if config.has_engines:
        num_sequences = max(num_sequences, config.rollouts.num_rollouts_per_step)
    # A refused layout may have no ranks.
    length, ranks, rest = policy.max_total_sequence_length, max(config.num_ranks_of(model), 1), ""
    flops, rate = CPU_FLOPS, f"{CPU_FLOPS / 1e9:g} GFLOPS"
    if config.cluster.gpus_per_node:
        flops = GPU_FLOPS[policy.precision]
        rate = f"{flops / 1e12:g} TFLOPS"
    try:
        read_model(Path(policy.model_name))
        cost = sequence_cost(policy.model_name, config.mtp_steps_of(model))
        compute_s = num_sequences * (cost.of(length) + cost.scan_per_token * length) / (ranks * flops)
        parts[
            f"{compute_s:,.0f} s for {num_sequences:,} forward passes of {length:,} tokens on "
            f"{counted(ranks, 'rank')} at {rate}"
        ] = compute_s
    except ValueError:
        rest = f"; the time to compute is added once {policy.model_name} is here"
    return _deadline("train", config.deadlines.train_s, parts, rest)


def checkpoint_deadline(config: RunConfig) -> Deadline:
    """Deadline to save, check and load a checkpoint: deadlines.checkpoint_s, or by its bytes and the sharing nodes."""
    parts, missing = {f"{BUSY_S:g} s for a busy file system": BUSY_S}, list[str]()
    rate = min(config.cluster.num_nodes * NODE_BYTES_PER_S, SHARED_BYTES_PER_S)
    num_parameters: dict[ModelName, int] = {}
    for model in config.trained_models:
        name = config.sections[model].model_name
        try:
            num_parameters[model] = read_model(Path(name)).num_parameters
        except ValueError:
            missing.append(name)
    if num_bytes := sum(checkpoint_bytes(config, num_parameters).values()):
        parts[f"{num_bytes / rate:,.0f} s for {spell_bytes(num_bytes)} at {rate / 1e9:g} GB/s"] = num_bytes / rate
    rest = f"; the time to write is added once {' and '.join(missing)} is here" if missing else ""
    return _deadline("checkpoint", config.deadlines.checkpoint_s, parts, rest)


def weight_bytes(folder: Path) -> int | None:
    """Bytes of a Hugging Face folder's safetensors files; by its config.json if none; None without a config.json."""
    with suppress(ValueError, OSError):
        return sum(path.stat().st_size for path in weight_files(folder))
    with suppress(ValueError):
        return BYTES_PER_PARAMETER * read_model(folder).num_parameters
    return None


def _deadline(what: str, given: float | None, parts: Mapping[str, float], rest: str) -> Deadline:
    if given is not None:
        return Deadline(what, given, f"deadlines.{what}_s")
    told = " + ".join(text for text, seconds in parts.items() if seconds >= LEAST_TOLD_S)
    return Deadline(what, sum(parts.values()), told + rest)
