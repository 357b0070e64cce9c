# SPDX-License-Identifier: Apache-2.0
"""Finds exact differences of expressions, where math-verify compares floats: `1` is not `1-\\frac{1}{2^{2023}}`."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from sympy import Add, Basic, FiniteSet, Integer, Mul, NumberSymbol, Pow, Rational, Symbol, Tuple, factorial

# Mersenne primes: modulo a prime, 2^2023 costs no more than 2.
PRIMES = (2**89 - 1, 2**107 - 1)
MAX_FACTORIAL = 10_000


def differ(one: object, other: object) -> bool:
    """True if two expressions are proven to differ; False if they are equal, or hold anything but what is listed.

    Rational numbers, symbols, sums, products, whole powers and factorials are computed modulo large primes, with a
    fixed number for each symbol: different remainders prove a difference. A set or tuple differs if a part does.
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
