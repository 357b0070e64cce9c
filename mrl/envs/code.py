"""Programs: the last code block of the text against the row's tests, all of which must pass. Runs in `mrl.envs.child`."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from mrl.envs import sandbox
from mrl.envs.task import Outcome, Score, Task, field_of, text_after_thinking

CODE_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Test:
    """What a program is given, and what must come of it."""

    given: str
    """stdin, or one JSON value per line: the arguments."""
    expected: str
    """stdout, or the returned value as JSON."""


def make(test_timeout_s: float, timeout_s: float) -> Score:
    """The reward function; a test may take `test_timeout_s`, all tests of a program `timeout_s`."""
    return functools.partial(score, test_timeout_s=test_timeout_s, timeout_s=timeout_s)


def score(task: Task, *, test_timeout_s: float, timeout_s: float) -> Outcome:
    """1 if the program passes every test, else 0; it is not tried further after the first failure. `extracted` tells what happened.

    A program that runs out of its time has failed, as in a contest.

    Raises:
        ValueError: the row has no tests, or they are none.
    """
    tests, function = tests_of(task.fields)
    program = last_code_block(text_after_thinking(task.text))
    if program is None:
        return Outcome(0.0, extracted="no code block")
    end = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="mrl-code-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "program.py"
        file.write_text(program, encoding="utf-8", errors="replace")
        for index, test in enumerate(tests):
            seconds = min(test_timeout_s, end - time.monotonic())
            reason = run_test(file, test, function, seconds) if seconds > 0 else "no time left"
            if reason is not None:
                return Outcome(0.0, extracted=f"test {index + 1} of {len(tests)}: {reason}")
    return Outcome(1.0, extracted=f"passed {len(tests)} tests")


def tests_of(fields: dict[str, object]) -> tuple[list[Test], str]:
    """The tests of a row, `verifier_metadata.unit_tests` or `unit_tests`, and the function that they call; empty: stdin and stdout.

    Raises:
        ValueError: they are not there, or not lists of texts of equal length.
    """
    metadata = fields.get("verifier_metadata")
    tests = field_of(metadata if isinstance(metadata, dict) else fields, "unit_tests", dict)
    assert isinstance(tests, dict)
    inputs, outputs = field_of(tests, "inputs", list), field_of(tests, "outputs", list)
    assert isinstance(inputs, list) and isinstance(outputs, list)
    if len(inputs) != len(outputs) or not inputs or not all(isinstance(text, str) for text in inputs + outputs):
        raise ValueError(f"unit_tests must have texts, as many inputs as outputs, at least one; not {len(inputs)} and {len(outputs)}")
    function = tests.get("fn_name") or ""
    return [Test(given, expected) for given, expected in zip(inputs, outputs, strict=True)], str(function)


def last_code_block(text: str) -> str | None:
    """What the last pair of ``` lines encloses; None if there is none."""
    blocks = CODE_BLOCK.findall(text)
    return blocks[-1] if blocks else None


def run_test(program: Path, test: Test, function: str, seconds: float) -> str | None:
    """Why the program fails the test; None if it passes. `function` as for `mrl.envs.sandbox`.

    Raises:
        ValueError: arguments or result of the test are not JSON.
    """
    folder = program.parent
    given = test.given if not function else json.dumps([json.loads(line) for line in test.given.splitlines() if line.strip()])
    expected = json.loads(test.expected) if function else None
    (folder / "stdin").write_text(given, encoding="utf-8")
    (folder / sandbox.RESULT).unlink(missing_ok=True)
    arguments = [sys.executable, "-I", sandbox.__file__, str(program), function, str(seconds)]
    # Into a file, which the kernel limits: a pipe would fill this process's memory.
    with (folder / "stdin").open() as stdin, (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        try:
            done = subprocess.run(arguments, stdin=stdin, stdout=stdout, stderr=stderr, cwd=folder, env={}, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds:.3g} s"
    if done.returncode != 0:
        lines = (folder / "stderr").read_text(errors="replace").strip().splitlines()
        return f"exit code {done.returncode}{', ' + lines[-1][:200] if lines else ''}"
    if not function:
        return None if same_output((folder / "stdout").read_text(errors="replace"), test.expected) else "wrong output"
    try:
        returned = json.loads((folder / sandbox.RESULT).read_text())
    except (OSError, ValueError) as error:
        return f"no result: {error}"[:200]
    return None if returned == expected else "wrong result"


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same lines, apart from white space around them; numbers of a line compare by value."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(a == b or _same_numbers(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    try:
        return [Decimal(token) for token in ours] == [Decimal(token) for token in theirs]
    except InvalidOperation:
        return False
