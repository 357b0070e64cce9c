# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of mrl's engine and of plain `vllm.LLM.generate`, with the same requests, taking turns: docs/data/engine.json.

Usage: python -m scripts.bench.engine [--no-record] [--repeats 5]

512 requests of 20 prompt tokens; each gets a seed of its own and the logprobs of its tokens. Both engines have one core and the same
limits. On hosts without GPUs mrl replaces some of vLLM's kernels (docs/cpu_hosts.md); plain vLLM has its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.long.record import Row, record

NUM_REQUESTS, PROMPT_LENGTH = 512, 20
NEW_TOKENS = (3, 64)
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 256, 8192
KV_CACHE_MIB = 256
TARGET = 0.9
TIMEOUT_S = 600.0


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="leave docs/data as it is")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rows = [row for model_type in ("qwen3", "qwen3_moe") for row in measure(model_type, arguments.repeats)]
    if not arguments.no_record:
        record("engine", rows, command="python -m scripts.bench.engine")


def measure(model_type: str, repeats: int) -> list[Row]:
    """A row for each number of new tokens."""
    from tests.models import save_model

    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), model_type)
        connections = {}
        for kind in (plain, ours):
            connections[kind], theirs = context.Pipe()
            context.Process(target=kind, args=(folder, theirs), daemon=True).start()
        for new_tokens in NEW_TOKENS:
            ratios, speeds = [], {plain: [], ours: []}
            # The first pass warms up.
            for repeat in range(repeats + 1):
                for kind, connection in connections.items():
                    connection.send(new_tokens)
                    assert connection.poll(TIMEOUT_S), f"{kind.__name__}: no answer in {TIMEOUT_S:g} s"
                    seconds = connection.recv()
                    if repeat:
                        speeds[kind].append(NUM_REQUESTS * new_tokens / seconds)
                if repeat:
                    ratios.append(speeds[ours][-1] / speeds[plain][-1])
            row: Row = {
                "model": model_type,
                "new tokens": new_tokens,
                "mrl tokens/s": round(statistics.median(speeds[ours])),
                "vLLM tokens/s": round(statistics.median(speeds[plain])),
                "mrl / vLLM": round(statistics.median(ratios), 2),
                "at least": TARGET,
                "lowest to highest": f"{min(ratios):.2f} to {max(ratios):.2f}",
                "repeats": repeats,
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
        for connection in connections.values():
            connection.send(None)
    return rows


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
    engine = Engine(model, GenerationConfig(max_new_tokens=max(NEW_TOKENS), vllm_cfg=settings), seed=1, worker_timeout_s=TIMEOUT_S)
    engine.set_weight_version(0)
    tokens = prompts()
    while connection.poll(TIMEOUT_S) and (new_tokens := connection.recv()):
        requests = [request(token_ids, prompt_id=f"p{index}", max_new_tokens=new_tokens) for index, token_ids in enumerate(tokens)]
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
            SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, seed=index, detokenize=False) for index in range(len(tokens))
        ]
        started = time.perf_counter()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        connection.send(time.perf_counter() - started)
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == NUM_REQUESTS * new_tokens


if __name__ == "__main__":
    main()
