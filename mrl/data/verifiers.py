# SPDX-License-Identifier: Apache-2.0
"""Environments of the library verifiers (`env.verifiers`): their rows, which a program in their own Python prints."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mrl.config.errors import ConfigError, Kind, Problem
from mrl.config.schema.env import FROM_VERIFIERS, EnvConfig

PROGRAM = Path(__file__).with_name("verifiers_child.py")
REFUSED = 3
"""Exit code of the program that says what is missing."""
ROWS_S = 1800
"""Seconds for all rows: an environment may download its data set first."""
NOT_THEIRS = ("PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables of this Python, which the program must not inherit."""


def command_of(name: str, section: EnvConfig, split: str = "train") -> list[str]:
    """Words of the program that serves an environment, or prints its rows."""
    spec = {"name": name, "args": section.verifiers_args.get(name) or {}, "split": split}
    # -P: modules are not looked for in the program's own folder.
    return [section.verifiers[name], "-P", str(PROGRAM), json.dumps(spec, sort_keys=True)]


def variables_of(python: str, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The program's environment variables: modules of the run's folder are found, and tools beside its Python.

    `inherited` are those that it starts from; None = this process's.
    """
    given = os.environ if inherited is None else inherited
    variables = {name: value for name, value in given.items() if name not in NOT_THEIRS}
    for name, first in (("PATH", os.path.dirname(python)), ("PYTHONPATH", os.getcwd())):
        variables[name] = os.pathsep.join(filter(None, (first, given.get(name))))
    return variables


def find_rows(source: str, section: EnvConfig, *, split: str) -> Path:
    """The file with the rows of `verifiers:NAME`. ConfigError: it is not installed, or its arguments do not fit."""
    name = source.removeprefix(FROM_VERIFIERS)
    return _write_rows(name, tuple(command_of(name, section, split)))


@functools.cache
def _write_rows(name: str, command: tuple[str, ...]) -> Path:
    python, key = command[0], f"env.verifiers.{name}"

    def refused(rule: str, way_out: str, kind: Kind = "to be provided") -> ConfigError:
        return ConfigError([Problem("verifiers", key, python, rule, way_out, kind)])

    if shutil.which(python) is None:
        raise refused("no such program on this machine", "give the Python in which verifiers is installed")
    folder = tempfile.mkdtemp(dir=_folder().name)
    file = Path(folder) / f"{name.rpartition('/')[2]}.jsonl"
    try:
        with file.open("w", encoding="utf-8") as rows:
            done = subprocess.run(
                [*command, "rows"],
                stdout=rows,
                stderr=subprocess.PIPE,
                text=True,
                env=variables_of(python),
                timeout=ROWS_S,
            )
    except subprocess.TimeoutExpired:
        raise refused(f"it has given no rows within {ROWS_S} s", "download what it reads before the start") from None
    if done.returncode == REFUSED:
        raise refused(**json.loads(file.read_text(encoding="utf-8").splitlines()[-1]))
    if done.returncode:
        raise refused(f"its program ended with code {done.returncode}: {done.stderr.strip()[-1000:]}", "correct it")
    return file


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mrl-verifiers-")
