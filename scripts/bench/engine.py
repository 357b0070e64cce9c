# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of mrl's engine and plain `vllm.LLM.generate`, on equal requests in turns: docs/data/engine.json.

Usage: python -m scripts.bench.engine [--no-record] [--repeats 5] [--small-cache]

512 requests of 20 prompt tokens; each gets a seed of its own and the logprobs of its tokens. Both engines have one core
and the same limits. On hosts without GPUs mrl replaces some of vLLM's kernels (docs/cpu_hosts.md); plain vLLM has its
own.

With --small-cache it prints what `adaptive_concurrency` changes where the cache has room for a part of the rollouts,
and records nothing: passes and tokens computed again, which do not depend on the host, and processor seconds.
"""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from scripts.bench.turns import alone, bench_parser, lowest_to_highest, median, report, take_turns
from tests.long.record import Row

NUM_REQUESTS, PROMPT_LENGTH = 512, 20
NEW_TOKENS = (3, 64)
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 256, 8192
KV_CACHE_MIB = 256
TARGET = 0.9
TIMEOUT_S = 600.0


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    parser = bench_parser(__doc__, repeats=5)
    parser.add_argument("--small-cache", action="store_true", help="measure adaptive_concurrency instead")
    options = parser.parse_args()
    if options.small_cache:
        options.no_record = True
        report("small_cache", (row for lengths in ("long tail", "equal") for row in small_cache(lengths)), options)
        return
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


# A step of rollouts, some 3 times the tokens of the cache.
NUM_STEPS, NUM_ROLLOUTS, LONGEST = 5, 256, 1200
NUM_BLOCKS, BLOCK_SIZE = 300, 32


def small_cache(lengths: str) -> Iterator[Row]:
    """A row without `adaptive_concurrency`, and one with it. Later steps are all but the first, which it learns from.

    A long tail is that of scripts.bench.oversample: 97 % of the rollouts are below half of the longest.
    """
    rng = random.Random(0)

    def length() -> int:
        tail = LONGEST * min(1.0, 0.5 * math.exp(rng.gauss(0.0, 1.0) - 1.8808))
        return max(1, round(tail)) if lengths == "long tail" else LONGEST // 4

    steps = [[length() for _ in range(NUM_ROLLOUTS)] for _ in range(NUM_STEPS)]
    found = {is_on: alone(run_in_small_cache, steps, is_on) for is_on in (False, True)}
    assert found[False][1] == found[True][1], "other tokens"
    free = [sum(column) for column in zip(*found[False][0][1:], strict=True)]
    for is_on, (counts, _) in found.items():
        passes, drawn, recomputed, seconds = (sum(column) for column in zip(*counts[1:], strict=True))
        yield {
            "lengths": lengths,
            "adaptive_concurrency": is_on,
            "passes": passes,
            "of those without": round(passes / free[0], 3),
            "computed again": round(recomputed / drawn, 4),
            "of these in the first step": round(counts[0][2] / counts[0][1], 4),
            "processor s": round(seconds, 1),
            "of that without": round(seconds / free[3], 2),
        }


def run_in_small_cache(
    steps: list[list[int]], adaptive_concurrency: bool
) -> tuple[list[tuple[int, int, int, float]], str]:
    """Passes, tokens drawn and computed again, and processor seconds of each step; checksum of all tokens."""
    from mrl.rollout.environment import engine_environment

    os.environ |= engine_environment(has_gpu=False)
    from mrl.config.schema.generation import GenerationConfig, VllmConfig
    from mrl.rollout.engine import Engine
    from tests.models import save_model
    from tests.rollouts import request, run

    settings = VllmConfig(
        precision="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=LONGEST + BLOCK_SIZE,
        max_num_seqs=NUM_ROLLOUTS,
        max_num_batched_tokens=4096,
        adaptive_concurrency=adaptive_concurrency,
    )
    cache = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS}
    rng, counts, tokens = random.Random(1), list[tuple[int, int, int, float]](), hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_model(Path(folder), "qwen3", max_position_embeddings=2 * LONGEST))
        generation = GenerationConfig(max_new_tokens=LONGEST, vllm_cfg=settings, vllm_kwargs=dict(cache))
        engine = Engine(model, generation, seed=1, worker_timeout_s=TIMEOUT_S)
        engine.set_weight_version(0)
        for number, lengths in enumerate(steps):
            prompts = [[rng.randrange(256) for _ in range(PROMPT_LENGTH)] for _ in lengths]
            requests = [
                request(prompt, prompt_id=f"{number}/{index}", max_new_tokens=length)
                for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
            before = engine.num_steps, engine.num_drawn, engine.num_recomputed, time.process_time()
            rollouts = run(engine, requests)
            now = engine.num_steps, engine.num_drawn, engine.num_recomputed, time.process_time()
            passes, drawn, recomputed = (
                int(later - earlier) for later, earlier in zip(now[:3], before[:3], strict=True)
            )
            counts.append((passes, drawn, recomputed, now[3] - before[3]))
            for key in sorted(rollouts):
                tokens.update(rollouts[key].token_ids.tobytes())
        engine.shutdown()
    return counts, tokens.hexdigest()


if __name__ == "__main__":
    main()
