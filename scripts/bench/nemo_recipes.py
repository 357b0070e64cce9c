# SPDX-License-Identifier: Apache-2.0
"""Verdicts of `--check` on NeMo RL's own config files: docs/data/nemo_recipes.json, nemo_reasons.json.

Usage: python -m scripts.bench.nemo_recipes CHECKOUT [--json FILE] [--no-record]

Every YAML file below `examples/` and `research/` of a checkout of NeMo RL that says how to train or to evaluate is
checked as it is. What a login node lacks (models, data, disks) is to be provided, and refuses nothing. What a policy,
teacher or critic of `MODELS` needs is checked against its config.json. Exit code 1 if a check fails with a traceback.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from mrl.check import examine
from mrl.config.errors import Problem
from mrl.config.files import Settings, read_settings, sections_of
from mrl.nemo.dialect.tables import NEEDS_GPU
from mrl.nemo.dialect.translate import is_evaluation
from scripts.bench.turns import bench_parser
from tests.long.record import Row, record

FOLDERS = ("examples", "research")
ALGORITHMS = ("ppo", "distillation", "grpo", "sft", "dpo", "rm")
"""Sections that name the algorithm; PPO's and distillation's files may have others beside theirs."""
MEDIA = "images or sound"
SHOWN = 40
"""Reasons that are printed."""
RECORDED = 25
"""Reasons that docs/ shows."""
_MODELS = Path(__file__).parent / "models"
_NANO = json.loads((_MODELS / "nemotron3_nano_30b_a3b.config.json").read_text())
_QWEN3_30B = json.loads((_MODELS / "qwen3_30b_a3b.config.json").read_text())
MODELS: dict[str, dict[str, object]] = {
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": _NANO,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NANO,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B | {"max_position_embeddings": 262144, "rope_theta": 10000000},
    "Qwen/Qwen3-30B-A3B-Thinking-2507": _QWEN3_30B | {"max_position_embeddings": 262144, "rope_theta": 10000000},
} | {model: group["config"] for group in json.loads((_MODELS / "hub.json").read_text()) for model in group["ids"]}
"""Id on the Hugging Face Hub -> what of its config.json says its sizes. "origin" names the public files that they were
taken from: repository, commit and path.
"""

# "key=value (file:line): rule; way out", "key=value: rule; way out", and messages without a key.
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,.]*(?:e-?\d+)?(?!\w)")
_VALUE = re.compile(r"(?<=\w)=[^\s,;]+")
_SOUND_OR_IMAGES = re.compile(r"-VL-|omni", re.IGNORECASE)


@dataclass
class Outcome:
    """Result of checking one file."""

    file: str
    algorithm: str
    backend: str
    """Backend that trains: megatron, automodel or dtensor; "-" where nothing is trained."""
    model: str
    refused: list[str] = field(default_factory=list)
    """Distinct reasons, as `reason_of` writes them."""
    unchecked: list[str] = field(default_factory=list)
    """Values that rules lack and so could not be applied."""
    failure: str = ""
    """Traceback."""
    seconds: float = 0.0

    @property
    def is_megatron(self) -> bool:
        """True when Megatron trains a language model here."""
        return self.backend == "megatron" and self.algorithm != MEDIA

    @property
    def is_accepted(self) -> bool:
        """True when nothing is refused."""
        return not self.refused and not self.failure


def main() -> int:
    """Checks every file, prints the tables, and records. Exit code 1 if a check fails with a traceback."""
    parser = bench_parser(__doc__)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="root of a checkout of NeMo RL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found of every file here")
    arguments = parser.parse_args()
    checkout: Path = arguments.checkout.resolve()
    begin = time.perf_counter()
    outcomes = check_files(checkout)
    if not outcomes:
        parser.error(
            f"{checkout} has no config files below {' or '.join(FOLDERS)}; give the root of a checkout of NeMo RL"
        )
    print_report(outcomes)
    print(
        f"\n{len(outcomes)} files in {time.perf_counter() - begin:.0f} s; the slowest took "
        f"{max(each.seconds for each in outcomes):.1f} s"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8"
        )
    if not arguments.no_record:
        command = f"python -m scripts.bench.nemo_recipes RL@{commit_of(checkout)}"
        record("nemo_recipes", group_rows(outcomes), command=command)
        record("nemo_reasons", reason_rows(megatron(outcomes))[:RECORDED], command=command)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def commit_of(checkout: Path) -> str:
    """Short hash of the checkout's commit; "unknown" in a copy without history."""
    if not (checkout / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def check_files(checkout: Path) -> list[Outcome]:
    """Result of checking every file of a checkout, on as many cores as this process may use."""
    files = [path for folder in FOLDERS for path in sorted((checkout / folder).glob("**/*.yaml"))]
    with tempfile.TemporaryDirectory() as cache:
        # As a download of this file alone would leave them.
        for model, hf_config in MODELS.items():
            for name, text in {
                "refs/main": "0" * 40,
                f"snapshots/{'0' * 40}/config.json": json.dumps(hf_config),
            }.items():
                path = Path(cache, f"models--{model.replace('/', '--')}", name)
                path.parent.mkdir(parents=True)
                path.write_text(text)
        prepare = partial(_prepare, checkout, cache)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), initializer=prepare) as pool:
            return list(filter(None, pool.map(partial(check_file, checkout), files, chunksize=4)))


def _prepare(checkout: Path, cache: str) -> None:
    os.chdir(checkout)
    # Read when huggingface_hub is first imported.
    os.environ["HF_HUB_CACHE"] = cache


