# SPDX-License-Identifier: Apache-2.0
"""Data of a run's page, from the files of its folder: plain JSON values, bounded in size."""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import cast, get_args

from conversion.files.owners import Owner
from conversion.files.reading import parse_json, read_file
from mrl.config.files import MAX_FILE_BYTES, read_yaml
from mrl.exit_codes import DONE
from mrl.metrics import ATTEMPT, MASKED_IN_A_ROW, NO_SIGNAL_IN_A_ROW
from mrl.ops.view.dumps import list_dumps, read_evaluations, sampled_dumps
from mrl.ops.view.timeline import chosen, list_windows, memory_by_phase, read_timelines
from mrl.phases import PHASES
from mrl.store.advisories import RULES, Advisory, advisories, facts_of, number, silence
from mrl.store.loggers.sink import flat
from mrl.store.run_files import (
    ABOUT,
    ENDED,
    MASKED,
    METRIC_KEYS,
    METRICS,
    OWNER,
    REFIT,
    SAMPLE_KEYS,
    SAMPLES,
    Json,
    Row,
    State,
    attempts_of,
    read_rows,
    setting,
)
from mrl.types import Status

# The owner touches its file far more often; see mrl.store.ownership.
OWNER_LEASE_S = 120.0
MAX_POINTS = 2_000
MAX_REASON = 200
NUM_TIMED_STEPS = 20
SAMPLES_BYTES = 2**19
NUM_SAMPLES = 48


def run_data(folder: Path, *, state: State | None = None, has_rollouts: bool = True) -> Json:
    """Collects the data of a run's page. `state` None: from the owner's file. Without `has_rollouts` only dump names.

    ValueError: the folder's files are not as mrl writes them.
    """
    try:
        return _run_data(folder, state, has_rollouts)
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
        raise ValueError(
            f"{folder} cannot be shown ({reason}): its files are not as mrl writes them; give the folder of a run"
        ) from error


def _run_data(folder: Path, state: State | None, has_rollouts: bool) -> Json:
    rows, num_torn = read_rows(folder / METRICS, METRIC_KEYS)
    samples, num_torn_samples = read_rows(folder / SAMPLES, SAMPLE_KEYS, last_bytes=SAMPLES_BYTES)
    config = read_config(folder / "config.yaml")
    state = state or owner_state(folder)
    found = advisories(rows, facts_of(config))
    if state == "running" and (silent := silence(rows, silent_s=time.time() - newest_change(folder))):
        found = [silent, *found]
    dumps, evaluations, windows = list_dumps(folder), read_evaluations(folder), list_windows(folder)
    timelines = read_timelines(chosen(windows))
    return {
        "name": folder.name,
        "about": about_lines(config, read_json(folder / ABOUT)),
        "progress": progress_lines(rows, config, folder, state),
        "attempts": changes_of_attempts(folder, rows),
        "files": files_of(folder),
        "health": health(rows, found),
        "advisories": [asdict(advisory) for advisory in found],
        "num_torn": num_torn + num_torn_samples,
        "series": series_of(rows),
        "samples": samples[-NUM_SAMPLES:],
        "checkpoints": checkpoints_of(folder),
        "disk": disk_of(folder),
        "memory": memory_of(memory_by_phase(timelines), read_json(folder / ABOUT).get("plan")),
        "refit": read_json(folder / REFIT),
        "timelines": timelines,
        "timed_steps": [] if has_rollouts else list(windows),
        "evaluations": [{name: found[name] for name in ("name", "metric", "scores")} for found in evaluations],
        "dumps": [
            *({"name": dump.name, "step": dump.step, "split": dump.split} for dump in dumps),
            *({"name": found["name"], "step": found["name"], "split": "evaluation"} for found in evaluations),
        ],
        "rollouts": (sampled_dumps(dumps) if has_rollouts else {})
        | {str(found["name"]): found["rows"] for found in evaluations},
    }


