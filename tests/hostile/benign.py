# SPDX-License-Identifier: Apache-2.0
"""Usual programs, which do what they may: tests/hostile/benign_programs.txt."""

from __future__ import annotations

from tests.sources import ROOT

_PARTS = (ROOT / "tests" / "hostile" / "benign_programs.txt").read_text(encoding="utf-8").split("## ")[1:]
BENIGN = {name: source for name, _, source in (part.partition("\n") for part in _PARTS)}
"""Sources by name; each is one that ends without an exception in an empty folder."""

RUNNER = """
import os, shutil, sys
home, failed = os.getcwd(), []
for name, source in sources.items():
    os.chdir(home)
    os.mkdir("work")
    os.chdir("work")
    try:
        exec(source, {"os": os, "sys": sys, "__name__": "benign"})
    except BaseException as error:
        failed.append(f"{name}: {error!r}")
    os.chdir(home)
    shutil.rmtree("work", ignore_errors=True)
"""


def program(last_line: str = "print(failed)") -> str:
    """One program that runs all of them, each in an empty folder; then `failed` has their names and errors."""
    return f"sources = {BENIGN!r}\n{RUNNER}\n{last_line}\n"
