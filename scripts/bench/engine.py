# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of mrl's engine and plain `vllm.LLM.generate`, on equal requests in turns: docs/data/engine.json.

Usage: python -m scripts.bench.engine [--no-record] [--repeats 5]

512 requests of 20 prompt tokens; each gets a seed of its own and the logprobs of its tokens. Both engines have one core
and the same limits. On hosts without GPUs mrl replaces some of vLLM's kernels (docs/cpu_hosts.md); plain vLLM has its
own.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from scripts.bench.turns import bench_parser, lowest_to_highest, median, report, take_turns
from tests.long.record import Row

NUM_REQUESTS, PROMPT_LENGTH = 512, 20
NEW_TOKENS = (3, 64)
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 256, 8192
KV_CACHE_MIB = 256
TARGET = 0.9
TIMEOUT_S = 600.0


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    options = bench_parser(__doc__, repeats=5).parse_args()
    report(
        "engine",
        (row for model_type in ("qwen3", "qwen3_moe") for row in measure(model_type, options.repeats)),
        options,
    )


def measure(model_type: str, repeats: int) -> Iterator[Row]:
    """A row for each number of new tokens."""
    from tests.models import save_model

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), model_type)
        connections = {}
        for kind in (plain, ours):
            connections[kind], theirs = context.Pipe()
            context.Process(target=kind, args=(folder, theirs), daemon=True).start()
        for new_tokens in NEW_TOKENS:
            found = take_turns(
                {kind: partial(speed, connection, new_tokens) for kind, connection in connections.items()}, repeats
            )
            ratios = [mine / theirs for mine, theirs in zip(found[ours], found[plain], strict=True)]
            yield {
                "model": model_type,
                "new tokens": new_tokens,
                "mrl tokens/s": round(median(found[ours])),
                "vLLM tokens/s": round(median(found[plain])),
                "mrl / vLLM": median(ratios),
                "at least": TARGET,
                "lowest to highest": lowest_to_highest(ratios),
                "repeats": repeats,
            }
        for connection in connections.values():
            connection.send(None)


def speed(connection: Connection, new_tokens: int) -> float:
    """New tokens per second of an engine's process."""
    connection.send(new_tokens)
    assert connection.poll(TIMEOUT_S), f"an engine gave no answer in {TIMEOUT_S:g} s"
    return NUM_REQUESTS * new_tokens / connection.recv()


def prompts() -> list[list[int]]:
    """The token ids of every request; runs of bytes, as the tiny models know them."""
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_REQUESTS)]


def ours(model: str, connection: Connection) -> None:
    """Answers a number of new tokens with the seconds of all requests in mrl's engine, until it gets None."""
    from mrl.rollout.environment import engine_environment

    os.environ |= engine_environment(has_gpu=False)
    from mrl.config.schema.generation import GenerationConfig, VllmConfig
    from mrl.rollout.engine import Engine
    from tests.rollouts import request, run

    settings = VllmConfig(
        precision="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        kv_cache_memory_mib=KV_CACHE_MIB,
    )
    engine = Engine(
        model, GenerationConfig(max_new_tokens=max(NEW_TOKENS), vllm_cfg=settings), seed=1, worker_timeout_s=TIMEOUT_S
    )
    engine.set_weight_version(0)
    tokens = prompts()
    while connection.poll(TIMEOUT_S) and (new_tokens := connection.recv()):
        requests = [
            request(token_ids, prompt_id=f"p{index}", max_new_tokens=new_tokens)
            for index, token_ids in enumerate(tokens)
        ]
        started = time.perf_counter()
        rollouts = run(engine, requests)
        connection.send(time.perf_counter() - started)
        assert sum(len(rollout.token_ids) for rollout in rollouts.values()) == NUM_REQUESTS * new_tokens


def plain(model: str, connection: Connection) -> None:
    """The same with `vllm.LLM.generate`."""
    from mrl.rollout.environment import engine_environment

    os.environ |= engine_environment(has_gpu=False)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=KV_CACHE_MIB << 20,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    tokens = prompts()
    while connection.poll(TIMEOUT_S) and (new_tokens := connection.recv()):
        requests = [TokensPrompt(prompt_token_ids=token_ids) for token_ids in tokens]
        sampling = [
            SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, seed=index, detokenize=False)
            for index in range(len(tokens))
        ]
        started = time.perf_counter()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        connection.send(time.perf_counter() - started)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == NUM_REQUESTS * new_tokens


if __name__ == "__main__":
    main()
