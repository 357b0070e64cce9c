# SPDX-License-Identifier: Apache-2.0
"""Compares the readings of two answers: forms first, and numbers where the answer leaves no function that the expected one has not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction

from mrl.envs.math_answer import FAULTS, REAL_LINE, Reading, Value, words
from mrl.envs.math_sums import atom, evaluate, order, rational, scaled

TEMPERATURES = ({"degree", "Celsius"}, {"degree", "Fahrenheit"})
CHOICE = re.compile(r"\(?([A-Z])\)?[.:]?")
CHOSEN = re.compile(r"(?i:choice|option|answer)?\(?([A-Z])(?:\)?$|\)[.:]?|[.:])")
LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")
# Of decimals that stand for other numbers, as 0.333333; math-verify rounds to six places.
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
        said = answer.values[0].content if answer.is_word else words(answer.text)
        return None if not expected.values else said.replace(" ", "") == expected.values[0].content.replace(" ", "")
    if not answer.values:
        return False
    if answer.units and expected.units and not _are_units_alike(answer.units, expected.units):
        return False
    if expected.words and answer.words != expected.words:
        return False
    if answer.name and expected.name and answer.name != expected.name and len(answer.name) == len(expected.name) == 1:
        return False
    if answer.left - expected.left or (expected.symbols and "expand" in expected.left - answer.left):
        return False
    # Of an equation that is no definition both sides count.
    wanted = expected.values[-1:] if expected.values[-1].kind == "relation" and not expected.name else expected.values
    if any(_same(mine, theirs) for mine in _candidates(answer, expected) for theirs in wanted):
        return True
    if answer.functions or not answer.compounds <= expected.compounds:
        return False
    return any(_equal(mine, theirs, answer, expected) for mine in _candidates(answer, expected) for theirs in wanted)


def _are_units_alike(ours: list[str], theirs: list[str]) -> bool:
    return sorted(ours) == sorted(theirs) or "unit" in ours + theirs or {*ours, *theirs} in TEMPERATURES


def _equal(mine: Value, theirs: Value, answer: Reading, expected: Reading) -> bool:
    """True if two values without variables are the same numbers; decimals have six places, and five digits of small numbers."""
    if mine.kind != theirs.kind or mine.kind not in ("sum", "seq", "list", "matrix"):
        return False
    if mine.kind != "sum":
        ours, others = (tuple(_numbers(value)) for value in (mine, theirs))
        is_alike = mine.sign == theirs.sign and _shape(mine) == _shape(theirs)
        return is_alike and all(_equal(one, other, answer, expected) for one, other in zip(ours, others, strict=True))
    try:
        found, right = (evaluate(value.content) for value in (mine, theirs))
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
        if value.kind == "sum":
            with suppress(*FAULTS):
                yield abs(complex(evaluate(value.content)))
        elif value.kind in ("seq", "list", "matrix"):
            yield from magnitudes(_numbers(value))


def _shape(value: Value) -> list[int]:
    return [0 if isinstance(member, Value) else len(member) for member in value.content]


def _numbers(value: Value) -> Iterable[Value]:
    for member in value.content:
        yield from (member,) if isinstance(member, Value) else member


def _candidates(answer: Reading, expected: Reading) -> list[Value]:
    values = list(answer.values)
    if expected.values[-1].kind != "relation" or expected.name:
        # The left side of an equation counts only where an equation is expected, and not one that is solved.
        values = [value for value in values if value.kind != "relation" or value.sign != "="]
    if expected.is_percent and not answer.is_percent and values[0].kind == "sum":
        values.append(Value("sum", scaled(values[0].content, Fraction(100))))
    return values


def _same(mine: Value, theirs: Value) -> bool:
    """True if two values say the same; brackets may be missing, and what is in no order may be in any."""
    mine, theirs = _unwrapped(mine), _unwrapped(theirs)
    if mine == theirs:
        return True
    match theirs, mine:
        case (Value("seq", (Value("sum", above), Value("sum", below)), ":"), Value("sum", quotient)) if (rational(below) or 10) < 10:
            return scaled(quotient, rational(below) or Fraction(0)) == above  # 3:5, and no time of day
        case Value("list", members), Value("list", others):
            return Counter(map(order, members)) == Counter(map(order, others))
        case (Value("set", members), Value("list", others)) | (Value("list", others), Value("set", members)):
            return members == frozenset(others)
        case Value("named", pairs), Value("named", others):
            return dict(pairs) == dict(others)
        case Value("list", members), Value("named", pairs) if len({str(name).partition("_")[0] for name, _ in pairs}) == 1:
            return Counter(map(order, members)) == Counter(order(value) for _, value in pairs)
        case (Value("list", members), Value("seq", others, "()")) | (Value("seq", members, "()"), Value("list", others)):
            return members == others
        case (Value("seq", members, "()"), Value("matrix", rows)) | (Value("matrix", rows), Value("seq", members, "()")):
            return members == tuple(row[0] for row in rows if len(row) == 1) or (len(rows) == 1 and members == rows[0])
        case (Value("seq", members, "()"), Value("named", pairs)) | (
            Value("named", pairs),
            (Value("seq", members, "()") | Value("list", members)),
        ):
            return members in (tuple(value for _, value in given) for given in (pairs, sorted(pairs, key=order)))
    return False


def _unwrapped(value: Value) -> Value:
    if value.kind == "set" and len(value.content) == 1:
        return next(iter(value.content))
    return Value("sum", atom(("symbol", "R"))) if value == REAL_LINE else value
