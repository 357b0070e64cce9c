# SPDX-License-Identifier: Apache-2.0
"""A whole step of mrl beside its parts alone, on the same core, one after the other: docs/data/step.json.

Usage: python -m scripts.bench.step [--no-record] [--repeats 1] [--only MODEL]

The parts: plain `vllm.LLM.generate` on the prompts of a step, with a seed for each rollout; bare Megatron's forward
pass, for old logprobs, and its forward, backward and optimizer step on rows of as many tokens; a copy of the weights.
Their sum is the least that a step needs. Every process has one thread, as in a run on a CPU host; plain vLLM has the
kernels of CPU hosts (docs/cpu_hosts.md), without which vLLM has no such experts there, and a dense model's are
measured, too. Models have 20 to 30 million parameters, so that arithmetic takes longer than what a request costs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from mrl.config.load import load_config
from mrl.config.model import read_hf_config, sizes_of
from mrl.config.schema.run import RunConfig
from mrl.data.prompts import load_prompts
from scripts.bench.bare_megatron import bare_pass, bare_step, packed_rows
from scripts.bench.shapes import widen
from scripts.bench.vs_trl import WARM_UP, mrl_steps, run
from tests.long.record import Row, record
from tests.stack.policy.policy_ranks import open_policy
from tests.stack.ranks import Rank, RankPool

GENERATIONS, REPEATS = 8, 3
TARGET = 0.9
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Case:
    """A model, policy ranks beside one engine, new tokens of a rollout, and prompts of a step."""

    model: str
    num_ranks: int
    new_tokens: int
    num_prompts: int

    @property
    def batch(self) -> list[str]:
        """The step's size, as overrides."""
        words = [f"grpo.num_prompts_per_step={self.num_prompts}", f"grpo.num_generations_per_prompt={GENERATIONS}"]
        return [*words, f"policy.train_global_batch_size={self.num_prompts * GENERATIONS}"]


# Steps of about 10 s on one core.
CASES = (
    *(
        Case(model, 1, new_tokens, num_prompts)
        for model in ("nemotron_h", "qwen3")
        for new_tokens, num_prompts in ((64, 4), (256, 2))
    ),
    Case("nemotron_h", 4, 64, 4),
)


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a step, by the median of `REPEATS` measurements."""

    generate: float
    logprobs: float
    train: float
    copy: float
    packed: float | None
    """Generation by the kernels of vLLM itself, for which it packs the weights; None of experts."""

    @property
    def total(self) -> float:
        return self.generate + self.logprobs + self.train + self.copy


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="leave docs/data as it is")
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of mrl and turns of the parts (default: %(default)s)"
    )
    parser.add_argument("--only", help="measure this model alone")
    options = parser.parse_args()
    # Of the parts' processes, too: torch reads it when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "mrl.prepare", "tiny", folder=folder)
        for case in (case for case in CASES if options.only in (None, case.model)):
            prepared = folder / case.model
            if not prepared.exists():
                widen(folder / "prepared" / "tiny", prepared, case.model)
            rows.append(measure(prepared, case, options.repeats))
            print(json.dumps(rows[-1]), flush=True)
    if not options.no_record:
        record("step", rows, command="python -m scripts.bench.step")


def measure(prepared: Path, case: Case, repeats: int) -> Row:
    """The row of a case: medians over turns of a run of mrl and the parts alone, each in processes of its own."""
    parts, steps, shares = list[Parts](), list[float](), list[float]()
    for _ in range(repeats):
        times = mrl_steps(prepared, case.num_ranks, case.new_tokens, WARM_UP + REPEATS, *case.batch)
        parts.append(measure_parts(config_of(prepared, case), case.num_ranks))
        steps += times
        shares += [parts[-1].total / seconds for seconds in times]
    medians = {
        name: [value for part in parts if (value := getattr(part, name)) is not None]
        for name in Parts.__dataclass_fields__
    }
    return {
        "model": case.model,
        "policy ranks": case.num_ranks,
        "rollouts": case.num_prompts * GENERATIONS,
        "new tokens": case.new_tokens,
        "mrl s": round(statistics.median(steps), 2),
        **{f"{name} s": round(statistics.median(times), 2) if times else None for name, times in medians.items()},
        "share of mrl's step": round(statistics.median(shares), 2),
        "at least": TARGET,
        "lowest to highest": f"{min(shares):.2f} to {max(shares):.2f}",
        "steps": len(steps),
    }


def config_of(prepared: Path, case: Case) -> RunConfig:
    """The config of the run that `mrl_steps` starts, as far as the parts depend on it."""
    one = "tensor_model_parallel_size=1 expert_model_parallel_size=1 sequence_parallel=false".split()
    words = [
        f"policy.model_name={prepared / 'model'}",
        f"policy.generation.max_new_tokens={case.new_tokens}",
        *case.batch,
    ]
    words += [
        f"data.{name}.data_path={prepared / 'data' / file}.jsonl"
        for name, file in (("train", "train"), ("validation", "validation"))
    ]
    words += [
        f"cluster.cpu_units_per_node={case.num_ranks}",
        *(f"policy.megatron_cfg.{size}" for size in one if case.num_ranks == 1),
    ]
    return load_config("grpo_tiny.yaml", words)


def measure_parts(config: RunConfig, num_ranks: int) -> Parts:
    """Seconds of each part, after one that warms up."""
    data = load_prompts(config)
    prompts = [
        list(data.train[index].token_ids)
        for index in range(config.grpo.num_prompts_per_step)
        for _ in range(GENERATIONS)
    ]
    has_experts = bool(sizes_of(read_hf_config(Path(config.policy.model_name), {})).experts)
    generate = in_process(plain_vllm, config, prompts, True)
    packed = None if has_experts else in_process(plain_vllm, config, prompts, False)
    pool = RankPool(num_ranks)
    try:
        measured = pool.run(bare_megatron, config, prompts, world_size=num_ranks, timeout_s=TIMEOUT_S)
    finally:
        pool.close()
    logprobs, train, copy = (max(times) for times in zip(*measured, strict=True))
    return Parts(generate, logprobs, train, copy, packed)


def in_process(function: Callable[[Connection, RunConfig, list[list[int]], bool], None], *arguments: object) -> float:
    """The number that a function sends from a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    if not ours.poll(TIMEOUT_S):
        process.kill()
        raise RuntimeError(f"{function.__name__}: no answer in {TIMEOUT_S:g} s")
    seconds = ours.recv()
    process.join(TIMEOUT_S)
    return seconds


