# SPDX-License-Identifier: Apache-2.0
"""A whole step of mrl beside its parts alone, on the same cores, taking turns: docs/data/step.json.

Usage: python -m scripts.bench.step [--no-record] [--repeats 3] [--rollouts 64] [--tokens 64 256] [--only MODEL]

The parts: plain `vllm.LLM.generate` on the prompts of a step, with a seed for each rollout; bare Megatron's forward pass, for old logprobs,
and its forward, backward and optimizer step on rows of as many tokens; a copy of the weights. Their sum is the least that a step needs.
vLLM has no such experts on CPU hosts, so that there plain vLLM runs with mrl's (docs/cpu_hosts.md). Models have 20 to 30 million
parameters, so that arithmetic takes longer than what a request costs.
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
from scripts.bench.shapes import widen
from scripts.bench.trainer import bare_pass, bare_step, packed_rows
from scripts.bench.vs_trl import WARM_UP, mrl_steps, run
from tests.long.record import Row, record
from tests.stack.policy.policy_ranks import open_policy
from tests.stack.ranks import Rank, RankPool

GENERATIONS = 8
NUM_STEPS = WARM_UP + 3
TARGET = 0.9
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Case:
    """A model, and policy ranks beside one engine."""

    model: str
    num_ranks: int


CASES = (Case("nemotron_h", 1), Case("qwen3", 1), Case("nemotron_h", 4))


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a step."""

    generate: float
    logprobs: float
    train: float
    copy: float

    @property
    def total(self) -> float:
        return self.generate + self.logprobs + self.train + self.copy


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="leave docs/data as it is")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=64, help=f"rollouts of a step, {GENERATIONS} to a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256], help="new tokens of a rollout (default: %(default)s)")
    parser.add_argument("--only", help="measure this model alone")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "mrl.prepare", "tiny", folder=folder)
        for case in CASES:
            prepared = folder / case.model
            if not prepared.exists():
                widen(folder / "prepared" / "tiny", prepared, case.model)
            for new_tokens in options.tokens if options.only in (None, case.model) else ():
                rows.append(measure(prepared, case, new_tokens, num_prompts=options.rollouts // GENERATIONS, repeats=options.repeats))
                print(json.dumps(rows[-1]), flush=True)
    if not options.no_record:
        record("step", rows, command="python -m scripts.bench.step")


def measure(prepared: Path, case: Case, new_tokens: int, *, num_prompts: int, repeats: int) -> Row:
    """The row of a case: medians over turns of a run of mrl and the parts alone, each in processes of its own."""
    sizes = {"num_prompts_per_step": num_prompts, "num_generations_per_prompt": GENERATIONS}
    batch = [*(f"grpo.{key}={value}" for key, value in sizes.items()), f"policy.train_global_batch_size={num_prompts * GENERATIONS}"]
    parts, steps = list[Parts](), list[float]()
    for _ in range(repeats):
        steps.append(statistics.median(mrl_steps(prepared, case.num_ranks, new_tokens, NUM_STEPS, *batch)))
        parts.append(measure_parts(config_of(prepared, case.num_ranks, new_tokens, batch), case.num_ranks))
    shares = [part.total / step for part, step in zip(parts, steps, strict=True)]
    medians = {f"{name} s": round(statistics.median(getattr(part, name) for part in parts), 2) for name in Parts.__dataclass_fields__}
    return {
        "model": case.model,
        "policy ranks": case.num_ranks,
        "rollouts": num_prompts * GENERATIONS,
        "new tokens": new_tokens,
        "mrl s": round(statistics.median(steps), 2),
        **medians,
        "share of mrl's step": round(statistics.median(shares), 2),
        "at least": TARGET,
        "lowest to highest": f"{min(shares):.2f} to {max(shares):.2f}",
        "repeats": repeats,
    }


def config_of(prepared: Path, num_ranks: int, new_tokens: int, batch: list[str]) -> RunConfig:
    """The config of the run that `mrl_steps` starts, as far as the parts depend on it."""
    one = "tensor_model_parallel_size=1 expert_model_parallel_size=1 sequence_parallel=false".split()
    words = [f"policy.model_name={prepared / 'model'}", f"policy.generation.max_new_tokens={new_tokens}", *batch]
    words += [
        f"data.{name}.data_path={prepared / 'data' / file}.jsonl" for name, file in (("train", "train"), ("validation", "validation"))
    ]
    words += [f"cluster.cpu_units_per_node={num_ranks}", *(f"policy.megatron_cfg.{size}" for size in one if num_ranks == 1)]
    return load_config("grpo_tiny.yaml", words)


def measure_parts(config: RunConfig, num_ranks: int) -> Parts:
    """Seconds of each part, after one pass that warms up."""
    data = load_prompts(config)
    prompts = [list(data.train[index].token_ids) for index in range(config.grpo.num_prompts_per_step) for _ in range(GENERATIONS)]
    generate = in_process(plain_vllm, config, prompts)
    pool = RankPool(num_ranks)
    try:
        measured = pool.run(bare_megatron, config, prompts, world_size=num_ranks, timeout_s=TIMEOUT_S)
    finally:
        pool.close()
    logprobs, train, copy = (max(times) for times in zip(*measured, strict=True))
    return Parts(generate, logprobs, train, copy)


def in_process(function: Callable[[Connection, RunConfig, list[list[int]]], None], *arguments: object) -> float:
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


def plain_vllm(connection: Connection, config: RunConfig, prompts: list[list[int]]) -> None:
    """Sends the seconds of all rollouts by `vllm.LLM.generate`."""
    from mrl.rollout.environment import engine_environment

    os.environ |= engine_environment(has_gpu=False)
    from vllm import LLM, SamplingParams, TokensPrompt

    generation, limits = config.policy.generation, config.engine_limits
    if sizes_of(read_hf_config(Path(config.policy.model_name), {})).experts:
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
        SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, seed=index, detokenize=False) for index in range(len(requests))
    ]
    seconds = [seconds_of(lambda: llm.generate(requests, sampling, use_tqdm=False)) for _ in range(2)]
    connection.send(seconds[-1])


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
        for part in parts:
            part()
        logprobs, train, copy = map(together, parts)
        return logprobs, train, copy


def together(part: Callable[[], object]) -> float:
    """Seconds of a part on all ranks."""
    torch.distributed.barrier()

    def until_all_are_there() -> None:
        part()
        torch.distributed.barrier()

    return seconds_of(until_all_are_there)


def seconds_of(part: Callable[[], object]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
