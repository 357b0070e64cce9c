# SPDX-License-Identifier: Apache-2.0
"""GRPO step seconds here and in TRL: the same model, prompts, batch, rewards and host, in turns; docs/data/vs_trl.json.

Usage: python -m scripts.bench.vs_trl [--no-record] [--repeats 1]

Run it where `scripts/test.sh` has installed. TRL gets an environment of its own (build/trl), with the same torch and
transformers. Every rollout has exactly as many tokens as the row says. The first steps of each run warm up and are not
counted. TRL runs with its defaults (8 rollouts at a time, activations recomputed), and in one batch, the fastest
setting found for the tiny model. One update a step needs no pass for old logprobs: neither makes one. mrl's processes
have one thread each; a single policy rank and its engine, which take turns, are measured with two, too. Target with 20
M: mrl's best setting takes no longer than TRL's best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.shapes import widen
from scripts.bench.trl_steps import GENERATIONS
from scripts.uv_settings import pip_variables
from tests.long.record import Row, record

ROOT = Path(__file__).parents[2]
TRL_ENVIRONMENT = ROOT / "build" / "trl"
TRL = "trl==1.16.0"
DEFAULTS = "TRL's defaults"
SETTINGS = ((DEFAULTS, 2), ("one batch", 2))
"""TRL's settings, and its threads."""
TINY, WIDE = "0.4 M", "20 M"
TARGET = 1.0
TWO_THREADS = [
    f"policy.{section}.env_vars={{OMP_NUM_THREADS: '2'}}" for section in ("megatron_cfg", "generation.vllm_cfg")
]


@dataclass(frozen=True)
class Case:
    """A model, mrl's policy ranks in its runs, new tokens of a rollout, steps of an mrl run, and rollouts of a step."""

    model: str
    ranks: tuple[int, ...]
    new_tokens: int
    num_steps: int
    num_rollouts: int = 512


# Of 512 rollouts of the wide model, TRL's one batch would need more memory than the host has.
CASES = (Case(TINY, (1, 4), 3, 12), Case(WIDE, (1,), 256, 4, 64))
TRL_STEPS = {DEFAULTS: 3, "one batch": 3}
WARM_UP, TRL_WARM_UP = 1, 1
TIMEOUT_S = 1800.0


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="leave docs/data as it is")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    install_trl()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "mrl.prepare", "tiny", folder=folder)
        folders = {TINY: folder / "prepared" / "tiny", WIDE: folder / "prepared" / "wide"}
        widen(folders[TINY], folders[WIDE], "nemotron_h")
        for case in CASES:
            # With TRL's defaults the wide model takes hours.
            settings = [setting for setting in SETTINGS if case.model == TINY or setting[0] != DEFAULTS]
            own_settings = [(ranks, threads) for ranks in case.ranks for threads in (1, 2) if 1 in (ranks, threads)]
            ours: dict[tuple[int, int], list[float]] = {setting: [] for setting in own_settings}
            theirs: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
            for _ in range(arguments.repeats):
                overrides = ["loss_fn.force_on_policy_ratio=true", *batch_of(case.num_rollouts)]
                for (num_ranks, threads), times in ours.items():
                    words = [*overrides, *(TWO_THREADS if threads == 2 else [])]
                    times += mrl_steps(folders[case.model], num_ranks, case.new_tokens, case.num_steps, *words)
                for setting, times in theirs.items():
                    times += trl_steps(folders[case.model], case.num_rollouts, case.new_tokens, *setting)
            found = {
                (own, setting): row_of(case, own, setting, ours[own], theirs[setting])
                for own in ours
                for setting in theirs
            }
            best = min((own for own in ours if own[0] == 1), key=lambda own: statistics.median(ours[own]))
            if case.model == WIDE:
                found[best, min(theirs, key=lambda setting: statistics.median(theirs[setting]))]["at least"] = TARGET
            print(*map(json.dumps, found.values()), sep="\n", flush=True)
            rows += found.values()
    if not arguments.no_record:
        record("vs_trl", rows, command="python -m scripts.bench.vs_trl")