def plain_vllm(connection: Connection, config: RunConfig, prompts: list[list[int]], replaces_kernels: bool) -> None:
    """Sends the seconds of all rollouts by `vllm.LLM.generate`, with the kernels of mrl's CPU hosts or vLLM's own."""
    from mrl.rollout.environment import engine_environment

    os.environ |= engine_environment(has_gpu=False)
    from vllm import LLM, SamplingParams, TokensPrompt

    generation, limits = config.policy.generation, config.engine_limits
    if replaces_kernels:
        from mrl.rollout import cpu

        cpu.install()
    llm = LLM(
        config.policy.model_name,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=generation.vllm_cfg.kv_cache_memory_mib << 20,
        max_model_len=generation.vllm_cfg.max_model_len,
        max_num_seqs=limits.num_seqs,
        max_num_batched_tokens=limits.num_tokens,
    )
    requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    length = generation.max_new_tokens
    sampling = [
        SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, seed=index, detokenize=False)
        for index in range(len(requests))
    ]
    connection.send(typical(lambda: llm.generate(requests, sampling, use_tqdm=False)))


def bare_megatron(rank: Rank, config: RunConfig, prompts: list[list[int]]) -> tuple[float, float, float]:
    """Seconds of a rank's forward passes, its train step, and a copy of its weights."""
    megatron = config.policy.megatron_cfg
    with open_policy(rank, config) as policy:
        num_parts = config.num_policy_ranks // megatron.model_parallel_size
        row_tokens = config.policy.sequence_packing.train_mb_tokens
        new_tokens = config.policy.generation.max_new_tokens
        rows = packed_rows(config, prompts, new_tokens, policy.dp_rank, row_tokens=row_tokens, num_parts=num_parts)
        policy.enter("train")
        weights = policy.settled_weights()

        def score() -> None:
            with torch.no_grad():
                bare_pass(policy, rows, forward_only=True)

        parts = (score, lambda: bare_step(policy, rows), lambda: [weight.clone() for weight in weights.values()])
        logprobs, train, copy = (typical(part, torch.distributed.barrier) for part in parts)
        return logprobs, train, copy


def typical(part: Callable[[], object], meet: Callable[[], object] = int) -> float:
    """The median of the seconds of some calls, after one that warms up. Ranks `meet` before and after each."""
    seconds = list[float]()
    for _ in range(1 + REPEATS):
        meet()
        started = time.perf_counter()
        part()
        meet()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