def memory_of(measured: Mapping[str, Mapping[str, int]], plan: object) -> list[Json]:
    """Compares the plan's memory for a GPU with the memory that ranks were seen to hold, by phase."""
    predicted = plan if isinstance(plan, dict) else {}
    phases = dict.fromkeys([*PHASES, *predicted, *measured])
    return [
        {"phase": phase, "predicted_bytes": predicted.get(phase), **measured.get(phase, {})}
        for phase in phases
        if phase in predicted or phase in measured
    ]


def rule_table() -> list[Json]:
    """Advisory rules with their limits, for the page."""
    return [
        {
            "key": rule.key,
            "level": rule.level,
            "rule": f"{rule.what} {'<' if rule.is_below else '>'} {number(rule.limit)}",
        }
        for rule in RULES
    ]


def read_config(path: Path) -> Json:
    """The resolved config, sections within sections; empty if there is no readable one."""
    try:
        config = read_yaml(read_file(path, MAX_FILE_BYTES).decode())
    except (OSError, ValueError):
        config = None
    return config if isinstance(config, dict) else {}


def read_json(path: Path) -> Json:
    try:
        found = parse_json(read_file(path))
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def section_of(config: Json) -> str:
    """The section that holds steps and seed; PPO's are GRPO's."""
    algorithm = str(setting(config, "algorithm"))
    return "grpo" if algorithm == "ppo" else algorithm


def files_of(folder: Path) -> list[str]:
    """The files and folders that the page links, the logs of the newest attempt among them."""
    attempts = sorted(
        (path.name for path in folder.glob("logs/exp_*") if path.name[4:].isdecimal()), key=lambda name: int(name[4:])
    )
    names = ["config.yaml", METRICS, *(f"logs/{attempts[-1]}/{part}" for part in ("", "actors/") if attempts)]
    return [name for name in names if (folder / name).exists()]


def checkpoints_of(folder: Path) -> list[Json]:
    """The complete checkpoints by step, with the files and bytes of their manifests."""
    found = []
    for path in folder.glob("step_*/COMPLETE"):
        if path.parent.name[5:].isdecimal():
            files = [entry for entry in read_json(path.with_name("manifest.json")).values() if isinstance(entry, dict)]
            sizes = [size for entry in files if isinstance(size := entry.get("bytes"), int)]
            found.append({"step": int(path.parent.name[5:]), "files": len(sizes), "bytes": sum(sizes)})
    return sorted(found, key=lambda checkpoint: checkpoint["step"])


def disk_of(folder: Path) -> Json:
    usage = shutil.disk_usage(folder)
    return {"free": usage.free, "total": usage.total}


def owner_state(folder: Path) -> State:
    """Tells whether a process still writes into the folder: on its host by its id, elsewhere by the file it touches."""
    owner = folder / OWNER
    if not owner.exists():
        return "over"
    with suppress(OSError, ValueError, KeyError, TypeError):  # as a power loss leaves it
        process = Owner(**cast(dict, parse_json(read_file(owner)))["process"])
        if process.is_visible():
            return "running" if process.is_running() else "over"
    return "running" if time.time() - owner.stat().st_mtime < OWNER_LEASE_S else "over"


def newest_change(folder: Path) -> float:
    return max(
        (path.stat().st_mtime for name in (METRICS, "config.yaml") if (path := folder / name).exists()),
        default=time.time(),
    )