def check_file(checkout: Path, path: Path) -> Outcome | None:
    """Result of checking one file; None if it says neither how to train nor how to evaluate."""
    settings = read_settings(path)
    if not {key[0] for key in settings} & {"policy", "generation"}:
        return None
    outcome = Outcome(str(path.relative_to(checkout)), algorithm_of(settings), backend_of(settings), model_of(settings))
    begin = time.perf_counter()
    try:
        checked = examine(path, [], to_evaluate=is_evaluation(settings))
        outcome.refused = sorted({reason_of(problem) for problem in checked.refused})
        outcome.unchecked = [reason_of(problem) for problem in checked.unchecked]
    except Exception:  # whatever it is, it is what this looks for
        outcome.failure = traceback.format_exc()
    outcome.seconds = time.perf_counter() - begin
    return outcome


def reason_of(problem: Problem) -> str:
    """A problem as its key and rule, without the values and places that differ from file to file."""
    rule = problem.rule.removeprefix(f"{problem.key} ")
    return f"{problem.key or problem.id}: {_NUMBER.sub('N', _VALUE.sub('=…', rule.split('; ')[0]))}"


def algorithm_of(settings: Settings) -> str:
    """Algorithm of a file, as the report groups it."""
    processors = [
        setting.value for key, setting in settings.items() if key[0] == "data" and key[-1].endswith("processor")
    ]
    many_media = any("limit_mm_per_prompt" in key for key in settings) or any(
        str(value).startswith("vlm") for value in processors
    )
    if many_media or _SOUND_OR_IMAGES.search(model_of(settings)):
        return MEDIA
    if is_evaluation(settings):
        return "evaluation"
    sections = sections_of(settings)
    if any(key[0] == "on_policy_distillation" and len(key) > 1 for key in settings):
        return "distillation"
    return next(name for name in ALGORITHMS if name in sections)


def backend_of(settings: Settings) -> str:
    """Backend that trains."""
    values = {".".join(key): setting.value for key, setting in settings.items()}
    if values.get("policy.megatron_cfg.enabled") is True:
        return "megatron"
    if not values.get("policy.dtensor_cfg.enabled"):
        return "-"
    return "automodel" if values.get("policy.dtensor_cfg._v2") else "dtensor"


def model_of(settings: Settings) -> str:
    """The model's name as written."""
    return next(
        (
            str(settings[key].value)
            for key in (("policy", "model_name"), ("generation", "model_name"))
            if key in settings
        ),
        "",
    )


def group_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row per algorithm and backend, one of all language models that Megatron trains, and one of all."""
    groups = defaultdict[tuple[str, str], list[Outcome]](list)
    for outcome in outcomes:
        groups[outcome.algorithm, outcome.backend].append(outcome)
    ordered = sorted(groups.items(), key=lambda item: (item[0][1] != "megatron", -len(item[1]), item[0]))
    whole = count_row("all language models", "megatron", megatron(outcomes)), count_row("all", "all", outcomes)
    return [*(count_row(*group, part) for group, part in ordered), *whole]


def megatron(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes of language models that Megatron trains."""
    return [outcome for outcome in outcomes if outcome.is_megatron]


def count_row(algorithm: str, backend: str, outcomes: Sequence[Outcome]) -> Row:
    """The counts of a group."""
    accepted = [outcome for outcome in outcomes if outcome.is_accepted]
    reasons = reason_rows(outcomes)
    return {
        "algorithm": algorithm,
        "trained by": backend,
        "files": len(outcomes),
        "accepted, model known": sum(not outcome.unchecked for outcome in accepted),
        "accepted, model unknown": sum(bool(outcome.unchecked) for outcome in accepted),
        "refused": len(outcomes) - len(accepted),
        "refused, needing a GPU": sum(NEEDS_GPU in " ".join(outcome.refused) for outcome in outcomes),
        "refused for one reason": sum(len(outcome.refused) == 1 for outcome in outcomes),
        "most often refused": f"{str(reasons[0]['reason']).partition(':')[0]} ({reasons[0]['files']})"
        if reasons
        else None,
    }


def reason_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row per reason, the most frequent first: how many files have it, and how many have no other."""
    counts = Counter(reason for outcome in outcomes for reason in outcome.refused)
    alone = Counter(outcome.refused[0] for outcome in outcomes if len(outcome.refused) == 1)
    return [
        {"reason": reason, "files": count, "refused for it alone": alone[reason]}
        for reason, count in counts.most_common()
    ]


def print_report(outcomes: Sequence[Outcome]) -> None:
    """Counts per group, reasons by frequency, what one reason alone refuses, and tracebacks."""
    for row in group_rows(outcomes):
        print(
            "{algorithm:<20} {trained by:<10} {files:>4} files; accepted {accepted, model known:>4} with their "
            "models known, {accepted, model unknown:>4} unknown; refused {refused:>4}".format(**row)
        )
    for title, part in (("all files", outcomes), ("language models that Megatron trains", megatron(outcomes))):
        rows = reason_rows(part)
        print(f"\nReasons in {title}: files, and files that nothing else refuses")
        for row in rows[:SHOWN]:
            print("{files:>4} {refused for it alone:>4}  {reason}".format(**row))
        if len(rows) > SHOWN:
            print(f"          and {len(rows) - SHOWN} more")
    print("\nRefused for one reason only, language models that Megatron trains:")
    for outcome in sorted(megatron(outcomes), key=lambda outcome: outcome.refused):
        if len(outcome.refused) == 1:
            print(f"  {outcome.refused[0]}\n    {outcome.file}")
    for outcome in outcomes:
        if outcome.failure:
            print(f"\n{outcome.file}\n{outcome.failure}")


if __name__ == "__main__":
    sys.exit(main())
