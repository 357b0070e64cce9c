# SPDX-License-Identifier: Apache-2.0
"""Run folders as a run writes them, small: metrics, config, dumps of rollouts."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

CONFIG = """
algorithm: grpo
grpo:
  seed: 7
  num_prompts_per_step: 4
  num_generations_per_prompt: 2
  max_num_steps: 50
  async_grpo: {enabled: true, max_trajectory_age_steps: 2}
policy: {model_name: tiny, precision: float32, megatron_cfg: {tensor_model_parallel_size: 2, optimizer: {lr: 0.001}}}
cluster: {num_nodes: 1, gpus_per_node: 0}
"""

REFIT = {
    "rounds": 2,
    "num_ranks": 2,
    "num_workers": 2,
    "links": {"gpu": 3000, "node": 1000, "network": 0},
    "neighbours": 1,
    "matrix": [[2000, 0], [1000, 1000]],
    "zero": {"verified_bytes": 4000, "padding_bytes": 64},
}


def row(step: int, **metrics: float | None) -> dict[str, float | None]:
    """The metrics of a step at which no rule holds; `train__kl_penalty` sets `train/kl_penalty`."""
    quiet = {
        "train/reward": 0.1 + 0.01 * step,
        "train/loss": 0.1,
        "train/grad_norm": 1.0,
        "time/total": 2.0,
        "time/train": 1.0,
    }
    return {"step": step, **quiet, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def rollout(index: int, text: str, **fields: object) -> dict[str, object]:
    """A line of a dump."""
    known = {
        "rewards": float(index % 2),
        "input_lengths": 9,
        "advantages": 0.5,
        "sample_loss_mask": 1.0,
        "environment": "math",
    }
    known |= {
        "finish_reason": "stop",
        "masked": None,
        "reward_components": {},
        "prompt_id": f"p:{index // 2}",
        "idx": index,
    }
    return {"content": [f"question {index // 2}", text], **known, **fields}


def write_metrics(folder: Path, rows: list[dict[str, float | None]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_dump(folder: Path, step: int, rollouts: list[dict[str, object]], *, attempt: int = 1) -> None:
    logs = folder / f"logs/exp_{attempt:03d}"
    logs.mkdir(parents=True, exist_ok=True)
    with gzip.open(logs / f"train_data_step{step}.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(rollout) + "\n" for rollout in rollouts))


def event(name: str, begin_s: float, length_s: float, lane: str = "main", /, **facts: object) -> str:
    """A line of a file of spans, its times in seconds."""
    times = {"ts": round(begin_s * 1e6), "dur": round(length_s * 1e6)}
    return (
        json.dumps(
            times | {"ph": "X", "name": name, "pid": 1, "tid": 0, "cat": lane, "args": facts}, separators=(",", ":")
        )
        + ",\n"
    )


def write_spans(folder: Path, process: str, events: Sequence[str], *, attempt: int = 1) -> None:
    actors = folder / f"logs/exp_{attempt:03d}/actors"
    actors.mkdir(parents=True, exist_ok=True)
    (actors / f"{process}.trace.json").write_text("[\n" + "".join(events))


def write_all_spans(folder: Path, *, num_steps: int, attempt: int = 1) -> None:
    """Spans of driver, two ranks, engine and rewards; step N lasts from N to N + 0.9 seconds; all processes work."""
    every = range(1, num_steps + 1)
    driver = [
        [event("generation", n, 0.5), event("wait: train_step", n + 0.6, 0.3, calls=2), event("step", n, 0.9, step=n)]
        for n in every
    ]
    write_spans(
        folder, "driver", [event("wait: build", 0.1, 0.5), *(one for step in driver for one in step)], attempt=attempt
    )
    memory = {"phase": "train", "host_bytes": 10**9, "gpu_peak_bytes": 10**9, "gpu_used_bytes": 2 * 10**9}
    for rank in (0, 1):
        work = [event("train_step", n + 0.6, 0.25, **memory | {"gpu_used_bytes": (4 - rank) * 10**9}) for n in every]
        write_spans(folder, f"policy-rank-{rank}", work, attempt=attempt)
    memory = {"phase": "generate", "engine_host_bytes": 3 * 10**9, "gpu_used_bytes": 10**9}
    write_spans(folder, "engine-0", [event("generate", n, 0.45, **memory) for n in every], attempt=attempt)
    write_spans(
        folder, "rewards", [event("score", n + 0.3, 0.1, "math worker 0", rollouts=8) for n in every], attempt=attempt
    )


def make_run(folder: Path, *, num_steps: int = 5) -> Path:
    """A run folder in which nothing is wrong."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    write_metrics(folder, [{"step": 0, "val/accuracy": 0.25}, *(row(step) for step in range(1, num_steps + 1))])
    for step in range(1, num_steps + 1):
        write_dump(folder, step, [rollout(index, f"answer {index} of step {step}") for index in range(8)])
    write_all_spans(folder, num_steps=num_steps)
    (folder / "refit.json").write_text(json.dumps(REFIT))
    return folder


def make_long_run(folder: Path, *, num_steps: int = 1000) -> Path:
    """A run of many steps with 110 metrics each, and rollouts of random text, which does not compress below a half."""
    make_run(folder, num_steps=1)
    write_metrics(
        folder,
        [
            row(step, **{f"train__metric_{index}": hash((step, index)) / 7e17 for index in range(100)})
            for step in range(1, num_steps + 1)
        ],
    )
    for step in range(1, num_steps + 1, 25):
        drawn = random.Random(step)
        write_dump(folder, step, [rollout(index, drawn.randbytes(3_000).hex()) for index in range(64)])
    write_all_spans(folder, num_steps=num_steps)
    return folder
