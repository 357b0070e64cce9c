# SPDX-License-Identifier: Apache-2.0
"""The size of mathematical answers: bounds within which parsing and computing them stays cheap. At the end: exact
differences of expressions, where math-verify compares floats: `1` is not `1-\\frac{1}{2^{2023}}`.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import astuple, dataclass
from typing import Any

from sympy import (
    Abs,
    Add,
    Basic,
    FiniteSet,
    Integer,
    Mul,
    Number,
    NumberSymbol,
    Pow,
    Product,
    Rational,
    Sum,
    Symbol,
    Tuple,
    exp,
    factorial,
)

# The longest answer of MATH has some 160 characters and 6 levels, of GSM8K 9 digits.
MAX_CHARACTERS = 1_000

BOX = "\\boxed{"
MAX_BOXES = 32
# Parentheses in each other double the parser's work with each level.
MAX_DEPTH = 10
MAX_PARTS = 50
MAX_DIGIT_RUN = 200
MAX_VALUE_DIGITS = 1.0e5
"""Decimal digits of the largest number on the way to a value: sympy takes a tenth of a second for so many."""
MAX_EXPECTED_DIGITS = 1.0e7
# A sum with symbols to the power of n has so many times n digits: simplify expands it.
DIGITS_PER_EXPANSION = 2_000.0
LIMITS = re.compile(r"\\(?:i{0,3}int|oint|lim|limsup|liminf|varlimsup|varliminf)(?![a-z])|∫")
FUNCTION_NAMES = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|ln|log|exp)h?(?![a-z])")
MAX_FUNCTIONS = 8
FACTORIALS = ("factorial", "factorial2", "subfactorial", "gamma", "binomial", "fibonacci", "zeta")
_PARTS = re.compile(r",|;|&|\\c[au]p|\\\\")
_DIGITS = re.compile(r"\d+")
_NUMBER_RUN = re.compile(r"[\d.\s+\-*×/^()÷,]+")
_EAGER = re.compile(r"binom|choose|gcd|lcm|Gamma")
_EAGER_COST = re.compile(r"\d{5}|\^|!|\*\*")
_ENVIRONMENTS = (
    ("\\(", re.compile(r"\\\)|\n")),
    ("\\[", re.compile(r"\\\]")),
    ("$", re.compile(r"\n")),
    ("$$", re.compile(r"\$\$")),
    (" [", re.compile(r"[\[\]\n]")),
)
"""Openings of pieces of LaTeX, and the patterns that end math-verify's search for their ends."""


@dataclass(frozen=True)
class Size:
    """Measures of an expression before it is parsed."""

    characters: int
    depth: int
    """Nesting of brackets. Which bars open and which close cannot be told, so two of them count as a level."""
    num_parts: int
    digit_run: int
    is_eager: bool

    def fits(self, expected: Size) -> bool:
        """True if the value is small, or no larger than the expected answer."""
        return all(
            mine <= max(most, theirs)
            for mine, most, theirs in zip(astuple(self), SMALL, astuple(expected), strict=True)
        )


SMALL = (MAX_CHARACTERS, MAX_DEPTH, MAX_PARTS, MAX_DIGIT_RUN, False)
"""The bounds of an answer, by the fields of `Size`, wherever the expected one is not larger."""


ANY_EXPECTED = Size(characters=20_000, depth=12, num_parts=1_000, digit_run=4_000, is_eager=True)
"""The largest expected answer; Python reads no longer numbers."""


def size_of(text: str) -> Size:
    """The size of an expression."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    deepest = max(deepest, text.count("|") // 2)
    digit_run = max(map(len, _DIGITS.findall(text)), default=0)
    is_eager = _EAGER.search(text) is not None and _EAGER_COST.search(text) is not None
    return Size(len(text), deepest, len(_PARTS.findall(text)), digit_run, is_eager)


def search_cost(text: str) -> float:
    """Approximate steps of math-verify's patterns to find the mathematics in a text; infinite beyond 32 boxes."""
    if text.count(BOX) > MAX_BOXES:
        return math.inf
    cost = float(sum(10 * len(run) ** 2 for run in _NUMBER_RUN.findall(text)))
    for opening, closing in _ENVIRONMENTS:
        for part in closing.split(text):
            num_opened = 1 if opening == "$$" else part.count(opening)
            cost += num_opened * len(part) * (20 + part.count(BOX) * part.count("}"))
    return cost


