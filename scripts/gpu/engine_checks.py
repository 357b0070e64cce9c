# SPDX-License-Identifier: Apache-2.0
"""Checks of a whole installation: trainer and engine on one GPU, and an engine that sleeps and wakes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.gpu.plan import Missed, Row, Setup, elapsed, gpu_columns

if TYPE_CHECKING:
    from mrl.config.fields import EnginePrecision
    from mrl.phases import Phase
    from mrl.rollout.engine import Engine

NUM_REQUESTS, NUM_NEW_TOKENS = 256, 128
PRECISIONS: tuple[EnginePrecision, ...] = ("bfloat16", "fp8")


def doctor(setup: Setup) -> list[Row]:
    """The findings of `mrl.doctor` on the tiny model, in bfloat16 and float32.

    Raises:
        Missed: one of them failed.
    """
    return _findings(setup, (("bfloat16", "bfloat16"), ("float32", "float32")))


def fp8(setup: Setup) -> list[Row]:
    """Tokens per second of an engine in bfloat16 and in FP8, and the doctor's findings of both.

    Raises:
        Missed: one of them failed, or a sleep changes tokens.
    """
    rows = [row for precision in PRECISIONS for row in _phases(setup, precision)]
    try:
        return rows + _findings(setup, (("bfloat16", "bfloat16"), ("bfloat16", "fp8")))
    except Missed as missed:
        raise Missed(str(missed), rows + missed.rows) from missed


def _findings(setup: Setup, precisions: Sequence[tuple[str, str]]) -> list[Row]:
    """The doctor's findings for each precision of trainer and engine."""
    from mrl.config.load import load_config
    from mrl.data.prompts import load_prompts
    from mrl.loop.preflight import check_start
    from mrl.ops import prepare
    from mrl.ops.doctor import refit

    if setup.model is None:
        prepare.main(["tiny"])  # finds what it has made before
    rows: list[Row] = []
    failed = []
    for precision, of_engine in precisions:
        overrides = [
            "policy.megatron_cfg.tensor_model_parallel_size=1",
            "policy.megatron_cfg.expert_model_parallel_size=1",
            "policy.megatron_cfg.sequence_parallel=false",
            f"policy.precision={precision}",
            f"policy.megatron_cfg.optimizer.bf16={'true' if precision == 'bfloat16' else 'false'}",
            f"policy.generation.vllm_cfg.precision={of_engine}",
            *(["cluster.gpus_per_node=1", "cluster.num_nodes=1"] if setup.device == "cuda" else []),
            *([f"policy.model_name={setup.model}", f"policy.tokenizer.name={setup.model}"] if setup.model else []),
            *refit.SETTINGS,
        ]
        config = check_start(load_config("grpo_tiny.yaml", overrides))
        with tempfile.TemporaryDirectory() as logs:
            findings = asyncio.run(refit.examine(config, load_prompts(config), Path(logs)))
        for finding in findings:
            name = f"{finding.check.name} {finding.subject}".strip()
            rows.append(
                {"precision": of_engine, "check": name, "numbers": finding.numbers.replace("|", "/"), **gpu_columns()}
            )
            if not finding.is_ok:
                failed.append(f"{name} in {of_engine}")
    if failed:
        raise Missed(", ".join(failed), rows)
    return rows


def sleep(setup: Setup) -> list[Row]:
    """An engine's phases in run order, timed; requests before and after a weight-keeping sleep give equal tokens.

    Without a model in `setup`, of a small one.

    Raises:
        Missed: tokens differ after the sleep.
    """
    return _phases(setup, "bfloat16" if setup.device == "cuda" else "float32")


def _phases(setup: Setup, precision: EnginePrecision) -> list[Row]:
    from mrl.rollout.environment import engine_environment

    # Before anything imports vLLM.
    os.environ.update(engine_environment(has_gpu=setup.device == "cuda"))
    from mrl.config.schema.generation import ColocatedConfig, GenerationConfig, VllmConfig
    from mrl.rollout.engine import Engine
    from tests.rollouts import differences, random_requests, run

    is_gpu = setup.device == "cuda"
    limits = VllmConfig(
        max_model_len=256, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=8192, enforce_eager=not is_gpu
    )
    limits.precision = precision
    # Graphs of a few sizes, of the model as it is: vLLM would compile it and capture 51 sizes, which sleep and wake
    # alike.
    graphs = {"compilation_config": {"mode": 0, "cudagraph_capture_sizes": [1, 8, 64, NUM_REQUESTS]}} if is_gpu else {}
    config = GenerationConfig(
        max_new_tokens=NUM_NEW_TOKENS, vllm_cfg=limits, vllm_kwargs=graphs, colocated=ColocatedConfig(enabled=True)
    )
    with small_model() if setup.model is None else nullcontext(setup.model) as folder:
        engine = Engine(str(folder), config, seed=1, worker_timeout_s=300.0)
    requests = random_requests(NUM_REQUESTS if is_gpu else 8, max_new_tokens=NUM_NEW_TOKENS)
    try:
        row: Row = {"load: s": enter(engine, "load"), "refit: s": enter(engine, "refit")}
        engine.set_weight_version(0)
        row["generate, KV cache wakes: s"] = enter(engine, "generate")
        before = run(engine, requests)
        row["checkpoint, KV cache leaves: s"] = enter(engine, "checkpoint")
        enter(engine, "generate")
        started = time.perf_counter()
        after = run(engine, requests)
        row["tokens per s"] = sum(len(rollout.token_ids) for rollout in after.values()) / (
            time.perf_counter() - started
        )
        changed = differences(before, after)
        row["logprob, all sleeps: s"] = enter(engine, "logprob")
        enter(engine, "train")
        row["refit, weights wake: s"] = enter(engine, "refit")
    finally:
        engine.shutdown()
    model = "small" if setup.model is None else setup.model.name
    rows = [
        {
            "model": model,
            "precision": precision,
            "requests": len(requests),
            "different after sleep": len(changed),
            **row,
            **gpu_columns(),
        }
    ]
    if changed:
        raise Missed(f"{len(changed)} of {len(requests)} requests give other tokens after a sleep", rows)
    return rows


@contextmanager
def small_model() -> Iterator[Path]:
    """Folder of a model with every kind of layer of the 30B model, for which nothing needs to be fetched."""
    from scripts.bench.shapes import narrowed
    from scripts.gpu.policy_checks import SMALL, write_model

    with tempfile.TemporaryDirectory() as name:
        yield write_model(Path(name), {**narrowed(1), **SMALL})


def enter(engine: Engine, phase: Phase) -> float:
    """Seconds of entering a phase."""
    return elapsed("cpu", lambda: engine.enter(phase))
