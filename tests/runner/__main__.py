# SPDX-License-Identifier: Apache-2.0
"""The tests by part, a few at once: `python -m tests.runner [--full | --busy | --long] [PART...]`, for scripts/test.sh.

Parts never end for being slow. The last screen says what ran, what was skipped and why, and where the time went.
"""

from __future__ import annotations

import argparse
import compileall
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

from tests import megatron
from tests.runner.part import Result
from tests.runner.progress import Progress, read_progress
from tests.sources import ROOT

MAX_PARTS, MAX_HEAVY = 3, 2
"""Parts that run at a time. Most tests start processes and wait for them, and one part would not keep two
cores busy.
"""
PROGRESS_S = 20.0
"""Between two lines of progress; on a terminal one line is written over and over."""
NUM_BUSY_LOOPS = 4
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends with the runner, however that ends."""
REFERENCE_S = 0.33
"""Processor seconds of `speed_loop` on the host whose minutes tests/README.md has."""

PYTEST = [sys.executable, "-m", "pytest", "--durations=10", "-rs"]
UNIT_FOLDERS = sorted({path.parent.name for path in (ROOT / "tests/unit").glob("*/test_*.py")} - {"config"})
PARTS: dict[str, list[str]] = {
    "stack": [*PYTEST, "tests/stack", "--ignore=tests/stack/policy"],
    "learn": [*PYTEST, "tests/learn"],
    "policy": [*PYTEST, "tests/stack/policy"],
    "unit": [*PYTEST, *(f"tests/unit/{name}" for name in UNIT_FOLDERS)],
    "smoke": [*PYTEST, "tests/smoke"],
    "faults": [*PYTEST, "tests/faults"],
    "rehearsal": [*PYTEST, "tests/rehearsal"],
    "config": [*PYTEST, "tests/unit/config"],
    "entries": [*PYTEST, "tests/unit", *(f"--ignore=tests/unit/{name}" for name in (*UNIT_FOLDERS, "config"))],
    "cluster": [*PYTEST, "tests/cluster"],
    "types": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable],
    "proof": [*PYTEST, "tests/proof"],
    "hostile": [*PYTEST, "tests/hostile"],
    "browser": [*PYTEST, "tests/browser"],
    "style": ["bash", "-c", f'"{sys.executable}" -m ruff check . && "{sys.executable}" -m ruff format --check .'],
}
"""Part -> command. Long ones first, so that both workers end at about the same time."""
QUICK = ("unit", "smoke", "config", "entries", "proof", "style")
BUSY = ("stack", "unit", "smoke", "config", "entries", "proof")
LIGHT = ("unit", "config", "entries", "types", "proof", "hostile", "browser", "style")
"""Parts of few processes at a time, and little memory; the others are heavy."""
NEWCOMER_ONLY = ("smoke",)
"""Parts of which the full run has other tests for each claim."""
ON_NEWEST = ("stack", "policy", "smoke", "parity_table")
"""Parts that run the megatron-core of GPU hosts, which pip does not install on the Python of the suites."""


def main() -> int:
    arguments = parse(sys.argv[1:])
    commands = choose(arguments)
    compile_sources(ROOT / "mrl", ROOT / "conversion", ROOT / "tests")
    loops = [
        subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(NUM_BUSY_LOOPS if arguments.busy else 0)
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="mrl-tests-") as folder:
            variables = environments(commands, Path(folder))
            return run_all(commands, variables, Path(folder), show_all=arguments.full or arguments.long)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/test.sh", description="Tests on a CPU host; tests/README.md says what each part shows."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--full", action="store_true", help="every suite; CI runs this")
    which.add_argument("--busy", action="store_true", help=f"{', '.join(BUSY)} beside {NUM_BUSY_LOOPS} busy loops")
    which.add_argument("--long", action="store_true", help='tests marked long("PART"), one part after the other')
    parser.add_argument("--with-slurm", action="store_true", help="installs Slurm, a system package, if this may")
    parser.add_argument("--with-chromium", action="store_true", help="installs Chromium in the same way")
    parser.add_argument("parts", nargs="*", metavar="PART", help="only these parts")
    arguments = parser.parse_args(words)
    known = long_parts() if arguments.long else list(PARTS)
    if wrong := [name for name in arguments.parts if name not in known]:
        parser.error(f"no part {', '.join(wrong)}; parts are {', '.join(known)}")
    return arguments


def long_parts() -> list[str]:
    """The names in `mark.long(NAME)` of all tests, sorted."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted({name for text in texts for name in re.findall(r'mark\.long\("([^"]+)"\)', text)})


def choose(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The commands of the parts that are asked for."""
    slurm = ["--with-slurm"] if arguments.with_slurm else []
    if arguments.long:
        return {name: [*PYTEST, "tests", "--long", name, *slurm] for name in arguments.parts or long_parts()}
    default = (
        BUSY if arguments.busy else [name for name in PARTS if name not in NEWCOMER_ONLY] if arguments.full else QUICK
    )
    wanted = arguments.parts or default
    return {
        name: [*command, *(slurm if name == "cluster" else [])] for name, command in PARTS.items() if name in wanted
    }


def compile_sources(*folders: Path) -> None:
    """Compiles to bytecode: where none may be written, each of a thousand processes would compile what it imports."""
    for folder in folders:
        compileall.compile_dir(folder, quiet=2, workers=os.cpu_count() or 1)


def environments(parts: Collection[str], folder: Path) -> dict[str, dict[str, str]]:
    """The environments of those parts that run another megatron-core than the installed one."""
    chosen = [name for name in parts if name in ON_NEWEST]
    if not chosen or megatron.IS_NEWEST:
        return {}
    (place := folder / "megatron").mkdir()
    try:
        variables = megatron.environment(megatron.fetch(place))
        compile_sources(place)
    except (OSError, http.client.HTTPException) as error:
        print(f"no package index answers ({error}): {', '.join(chosen)} run the installed megatron-core", flush=True)
        return {}
    print(f"{', '.join(chosen)}: megatron-core {megatron.VERSION}, as on GPU hosts", flush=True)
    return dict.fromkeys(chosen, variables)


def run_all(
    commands: dict[str, list[str]], variables: Mapping[str, Mapping[str, str]], folder: Path, *, show_all: bool
) -> int:
    """Runs every part, says how far, then what came of it; 1 if one failed. Long parts run alone, as they measure."""
    started, cpu_before = time.monotonic(), psutil.cpu_times()
    speed = speed_loop()
    waiting, running, results = list(commands), dict[str, subprocess.Popen[bytes]](), list[Result]()
    max_parts = 1 if "--long" in next(iter(commands.values())) else MAX_PARTS
    said = started
    while waiting or running:
        while len(running) < max_parts and (name := next_part(waiting, running)):
            waiting.remove(name)
            running[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.runner.part", name, str(folder), *commands[name]],
                cwd=ROOT,
                env=variables.get(name),
            )
        time.sleep(0.2)
        for name in [name for name, process in running.items() if process.poll() is not None]:
            results.append(result_of(name, folder, running.pop(name).returncode))
            end_line(
                f"{clock(time.monotonic() - started)} {outcome(results[-1], read_progress(folder / f'{name}.events'))}"
            )
            if show_all or results[-1].code:
                print((folder / f"{name}.txt").read_text(encoding="utf-8", errors="replace"), flush=True)
        if running and time.monotonic() - said > (1.0 if sys.stdout.isatty() else PROGRESS_S):
            said = time.monotonic()
            say_progress(
                f"{clock(said - started)} {', '.join(how_far(name, folder) for name in running)}; {len(waiting)} "
                "parts wait"
            )
    cpu_after = psutil.cpu_times()
    busy = sum(getattr(cpu_after, kind) - getattr(cpu_before, kind) for kind in ("user", "nice", "system"))
    report(
        results,
        folder,
        seconds=time.monotonic() - started,
        others_s=busy - sum(result.processor_s for result in results),
        speed=speed,
    )
    return any(result.code for result in results)


def next_part(waiting: Iterable[str], running: Collection[str]) -> str | None:
    """The first part that may start beside those that run."""
    has_room = sum(name not in LIGHT for name in running) < MAX_HEAVY
    return next((name for name in waiting if has_room or name in LIGHT), None)


def result_of(name: str, folder: Path, code: int) -> Result:
    """The result that a part has written, or that of one which somebody has killed."""
    path = folder / f"{name}.result"
    if not path.exists():
        return Result(name, code or 1, 0.0, 0.0, 0.0, "", None)
    return Result(**json.loads(path.read_text(encoding="utf-8")))


def how_far(name: str, folder: Path) -> str:
    progress = read_progress(folder / f"{name}.events")
    return f"{name} {progress.num_done}/{progress.num_tests}" if progress.num_tests else name


def say_progress(text: str) -> None:
    """One line of progress, which the next one overwrites on a terminal."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text[: os.get_terminal_size().columns - 1]}", end="", flush=True)
    else:
        print(text, flush=True)


def end_line(text: str) -> None:
    print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def outcome(result: Result, progress: Progress) -> str:
    """One line on a part: what came of it, and where its time went."""
    counts = ", ".join(
        f"{number:,} {what}" for what, number in sorted(progress.outcomes.items(), key=lambda item: -item[1])
    )
    verdict = "ok" if not result.code else "FAILED"
    slept = f", asleep {clock(result.asleep_s)}" if result.asleep_s >= 1 else ""
    where = f" ({result.longest_sleep})" if slept and result.longest_sleep else ""
    return (
        f"{result.name:<10} {verdict:<6} {clock(result.seconds):>6}, processor "
        f"{clock(result.processor_s)}{slept}{where}  {counts}"
    )


def report(results: list[Result], folder: Path, *, seconds: float, others_s: float, speed: float) -> None:
    """The last screen: parts, skips, why anything failed, and what kind of host this is."""
    progress = {result.name: read_progress(folder / f"{result.name}.events") for result in results}
    print("\n=== What ran")
    for result in results:
        print(outcome(result, progress[result.name]))
    skipped = sum((each.skipped for each in progress.values()), Counter[str]())
    for reason, number in skipped.most_common():
        print(f"skipped {number}: {reason}")
    used = clock(sum(result.processor_s for result in results))
    print(f"{clock(seconds)} in all, processor {used}. {host(speed, others_s / seconds / (os.cpu_count() or 1))}")
    for result in results:
        if result.code:
            print(f"FAILED: {why(result, progress[result.name])}")
    totals = sum((each.outcomes for each in progress.values()), Counter[str]())
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")


def why(result: Result, progress: Progress) -> str:
    """The reason why a part failed."""
    if result.stalled_in:
        return f"{result.name}: nothing moved any more in {result.stalled_in}; ended. Its output stands above"
    if progress.failed:
        return f"{result.name}: {', '.join(progress.failed[:3])}{' ...' if progress.failed[3:] else ''}"
    return f"{result.name}: exited with {result.code}; its output stands above"


def host(speed: float, others: float) -> str:
    """A sentence on the speed of this host, where it is a reason for long times."""
    reasons = (
        [f"its cores are {speed / REFERENCE_S:.1f} times slower than those of tests/README.md"]
        if speed > 1.25 * REFERENCE_S
        else []
    )
    reasons += [f"other programs used {others:.0%} of its cores"] if others > 0.1 else []
    return (
        f"This host is slow: {', and '.join(reasons)}"
        if reasons
        else "This host is as fast as the one of tests/README.md"
    )


def speed_loop() -> float:
    """Processor seconds of a fixed piece of Python."""
    begun = time.process_time()
    total = 0
    for number in range(12_000_000):
        total += number & 7
    return time.process_time() - begun


if __name__ == "__main__":
    sys.exit(main())
