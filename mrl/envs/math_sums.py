# SPDX-License-Identifier: Apache-2.0
"""Sums of terms, in which expressions are compared.

Nothing is computed beyond rational numbers: `(x+1)^2`, `\\arctan 1` and `\\frac{1}{\\sqrt{2}-1}` stay what they are, so that a question
that is said again differs from its answer. Standard library only.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterable
from fractions import Fraction

Monomial = frozenset[tuple[object, Fraction]]
"""Atoms (symbols, roots, functions, sums in parentheses) with their powers."""
Term = tuple[Monomial, Fraction]
Sum = frozenset[Term]

ZERO: Sum = frozenset()
MAX_FACTORIAL = 1_000


class Unreadable(ValueError):
    """The text is no mathematics of a known form."""


def number(value: Fraction | int) -> Sum:
    """A rational number."""
    return term({}, Fraction(value)) if value else ZERO


def atom(key: object, power: Fraction | int = 1) -> Sum:
    """One atom to a power."""
    return term({key: Fraction(power)})


def term(powers: dict[object, Fraction], coefficient: Fraction = Fraction(1)) -> Sum:
    """One term of atoms with their powers."""
    return frozenset({(frozenset((key, power) for key, power in powers.items() if power), coefficient)})


def total(terms: Iterable[Term]) -> Sum:
    """The sum of terms, of which some may be alike."""
    totals: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        totals[monomial] = totals.get(monomial, Fraction(0)) + coefficient
    return frozenset((monomial, coefficient) for monomial, coefficient in totals.items() if coefficient)


def rational(value: Sum) -> Fraction | None:
    """The number that a sum is, if it has no atoms."""
    if not value:
        return Fraction(0)
    ((monomial, coefficient), *others) = value
    return coefficient if not others and not monomial else None


def scaled(value: Sum, factor: Fraction | int) -> Sum:
    """The sum with its coefficients multiplied."""
    return frozenset((monomial, coefficient * factor) for monomial, coefficient in value) if factor else ZERO


def order(value: object) -> str:
    """Sort key that is equal for equal values; sets have no order of their own."""
    if isinstance(value, frozenset):
        return f"{{{','.join(sorted(map(order, value)))}}}"
    return f"({','.join(map(order, value))})" if isinstance(value, tuple) else str(value)


def content(value: Sum) -> Fraction:
    """The rational number that all terms share, with the sign of the first in a fixed order."""
    terms = sorted(value, key=lambda term: order(term[0]))
    above = math.gcd(*(coefficient.numerator for _, coefficient in terms))
    below = math.lcm(*(coefficient.denominator for _, coefficient in terms))
    return Fraction(above if terms[-1][1] > 0 else -above, below)


def evaluate(value: Sum) -> Fraction | complex:
    """The number that an expression is, exact if it is rational; Unreadable says that it is none."""
    total: Fraction | complex = Fraction(0)
    for monomial, coefficient in value:
        term: Fraction | complex = coefficient
        for key, power in monomial:
            found = _evaluate_atom(key)
            is_exact = isinstance(found, Fraction) and power.denominator == 1 and abs(power) < MAX_FACTORIAL
            term *= found ** int(power) if is_exact else complex(found) ** float(power)
        total += term
    return total


def _evaluate_atom(key: object) -> Fraction | complex:
    match key:
        case ("symbol", "pi" | "e" | "i" as name):
            return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}[name]
        case ("root", int(degree), radicand):
            return complex(float(radicand)) ** (1 / degree)
        case ("sum", frozenset() as inner):
            return evaluate(inner)
        case ("power", frozenset() as base, frozenset() as exponent):
            return complex(evaluate(base)) ** complex(evaluate(exponent))
        case ("number", Fraction() as number):
            return number
        case ("function", "ln" | "log" as name, (argument, *_)):
            return cmath.log(complex(evaluate(argument))) / (1 if name == "ln" else math.log(10))
        case ("function", "!" | "binom" as name, arguments):
            found = [evaluate(argument) for argument in arguments]
            whole = [int(one) for one in found if isinstance(one, Fraction) and one.denominator == 1 and 0 <= one <= MAX_FACTORIAL]
            if len(whole) == len(found):
                return Fraction(math.factorial(*whole) if name == "!" else math.comb(*whole))
    raise Unreadable(f"{key!r:.40} is no number")
