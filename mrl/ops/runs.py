# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.runs [FOLDER ...]`: lists runs; `show RUN` one with its attempts, `compare RUN RUN` how two differ.

`--json` prints the list as JSON: state, step, last checkpoint, and seconds since the run has written metrics.

Reads run folders as they are, also those of runs that go on, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from conversion.files.reading import parse_json, read_file
from mrl import barred
from mrl.config.texts import aligned, step_span
from mrl.exit_codes import CODES
from mrl.metrics import METRICS as SHOWN
from mrl.metrics import repeats
from mrl.ops.view.run_data import (
    about_lines,
    checkpoints_of,
    differences,
    owner_state,
    progress_lines,
    read_config,
    read_json,
    section_of,
)
from mrl.store.advisories import advisories, facts_of, number
from mrl.store.checkpoints import LEDGER, metrics_in
from mrl.store.identity import CODE
from mrl.store.ledger import LedgerState, apply_event
from mrl.store.loggers.sink import flat
from mrl.store.ranking import read_ranking
from mrl.store.run_files import ABOUT, ENDED, METRIC_KEYS, METRICS, Json, Row, attempts_of, read_rows, setting

RESULTS = ("val/reward", "val/accuracy", "val/val_loss", "val/validation-default_loss", "train/reward", "train/loss")
"""Metrics of a run's result; the first that it has counts."""
NOTHING = "-"
RESULTS_FOLDER = Path("results")
"""Folder of the packaged configs' runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words[:1] in (["show"], ["compare"]) else "list"
    parser = argparse.ArgumentParser(
        prog="mrl.runs" if command == "list" else f"mrl.runs {command}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders",
        nargs={"show": 1, "compare": 2}.get(command, "*"),
        type=Path,
        metavar="FOLDER",
        help="default: results",
    )
    if command == "list":
        parser.add_argument("--json", action="store_true", help="print the list as JSON")
    options = parser.parse_args(words)
    folders = options.folders or [RESULTS_FOLDER]
    # A run's name does, too, as the list has it.
    folders = [
        folder if folder.exists() or not _is_run(RESULTS_FOLDER / folder) else RESULTS_FOLDER / folder
        for folder in folders
    ]
    found = [folder for given in folders for folder in runs_in(given)]
    absent = [folder for folder in folders if not folder.exists() and folder != RESULTS_FOLDER]
    if absent or (command != "list" and found != folders):
        lacking = [folder for folder in folders if folder not in found]
        what = (
            f"no folder {', '.join(map(str, absent))}"
            if absent
            else f"no run in {', '.join(map(str, lacking))}: no config.yaml and metrics"
        )
        there = ", ".join(run.name for run in runs_in(RESULTS_FOLDER))
        parser.error(f"{what}; runs in {RESULTS_FOLDER}: {there or 'none'}")
    if not found:
        parser.error(
            f"no runs in {', '.join(map(str, folders))}; name the folders that hold them, or "
            "checkpointing.checkpoint_dir of one"
        )
    try:
        if command == "list" and options.json:
            lines = [json.dumps([as_data(folder) for folder in found], indent=1)]
        else:
            lines = show(found[0]) if command == "show" else compare(*found) if command == "compare" else listing(found)
    except (OSError, ValueError) as error:
        parser.error(barred(error) or str(error))
    print("\n".join(lines))
    return 0


def runs_in(folder: Path) -> list[Path]:
    """The folder, if it is a run's; else the runs directly in it, the one that changed last at the end."""
    if _is_run(folder):
        return [folder]
    return sorted(filter(_is_run, folder.glob("*")), key=_started)


def _started(run: Path) -> float:
    return (run / "config.yaml" if os.access(run, os.X_OK) else run).stat().st_mtime


def _is_run(folder: Path) -> bool:
    if folder.is_dir() and not os.access(folder, os.X_OK):
        return True  # perhaps: it is somebody else's
    return (folder / "config.yaml").is_file() and ((folder / METRICS).is_file() or (folder / "logs").is_dir())


def listing(folders: Sequence[Path]) -> list[str]:
    """One line for each run, then those that cannot be read."""
    table, unreadable = [("run", "state", "step", "algorithm", "model", "attempts", "result", "changed")], list[str]()
    for folder in folders:
        try:
            config, rows = read_config(folder / "config.yaml"), rows_of(folder)
        except (OSError, ValueError) as error:
            unreadable.append(f"{folder} cannot be read: {barred(error) or error}")
            continue
        facts = dict(progress_lines(rows, config, folder, owner_state(folder)))
        name = next((name for name in RESULTS if any(row.get(name) is not None for row in rows)), None)
        result = NOTHING if name is None else f"{name} {_path_of(rows, name)}"
        if "masked" in facts:
            result = f"{result}; masked: {facts['masked']}"
        of = (str(setting(config, "algorithm")), str(setting(config, "policy.model_name")))
        changed = datetime.fromtimestamp(
            max(path.stat().st_mtime for path in (folder / METRICS, folder / "config.yaml") if path.exists())
        )
        table.append(
            (
                str(folder),
                facts["state"],
                facts["step"],
                *of,
                str(len(attempts_of(folder))),
                result,
                f"{changed:%Y-%m-%d %H:%M}",
            )
        )
    return [*aligned(table), *unreadable]


def as_data(folder: Path) -> Json:
    """One run for `--json`; `error` says why it cannot be read."""
    try:
        config, rows = read_config(folder / "config.yaml"), rows_of(folder)
    except (OSError, ValueError) as error:
        return {"run": str(folder), "error": str(barred(error) or error)}
    metrics, saved = folder / METRICS, checkpoints_of(folder)
    return {
        "run": str(folder),
        "state": dict(progress_lines(rows, config, folder, owner_state(folder)))["state"],
        "step": int(rows[-1]["step"] or 0) if rows else 0,
        "max_num_steps": setting(config, f"{section_of(config)}.max_num_steps"),
        "last_checkpoint": saved[-1]["step"] if saved else None,
        "attempts": len(attempts_of(folder)),
        "seconds_since_metrics": round(time.time() - metrics.stat().st_mtime, 1) if metrics.exists() else None,
    }