def value_digits(node: Basic) -> float:
    """An upper bound of the decimal digits that the evaluation of an expression writes."""
    if isinstance(node, Integer | Rational):
        return math.log10(max(abs(int(node.p)), int(node.q)))
    if isinstance(node, Number):
        return abs(math.log10(float(Abs(node)))) if node.is_finite and node.is_nonzero and abs(node) < 1e300 else 300.0
    of_arguments = [value_digits(argument) for argument in node.args if isinstance(argument, Basic)]
    if isinstance(node, Pow):
        base, power = of_arguments
        if node.base.free_symbols:
            base = max(base, DIGITS_PER_EXPANSION) if node.base.has(Add) else 0.0
        return max(power, base * _bounded_power(power)) if base else power
    if isinstance(node, exp):
        return _bounded_power(of_arguments[0])
    if isinstance(node, Sum | Product):
        return (1.0 + of_arguments[0]) * max(_bounded_power(digits) for digits in of_arguments[1:])
    if node.func.__name__.lower() in FACTORIALS and of_arguments:
        return max(of_arguments) * _bounded_power(max(of_arguments))
    if isinstance(node, Mul):
        return sum(of_arguments)
    return max(of_arguments, default=0.0) + math.log10(len(of_arguments) + 1)


def _bounded_power(digits: float) -> float:
    return 10.0**digits if digits < 100.0 else math.inf


# Mersenne primes: modulo a prime, 2^2023 costs no more than 2.
PRIMES = (2**89 - 1, 2**107 - 1)
MAX_FACTORIAL = 10_000


def differ(one: object, other: object) -> bool:
    """True if two expressions are proven to differ; False if they are equal, or hold anything but what is listed.

    Rational numbers, symbols, sums, products, whole powers and factorials are computed modulo large primes, with a
    fixed number for each symbol: different remainders prove it. A set or tuple differs if a part does.
    """
    return any(_differ(one, other, prime) for prime in PRIMES)


def _differ(one: Any, other: Any, prime: int) -> bool:
    if isinstance(one, Tuple) and isinstance(other, Tuple) and len(one) == len(other):
        return any(_differ(mine, theirs, prime) for mine, theirs in zip(one.args, other.args, strict=True))
    if isinstance(one, FiniteSet) and isinstance(other, FiniteSet) and len(one) == len(other):
        known = [[_remainder(part, prime) for part in side.args] for side in (one, other)]
        return None not in known[0] + known[1] and set(known[0]) != set(known[1])
    if not isinstance(one, Basic) or not isinstance(other, Basic):
        return False
    mine, theirs = _remainder(one, prime), _remainder(other, prime)
    return mine is not None and theirs is not None and mine != theirs


def _remainder(node: Basic, prime: int) -> int | None:
    """The value of an expression modulo a prime; None if it has other parts, as floats and roots are."""
    if isinstance(node, Rational):
        return int(node.p) * pow(int(node.q), -1, prime) % prime if node.q % prime else None
    if isinstance(node, Symbol | NumberSymbol):
        return int.from_bytes(hashlib.sha256(str(node).encode()).digest()) % prime
    if isinstance(node, Add | Mul):
        parts = [_remainder(part, prime) for part in node.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return (sum(known) if isinstance(node, Add) else math.prod(known)) % prime
    if isinstance(node, Pow):
        base, exponent = _remainder(node.base, prime), node.exp
        if base is None or not isinstance(exponent, Integer) or (base == 0 and exponent <= 0):
            return None
        return pow(base, int(exponent), prime)
    if isinstance(node, factorial) and isinstance(node.args[0], Integer) and 0 <= node.args[0] <= MAX_FACTORIAL:
        return math.factorial(int(node.args[0])) % prime
    return None