def row_of(case: Case, own: tuple[int, int], setting: tuple[str, int], ours: list[float], theirs: list[float]) -> Row:
    """A row of the table: medians over steps, their ratio, and that of TRL's median to each step of mrl."""
    ratios = [statistics.median(theirs) / step for step in ours]
    return {
        "model": case.model,
        "policy ranks": own[0],
        "mrl threads": own[1],
        "rollouts": case.num_rollouts,
        "new tokens": case.new_tokens,
        "TRL": f"{setting[0]}, {setting[1]} thread{'s' * (setting[1] > 1)}",
        "mrl s": round(statistics.median(ours), 2),
        "TRL s": round(statistics.median(theirs), 2),
        "TRL / mrl": round(statistics.median(ratios), 2),
        "at least": None,
        "lowest to highest": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "steps": len(ours),
    }


def install_trl() -> None:
    """Makes TRL's environment unless it is there."""
    python = TRL_ENVIRONMENT / "bin" / "python"
    if (
        python.exists()
        and not subprocess.run([python, "-c", "import trl"], capture_output=True, timeout=TIMEOUT_S).returncode
    ):
        return
    pins = [*("--constraint", ROOT / "constraints-cpu.txt"), *("--index-strategy", "unsafe-best-match")]
    make = ["venv", "--quiet", "--clear", "--python", sys.executable, TRL_ENVIRONMENT]
    for arguments in (make, ["pip", "install", "--quiet", "--python", python, *pins, TRL, "torch", "jinja2"]):
        command = [sys.executable, "-m", "uv", *arguments]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, env=pip_variables() | os.environ)


def mrl_steps(prepared: Path, num_ranks: int, new_tokens: int, num_steps: int, *overrides: str) -> list[float]:
    """Step seconds of one grpo_tiny.yaml run on a prepared model and data folder without validation and checkpoints."""
    run_folder = Path(tempfile.mkdtemp(dir=prepared))
    one = "tensor_model_parallel_size=1 expert_model_parallel_size=1 sequence_parallel=false".split()
    settings = {
        "policy.model_name": prepared / "model",
        "data.train.data_path": prepared / "data" / "train.jsonl",
        "data.validation.data_path": prepared / "data" / "validation.jsonl",
        "cluster.cpu_units_per_node": num_ranks,
        "grpo.max_num_steps": num_steps,
        "grpo.val_period": 0,
        "grpo.val_at_start": "false",
        "grpo.val_at_end": "false",
        "policy.generation.max_new_tokens": new_tokens,
        # Rollouts end at max_new_tokens, and only there.
        "policy.generation.stop_token_ids": "[]",
        "checkpointing.enabled": "false",
        "checkpointing.checkpoint_dir": run_folder,
        "logger.tensorboard_enabled": "false",
    }
    words = [
        *(f"{key}={value}" for key, value in settings.items()),
        *(f"policy.megatron_cfg.{size}" for size in one if num_ranks == 1),
    ]
    run(sys.executable, "-m", "mrl.train", "grpo_tiny.yaml", *words, *overrides, folder=run_folder)
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["time/total"] for row in rows if row["step"] > WARM_UP]


def batch_of(num_rollouts: int) -> list[str]:
    """Overrides of grpo_tiny.yaml for so many rollouts a step."""
    return [
        f"grpo.num_prompts_per_step={num_rollouts // GENERATIONS}",
        f"policy.train_global_batch_size={num_rollouts}",
    ]


def trl_steps(prepared: Path, num_rollouts: int, new_tokens: int, settings: str, num_threads: int) -> list[float]:
    """Seconds of the steps of one run of TRL."""
    out = prepared / "trl.json"
    script = Path(__file__).with_name("trl_steps.py")
    python = TRL_ENVIRONMENT / "bin" / "python"
    words = [num_rollouts, new_tokens, TRL_STEPS[settings], settings, out]
    run(python, script, prepared, *words, folder=prepared, OMP_NUM_THREADS=str(num_threads))
    return json.loads(out.read_text())[TRL_WARM_UP:]


def run(*command: object, folder: Path, **variables: str) -> None:
    """Runs a command in a folder; ends this program with its output if it fails."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        sys.exit(f"{' '.join(words)} exited with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