def show(folder: Path) -> list[str]:
    """Describes a run: settings, progress, attempts, rollbacks, checkpoints, and the advice that holds now."""
    config, rows = read_config(folder / "config.yaml"), rows_of(folder)
    lines = aligned(
        [
            *about_lines(config, read_json(folder / "about.json")),
            *progress_lines(rows, config, folder, owner_state(folder)),
        ]
    )
    before, code = Json(), dict[str, object]()
    for path in attempts_of(folder):
        now = flat(read_config(path / "config.yaml"))
        started = datetime.fromtimestamp((path / "config.yaml").stat().st_mtime)
        is_newest = path == attempts_of(folder)[-1]
        end = "running" if is_newest and owner_state(folder) == "running" else end_of(path)
        lines.append(f"attempt {int(path.name[4:])}: started {started:%Y-%m-%d %H:%M:%S}; {end}")
        lines += [f"  {line}" for line in differences(before, now)] if before else []
        found = read_json(path / ABOUT).get(CODE)
        own = found if isinstance(found, dict) else {}
        lines += [f"  {name}: its code has changed" for name in own if code.get(name, own[name]) != own[name]]
        before, code = now, own
    lines += [f"rolled back: {text}" for text in rolled_back(folder / LEDGER)]
    texts = read_ranking(folder / "config.yaml").texts(metrics_in(folder))
    sizes = {int(str(one["step"])): int(str(one["bytes"])) / 2**20 for one in checkpoints_of(folder)}
    parts = {step: ", ".join(filter(None, [f"{size:,.1f} MiB", texts.get(step)])) for step, size in sizes.items()}
    saved = ", ".join(f"step {step} ({text})" for step, text in parts.items())
    advice = [advisory.line() for advisory in advisories(rows, facts_of(config))]
    return [*lines, f"checkpoints: {saved or 'none'}", *advice]


def compare(one: Path, other: Path) -> list[str]:
    """Compares two runs: keys that differ, the step at which the curves part, and both results."""
    settings = differences(*(flat(read_config(folder / "config.yaml")) for folder in (one, other)))
    lines = [f"A = {one}", f"B = {other}", *(settings or ["the configs are equal"])]
    rows, others = ({row["step"]: row for row in rows_of(folder)} for folder in (one, other))
    steps = [step for step in rows if step in others]
    if not steps:
        return [*lines, "no step is in both"]

    def differing(step: float | None) -> list[str]:
        names = rows[step].keys() & others[step].keys()
        return sorted(name for name in names if repeats(name) and rows[step][name] != others[step][name])

    parts = next((step for step in steps if differing(step)), None)
    if parts is None:
        lines.append(f"equal metrics in all common steps ({len(steps)})")
    else:
        lines.append(f"the metrics part at step {parts}: {', '.join(differing(parts)[:5])}")
    both = {name for row in rows.values() for name in row} & {name for row in others.values() for name in row}
    # Of an environment each: rewards' components, and what rewards and agents measure.
    own = sorted(name for name in both - SHOWN.keys() if name.startswith(("rollout/", "val/")) and name.count("/") == 2)
    shared = [name for name in (*SHOWN, *own) if name in both and repeats(name)]
    table = [
        ("metric (first -> last)", f"A, {len(rows)} steps", f"B, {len(others)} steps"),
        *((name, *(_path_of(list(each.values()), name) for each in (rows, others))) for name in shared),
    ]
    return [*lines, *aligned(table)]


def rows_of(folder: Path) -> Sequence[Row]:
    """Metrics by step; None for values that are no finite numbers. Lines without a step are left out."""
    rows = read_rows(folder / METRICS, METRIC_KEYS)[0]
    return [
        {
            name: value if isinstance(value, int | float) and math.isfinite(value) else None
            for name, value in row.items()
        }
        for row in rows
        if isinstance(row["step"], int)
    ]


def end_of(attempt: Path) -> str:
    """Says how an attempt ended that does not run any more."""
    found = read_json(attempt / ENDED)
    if not found:
        return "ended without a word: killed, or its host was lost"
    code, said = found.get("code"), str(found.get("text") or "")
    meaning = CODES[code][0].partition(";")[0] if isinstance(code, int) and code in CODES else ""
    reason = said.removeprefix("The attempt ended: ") or meaning
    return f"ended with exit code {code}" + (f": {reason}" if reason else "")


def rolled_back(ledger: Path) -> Iterator[str]:
    """Lists rollbacks: attempts that resumed before the last trained step, or asked prompts again."""
    state = LedgerState()
    for line in read_file(ledger).decode(errors="replace").splitlines() if ledger.exists() else []:
        try:
            event = parse_json(line)
            assert isinstance(event, dict)
            if event["event"] == "rolled_back":
                kept, last = int(event["to_step"]), len(state.trained)
                steps = f"made again: {step_span(kept + 1, last)}; " if last > kept else ""
                yield f"to step {kept}; {steps}prompts asked again: {len(state.taken)}"
            apply_event(state, event)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            yield "the ledger is damaged from here on"
            return


def _path_of(rows: Sequence[Row], name: str) -> str:
    values = [value for row in rows if (value := row.get(name)) is not None]
    return (
        f"{number(values[0])} -> {number(values[-1])}" if len(values) > 1 else number(values[0]) if values else NOTHING
    )
