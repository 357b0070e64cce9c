# SPDX-License-Identifier: Apache-2.0
"""Writes symbolic answers in one notation, where math-verify does not find them equal: vectors, intervals, `\\pm`."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

from sympy import And, Basic, Equality, FiniteSet, Interval, Reals, Set, Symbol, Union, oo
from sympy.core.relational import GreaterThan, LessThan, Relational, StrictGreaterThan, StrictLessThan, Unequality

from mrl.envs.math_number import spelled

_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?", ""),
        (r"\\(?:boldsymbol|bm|mathbf|mathrm|vec|hat|text|mathit)\s*+\{\s*+([A-Za-z])\s*+\}", r"{\1}"),
        # `\frac{1}{2} m g`: math-verify takes letters apart from each other for a unit.
        (r"(?<![A-Za-z\\])([A-Za-z]) (?=[A-Za-z](?![A-Za-z]))", r"\1"),
        (r"\\[lr]brace(?![A-Za-z])", lambda match: "\\{" if "l" in match[0][:2] else "\\}"),
        (r"\\(?:langle|rangle)(?![A-Za-z])", lambda match: "(" if "l" in match[0][:2] else ")"),
        (
            (
                r"\\varnothing(?![A-Za-z])|\\\{\s*+\\\}|\\text\{\s*+no (?:real )?solutions?\s*+\}|\bno (?:real "
                r")?solutions?\b"
            ),
            r"\\emptyset ",
        ),
        (r"\\text\{\s*+all real numbers\s*+\}|\ball real numbers\b", r"\\mathbb{R}"),
        (r"\\bigcup(?![A-Za-z])", r"\\cup "),
        (r"\\leqslant(?![A-Za-z])", r"\\le "),
        (r"\\geqslant(?![A-Za-z])", r"\\ge "),
        (r"\\log_\{?e\}?", r"\\ln "),
        (r"\\(?:mathbb|mathbf)\s*+\{?R\}?", r"\\mathbb{R}"),
        (r"^\\\{\s*+[a-z]\s*+(?:\\in\s*+\\mathbb\{R\}\s*+)?(?::|\||\\mid)(.*)\\\}$", r"\1"),
        (
            r"\\begin\{([pb])matrix\}((?:[^&\\]|\\\\|\\[a-zA-Z]+)*)\\end\{\1matrix\}",
            lambda match: f"({match[2].replace(chr(92) * 2, ',')})",
        ),
        (r"^[A-Z](?=\([^()]*,[^()]*\)$)", ""),
        (r",? ?(?:\\quad)? ?\(?[a-z] ?\\in ?\\mathbb\{?[ZN]\}?\)?$", ""),
    )
)


def evened(text: str) -> str:
    """The answer with notations that mean the same written as one; `a \\pm b` becomes both numbers."""
    text = " ".join(spelled(text).split()).rstrip(".")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    if text.count("\\pm") == 1:
        name, _, value = text.rpartition("=")
        text = f"{value.replace(chr(92) + 'pm', '+')}, {value.replace(chr(92) + 'pm', '-')}" if len(name) < 4 else text
    return text.strip()


def as_set(value: object) -> object:
    """The set that inequalities of a name describe, as `x > 2`; any other value as it is."""
    try:
        return _solved(value)
    except ValueError:
        return value


def _solved(value: Any) -> Set:
    if isinstance(value, And):
        return reduce(lambda one, other: one.intersect(other), map(_solved, value.args))
    if isinstance(value, FiniteSet) and value.args and all(isinstance(part, Relational | And) for part in value.args):
        return Union(*map(_solved, value.args))
    if isinstance(value, Equality) and isinstance(value.lhs, Symbol) and isinstance(value.rhs, Set):
        return value.rhs
    if not isinstance(value, Relational):
        raise ValueError("no inequality")
    value = value if isinstance(value.lhs, Symbol) else value.reversed
    bound = value.rhs
    if (
        not isinstance(value.lhs, Symbol)
        or not isinstance(bound, Basic)
        or not bound.is_number
        or bound.is_extended_real is not True
    ):
        raise ValueError("no inequality of a name and a number")
    match value:
        case Unequality():
            return Reals - FiniteSet(bound)
        case StrictLessThan() | LessThan():
            return Interval(-oo, bound, True, isinstance(value, StrictLessThan))
        case StrictGreaterThan() | GreaterThan():
            return Interval(bound, oo, isinstance(value, StrictGreaterThan), True)
    raise ValueError("no inequality")
