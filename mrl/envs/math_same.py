# SPDX-License-Identifier: Apache-2.0
"""Compares the readings of two answers: forms first, and numbers where the answer leaves no function that the expected one has not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction

from mrl.envs.math_answer import FAULTS, REAL_LINE, Reading, Value, words
from mrl.envs.math_sums import atom, evaluate, rational, scaled

TEMPERATURES = ({"degree", "Celsius"}, {"degree", "Fahrenheit"})
CHOICE = re.compile(r"\(?([A-Z])\)?[.:]?")
CHOSEN = re.compile(r"(?i:choice|option|answer)?\(?([A-Z])(?:\)?$|\)[.:]?|[.:])")
LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")
# Places of decimals that are rounded, as 0.333333 for 1/3; math-verify rounds to six.
PLACES, DECIMAL_TOLERANCE, RELATIVE_TOLERANCE = 6, 5.1e-7, 1e-5
EXACT_TOLERANCE = 1e-12


def agrees(answer: Reading, expected: Reading) -> bool | None:
    """True if the answer says what the expected one says, and leaves no more to compute; None if the expected one cannot be read."""
    if answer.is_contradiction:
        return False
    if answer.text == expected.text or re.sub("_.*", "", expected.text) == answer.text and re.fullmatch(r"\d+_(\{?\d+\}?)", expected.text):
        return True
    if (choice := CHOICE.fullmatch(expected.text)) is not None:
        chosen = CHOSEN.match(answer.text)
        if chosen is not None and chosen[1] == choice[1] and not LETTER.search(answer.text, chosen.end()):
            return True
    if not expected.values or expected.is_word:
        said = answer.values[0].text if answer.is_word else words(answer.text)
        return None if not expected.values else said.replace(" ", "") == expected.values[0].text.replace(" ", "")
    if not answer.values:
        return False
    if answer.units and expected.units and not _are_units_alike(answer.units, expected.units):
        return False
    if expected.words and answer.words != expected.words:
        return False
    if answer.name and expected.name and answer.name != expected.name and len(answer.name) == len(expected.name) == 1:
        return False
    if answer.work.left - expected.work.left or (expected.work.symbols and "expand" in expected.work.left - answer.work.left):
        return False
    wanted = expected.values[-1:] if expected.values[-1].kind == "relation" and not expected.name else expected.values
    if any(_same(mine, theirs) for mine in _candidates(answer, expected) for theirs in wanted):
        return True
    if answer.work.functions or not answer.work.compounds <= expected.work.compounds:
        return False
    return any(_equal(mine, theirs, answer, expected) for mine in _candidates(answer, expected) for theirs in wanted)


def _are_units_alike(ours: list[str], theirs: list[str]) -> bool:
    return sorted(ours) == sorted(theirs) or "unit" in ours + theirs or {*ours, *theirs} in TEMPERATURES


def _equal(mine: Value, theirs: Value, answer: Reading, expected: Reading) -> bool:
    """True if two values without variables are the same numbers; decimals have six places, and five digits of small numbers."""
    if mine.kind != theirs.kind or mine.kind not in ("sum", "seq", "list", "matrix", "row"):
        return False
    if mine.kind != "sum":
        is_alike = mine.text == theirs.text and len(mine.parts) == len(theirs.parts)
        return is_alike and all(_equal(one, other, answer, expected) for one, other in zip(mine.parts, theirs.parts, strict=True))
    try:
        found, right = evaluate(mine.sum), evaluate(theirs.sum)
        difference, size = abs(complex(found - right)), abs(complex(right))
    except FAULTS:
        return False
    if isinstance(found, Fraction) and isinstance(right, Fraction):
        if "." not in answer.text or (right * 10**PLACES).denominator == 1:
            return found == right
    if "." in answer.text or "." in expected.text:
        return difference <= min(PLACES, DECIMAL_TOLERANCE, RELATIVE_TOLERANCE * size)
    return difference <= EXACT_TOLERANCE * size


def magnitudes(values: Iterable[Value]) -> Iterable[float]:
    """Absolute values of the numbers in values, as far as they are numbers."""
    for value in values:
        yield from magnitudes(value.parts)
        if value.kind == "sum":
            with suppress(*FAULTS):
                yield abs(complex(evaluate(value.sum)))


def _candidates(answer: Reading, expected: Reading) -> list[Value]:
    values = list(answer.values)
    if expected.values[-1].kind != "relation" or expected.name:
        # The left side of an equation counts only where an equation is expected, and not one that is solved.
        values = [value for value in values if value.kind != "relation" or value.text != "="]
    if expected.is_percent and not answer.is_percent and values[0].kind == "sum":
        values.append(values[0]._replace(sum=scaled(values[0].sum, 100)))
    return values


def _same(mine: Value, theirs: Value) -> bool:
    """True if two values are equal; brackets may be missing, and unordered parts may be in any order."""
    mine, theirs = _unwrapped(mine), _unwrapped(theirs)
    return mine == theirs or _is_written_as(mine, theirs) or _is_loosely(mine, theirs) or _is_loosely(theirs, mine)


def _is_written_as(mine: Value, theirs: Value) -> bool:
    """True if the answer is an accepted other notation of the expected value (not the other way round)."""
    match theirs, mine:
        case Value("seq", (Value("sum", sum=above), Value("sum", sum=below)), ":"), Value("sum", sum=quotient):
            divisor = rational(below) or 10
            return divisor < 10 and scaled(quotient, divisor) == above  # 3:5, and no time of day
        case Value("list", members), Value("all named", named) if len({one.text.partition("_")[0] for one in named}) == 1:
            return Counter(members) == Counter(value for one in named for value in one.parts)
        case Value("all named", named), Value("list", members):
            return members in _orders(named)
    return False


def _is_loosely(one: Value, other: Value) -> bool:
    """True if two values are the same in two ways to write them: with and without brackets or names, in a row or in a column."""
    match one, other:
        case Value("list", members), Value("list", others):
            return Counter(members) == Counter(others)
        case Value("list", members), Value("set", others):
            return set(members) == set(others)
        case Value("list", members), Value("seq", others, "()" | "[]" as brackets):
            return members == others and (brackets == "()" or len(others) > 2)  # [1, 2] is an interval
        case Value("seq", members, "()"), Value("matrix", (Value("row", others),)):
            return members == others
        case Value("seq", members, "()"), Value("matrix", rows):
            return members == tuple(row.parts[0] for row in rows if len(row.parts) == 1)
        case Value("all named", members), Value("all named", others):
            return set(members) == set(others)
        case Value("seq", members, "()"), Value("all named", named):
            return members in _orders(named)
    return False


def _orders(named: tuple[Value, ...]) -> list[tuple[Value, ...]]:
    """The values of names as they are written, and in the order of the names."""
    return [tuple(value for one in given for value in one.parts) for given in (named, sorted(named, key=lambda one: one.text))]


def _unwrapped(value: Value) -> Value:
    if value.kind == "set" and len(value.parts) == 1:
        return value.parts[0]
    return Value("sum", sum=atom(("symbol", "R"))) if value == REAL_LINE else value