def series_of(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Metrics as columns next to `step`, whole numbers or six digits; beyond `MAX_POINTS` every second, and so on."""
    stride = -(-len(rows) // MAX_POINTS)
    kept = [
        row
        for index, row in enumerate(rows)
        if (len(rows) - 1 - index) % stride == 0 or any(name.startswith("val/") for name in row)
    ]
    names = sorted({name for row in kept for name in row} - {"step"})
    columns: dict[str, list[float | None]] = {"step": [row["step"] for row in kept]}
    for name in names:
        columns[name] = [
            None if (value := row.get(name)) is None else float(value if value % 1 == 0 else f"{value:.6g}")
            for row in kept
        ]
    return columns


def about_lines(config: Json, about: Json) -> list[tuple[str, str]]:
    """Model, layout, data, algorithm and versions, as (name, text)."""

    def of(path: str) -> str:
        return str(setting(config, path))

    if not config:
        return []
    megatron = "policy.megatron_cfg"
    sizes = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context", "EP": "expert_model"}
    layout = " x ".join(f"{label}{of(f'{megatron}.{name}_parallel_size')}" for label, name in sizes.items())
    lines = [
        ("algorithm", of("algorithm")),
        ("model", of("policy.model_name")),
        ("layout", f"{layout}, {of('policy.precision')}"),
        ("hosts", _hosts(setting(config, "cluster.num_nodes"), setting(config, "cluster.gpus_per_node"))),
        ("data", of("data.train.data_path")),
        ("seed", of(f"{section_of(config)}.seed")),
        ("learning rate", of(f"{megatron}.optimizer.lr")),
    ]
    if of("algorithm") in ("grpo", "ppo"):
        lines.append(
            (
                "each step",
                f"{of('grpo.num_prompts_per_step')} prompts x {of('grpo.num_generations_per_prompt')} rollouts",
            )
        )
        is_colocated = setting(config, "policy.generation.colocated.enabled")
        tp, pp = (of(f"policy.generation.vllm_cfg.{kind}_parallel_size") for kind in ("tensor", "pipeline"))
        lines.append(
            (
                "engines",
                (
                    f"vLLM, TP{tp}{'' if pp in ('None', '1') else f' PP{pp}'}, "
                    f"{'colocated' if is_colocated else 'dedicated'}"
                ),
            )
        )
    return [*lines, *((name, text) for name, text in about.items() if isinstance(text, str))]


def _hosts(num_nodes: object, num_gpus: object) -> str:
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    return (
        f"{nodes}, no GPU"
        if num_gpus == 0
        else f"{nodes}, {num_gpus} GPU{'s' * (num_gpus != 1)}{' each' * (num_nodes != 1)}"
    )


def progress_lines(rows: Sequence[Row], config: Json, folder: Path, state: State) -> list[tuple[str, str]]:
    """Describes the progress of the run, as (name, text)."""
    step = int(rows[-1]["step"] or 0) if rows else 0
    last = setting(config, f"{section_of(config)}.max_num_steps")
    has_last = isinstance(last, int) and last > 0
    lines = [
        ("state", state if state == "running" else _end(folder, has_all=has_last and step >= cast(int, last))),
        ("step", f"{step} of {last}" if has_last else str(step)),
    ]
    times = [total for row in rows[-NUM_TIMED_STEPS:] if (total := row.get("time/total")) is not None]
    if times:
        step_s = statistics.median(times)
        lines.append(("step time", f"{number(step_s)} s"))
        if has_last and state == "running" and _is_starting(folder):
            lines.append(("time left", "known after the first step of this attempt"))
        elif has_last and state == "running":
            left = timedelta(seconds=round(step_s * max(0, cast(int, last) - step)))
            end = datetime.now().astimezone() + left
            lines.append(("time left", f"about {left}, until {end:%Y-%m-%d %H:%M %Z}"))
    saved = checkpoints_of(folder)
    lines.append(("last checkpoint", f"step {saved[-1]['step']}" if saved else "none"))
    has_rewards = any(row.get("val/reward") is not None for row in rows)
    mean = ("reward", "val/reward") if has_rewards else ("accuracy", "val/accuracy")
    for what, name in (mean, ("loss", "val/val_loss"), ("loss", "val/validation-default_loss")):
        points = [(int(row["step"] or 0), value) for row in rows if (value := row.get(name)) is not None]
        if points:
            ends = dict.fromkeys(f"{value:.3f} at step {step}" for step, value in (points[0], points[-1]))
            lines.append((f"held-out {what}", ", ".join(ends)))
    if masked := masked_text(rows):
        lines.append(("masked", masked))
        reasons = dict[str, str]()
        for attempt in attempts_of(folder):
            reasons |= {str(kind): str(reason) for kind, reason in read_json(attempt / MASKED).items()}
        lines += [(f"masked: {kind}", reason) for kind, reason in reasons.items()]
    lines.append(("as of", datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")))
    return lines


def _end(folder: Path, *, has_all: bool) -> str:
    """State of a run that is over: by the exit code of its newest attempt, without one by whether it has all steps."""
    attempts = attempts_of(folder)
    code = read_json(attempts[-1] / ENDED).get("code") if attempts else None
    if code is None:
        return "finished" if has_all else "ended"
    return "finished" if code == DONE else f"ended, code {code}"


def _is_starting(folder: Path) -> bool:
    """Tells whether the newest attempt has logged nothing yet: the metrics are those of the attempts before it."""
    attempts, metrics = attempts_of(folder), folder / METRICS
    return (
        bool(attempts) and metrics.exists() and metrics.stat().st_mtime < (attempts[-1] / "config.yaml").stat().st_mtime
    )


def changes_of_attempts(folder: Path, rows: Sequence[Row]) -> list[Json]:
    """Attempts with other values than the one before: name, first step (None: it has logged none), and what changed."""
    files = {int(path.name[4:]): path / "config.yaml" for path in attempts_of(folder)}
    configs = {number: _flat_config(path, path.stat().st_mtime_ns) for number, path in files.items()}
    firsts = {int(number): int(row["step"] or 0) for row in reversed(rows) if (number := row.get(ATTEMPT)) is not None}
    return [
        {"name": f"attempt {number}", "step": firsts.get(number), "changes": changes}
        for (before, number) in pairwise(configs)
        if (changes := differences(configs[before], configs[number]))
    ]


@functools.lru_cache(maxsize=256)
def _flat_config(path: Path, mtime_ns: int) -> Json:
    """The flat config of an attempt; another time of the last change is another file."""
    return flat(read_config(path))


def differences(one: Json, other: Json) -> list[str]:
    """`key: value -> value` of each key of two flat configs that is not equal."""
    keys = [*one, *(key for key in other if key not in one)]
    return [
        f"{key}: {_spelt(one, key)} -> {_spelt(other, key)}"
        for key in keys
        if one.get(key) != other.get(key) or (key in one) != (key in other)
    ]


def _spelt(config: Json, key: str) -> str:
    return json.dumps(config[key], ensure_ascii=False, default=str) if key in config else "absent"


def masked_text(rows: Sequence[Row]) -> str:
    """Says how many rollouts of a run are masked, and why by kind; empty if none is."""
    counts = Counter[str]()
    for row in rows:
        for name, value in row.items():
            if name.startswith("rollout/") and name.count("/") == 2:
                counts[name.rpartition("/")[2]] += round(value or 0)
    num_masked, num_rollouts = counts["failed"], counts["num_rollouts"]
    if not num_masked:
        return ""
    kinds = ", ".join(f"{kind} {counts[kind]:,}" for kind in get_args(Status) if kind != "ok" and counts[kind])
    return f"{num_masked:,} of {num_rollouts:,} rollouts ({num_masked / num_rollouts:.1%}): {kinds}"


def health(rows: Sequence[Row], found: Sequence[Advisory]) -> Json:
    """`ok`, `look` or `stop`, with the reason in a sentence."""
    worst = next((advisory for level in ("stop", "look") for advisory in found if advisory.level == level), None)
    if worst is not None:
        return {"level": worst.level, "reason": f"{worst.seen[:1].upper()}{worst.seen[1:]}: {worst.causes}."}
    last = rows[-1] if rows else {}
    if last.get(NO_SIGNAL_IN_A_ROW) or last.get(MASKED_IN_A_ROW):
        return {"level": "look", "reason": "The last step taught nothing: its rewards are equal, or all are masked."}
    if masked := masked_text(rows):
        return {"level": "look", "reason": f"Masked, and not trained on: {masked}."}
    return {
        "level": "ok",
        "reason": "No problems found." if any(row.get("step") for row in rows) else "No step has finished yet.",
    }
