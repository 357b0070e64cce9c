# SPDX-License-Identifier: Apache-2.0
"""Golden runs: hashes of the metrics and weights of six small runs, to show that a code change leaves them bit for bit.

    python -m scripts.golden --out before.json                   # at the old commit
    python -m scripts.golden --out after.json --against before.json   # at the new one, on the same host: code 1 if
    anything differs

Only results of one host compare: processors round differently. Needs `python -m mrl.prepare tiny`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
ALL = ["checkpointing.save_period=20", "logger.tensorboard_enabled=false"]
SMALL = [
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=8",
    "grpo.max_num_steps=20",
    "grpo.max_val_samples=16",
]
TIMEOUT_S = 3600.0
ONE_RANK = [
    "cluster.cpu_units_per_node=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.expert_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
]
RUNS: Mapping[str, Sequence[str]] = {
    "grpo": ["grpo_tiny.yaml", *SMALL],
    "lag1": [
        "grpo_tiny.yaml",
        *SMALL,
        *ONE_RANK,
        "grpo.async_grpo.enabled=true",
        "policy.generation.colocated.enabled=false",
    ],
    "ppo": [
        "ppo_tiny.yaml",
        "ppo.num_prompts_per_step=16",
        "ppo.max_num_steps=20",
        "ppo.max_val_samples=16",
    ],
    "distillation": ["distillation_tiny.yaml", "distillation.num_prompts_per_step=8", "distillation.max_num_steps=20"],
    "sft": ["sft_tiny.yaml", "sft.max_num_steps=20"],
    "agent": [
        "grpo_tiny.yaml",
        *SMALL,
        "++env.own.agents.sums=examples.own_agent:agent",
        "data.default.env_name=sums",
        "policy.generation.vllm_cfg.expose_http_server=true",
        "policy.generation.vllm_cfg.http_server_share=1.0",
    ],
}
CLOCK = re.compile(
    r"^(time|performance|logger|refit)/|second|_s$|per_s|gib|memory|share|idle|latency|wait|busy|ahead|queue|utilization"
)
"""Metrics that say how fast the host is, or how much memory it had."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="writes the hashes here, as JSON")
    parser.add_argument("--against", type=Path, help="compares with the hashes of an older commit")
    parser.add_argument(
        "runs", nargs="*", choices=[[], *RUNS], metavar="RUN", help=f"of {', '.join(RUNS)}; all by default"
    )
    options = parser.parse_args()
    found = {name: measure(name) for name in options.runs or RUNS}
    options.out.write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
    if options.against is None:
        return 0
    problems = compare(json.loads(options.against.read_text(encoding="utf-8")), found)
    print("\n".join(problems) or "Every run is as before, bit for bit.")
    return 1 if problems else 0


def measure(name: str) -> dict[str, str]:
    """Makes a run in a folder of its own; returns a hash of each metric over all steps, and of the weights."""
    with tempfile.TemporaryDirectory(prefix="mrl-golden-") as folder:
        teacher = (
            [f"teacher.model_name={train(Path(folder, 'teacher'), RUNS['sft'])}"] if name == "distillation" else []
        )
        export = train(Path(folder, "run"), [*RUNS[name], *teacher])
        hashes = hash_metrics(Path(folder, "run/metrics.jsonl")) | {"weights": hash_weights(export)}
    print(f"{name}: {len(hashes)} hashes, weights {hashes['weights'][:12]}", flush=True)
    return hashes


def train(run: Path, words: Sequence[str]) -> Path:
    """Makes a run in the folder `run`; returns the folder of its last weights, as Hugging Face has them."""
    export = run.with_name(f"{run.name}_export")
    started = ["mrl.train", *words, *ALL, f"checkpointing.checkpoint_dir={run}"]
    subprocess.run([sys.executable, "-m", *started], check=True, cwd=ROOT, stdout=sys.stderr, timeout=TIMEOUT_S)
    step = max(run.glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
    convert = ["mrl.convert", "mcore-to-hf", "--mcore", str(step), "--out", str(export)]
    subprocess.run([sys.executable, "-m", *convert], check=True, cwd=ROOT, stdout=sys.stderr, timeout=TIMEOUT_S)
    return export


def hash_metrics(file: Path) -> dict[str, str]:
    """Hash of each metric's values over all steps; the ones that measure the host are left out."""
    values: dict[str, list[object]] = {}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        for metric, value in row.items():
            if not CLOCK.search(metric):
                values.setdefault(metric, []).append([row["step"], value])
    return {metric: hashlib.sha256(json.dumps(rows).encode()).hexdigest() for metric, rows in values.items()}


def hash_weights(folder: Path) -> str:
    """Hash over names, dtypes, shapes and bytes of all tensors in a folder of safetensors files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for tensor_name in sorted(file.keys()):
                tensor = file.get_tensor(tensor_name).contiguous()
                digest.update(f"{tensor_name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.flatten().view(dtype=torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def compare(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line per metric or run that differs; a metric that only one side has is one the change added or removed."""
    return [
        f"{run}: {metric} {'differs' if metric in before.get(run, {}) and metric in hashes else 'is on one side only'}"
        for run, hashes in after.items()
        for metric in sorted(before.get(run, {}).keys() | hashes.keys())
        if before.get(run, {}).get(metric) != hashes.get(metric)
    ]


if __name__ == "__main__":
    sys.exit(main())
