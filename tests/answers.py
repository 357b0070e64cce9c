# SPDX-License-Identifier: Apache-2.0
"""Answers in mathematics with what they are worth under env.math.strict: tests/unit/envs/math_answers.txt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.sources import ROOT

TABLE = ROOT / "tests" / "unit" / "envs" / "math_answers.txt"
ESCAPES = {"\\u2212": "\u2212", "\\u2009": "\u2009", "\\u00a0": "\u00a0"}


@dataclass(frozen=True)
class Case:
    """One answer."""

    kind: str
    expected: str
    text: str
    is_right: bool
    is_mistaken: bool = False
    """True where strict is known to say the opposite."""


def cases() -> Iterator[Case]:
    """The table's rows; its first line says how it is written."""
    kind = expected = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        mark, _, rest = line.partition(" ")
        for escape, character in ESCAPES.items():
            rest = rest.replace(escape, character)
        match mark:
            case "##":
                kind = rest
            case "=":
                expected = rest
            case "+" | "-" | "+?" | "-?":
                yield Case(kind, expected, f"So we get $\\boxed{{{rest}}}$.", mark[0] == "+", mark.endswith("?"))
            case "+>" | "->" | "+>?" | "->?":
                yield Case(kind, expected, rest.replace("\\n", "\n"), mark[0] == "+", mark.endswith("?"))
            case _:
                raise ValueError(f"{TABLE}: {line!r}")
