# SPDX-License-Identifier: Apache-2.0
"""Reads expressions in LaTeX: what they say, the same for all orders and notations, and what they leave to compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NoReturn

from mrl.envs.math_sums import ZERO, Sum, Unreadable, atom, content, number, rational, scaled, term, total
from mrl.envs.math_tokens import FUNCTIONS, Token

MAX_POWER_DIGITS, MAX_DEGREE, MAX_DIVISOR, MAX_RADICAND = 400, 64, 1_000, 10**15
CLOSING_OF = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "langle": "rangle"}
OPENING, CLOSING = CLOSING_OF.keys(), CLOSING_OF.values()
ADDED = ("+", "-")
GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi omega ell hbar "
    "Gamma Delta Theta Lambda Sigma Phi Psi Omega".split()
)
IMAGINARY = ("symbol", "i")
CONSTANTS = ("pi", "infty", "emptyset")
ACCENTS = ("vec", "hat", "bar", "overline", "tilde", "overrightarrow")
_BASES = FUNCTIONS | GREEK | {*CONSTANTS, "frac", "sqrt", "binom", "lfloor", "lceil", *ACCENTS}
_END = Token("sign", "")


@dataclass
class Leftover:
    """Arithmetic that expressions leave to do."""

    left: set[str] = field(default_factory=set)
    """Forms left to simplify: like terms (`sum`), factors (`product`), powers (`power`), fractions to reduce (`fraction`), roots (`root`),
    a number before parentheses (`expand`)."""
    functions: set[str] = field(default_factory=set)
    symbols: set[str] = field(default_factory=set)
    compounds: set[object] = field(default_factory=set)
    """Sums and powers that stay as they are."""


class Expression:
    """A reader of one expression, which adds to the work that is left."""

    def __init__(self, tokens: Sequence[Token], work: Leftover) -> None:
        self.tokens, self.at, self.work, self.left = [*tokens, _END], 0, work, work.left

    def whole(self) -> Sum:
        """The expression that all tokens are."""
        value = self.sum()
        return value if self.at == len(self.tokens) - 1 else self._refuse()

    def peek(self, *texts: str) -> bool:
        """True if the next token is one of these."""
        return self.tokens[self.at].name in texts

    def take(self, *texts: str) -> bool:
        """Takes the next token if it is one of these."""
        found = self.peek(*texts)
        self.at += found
        return found

    def need(self, text: str) -> None:
        """Takes this token; Unreadable if the next one is another."""
        if not self.take(text):
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise Unreadable(f"{self.tokens[min(self.at, len(self.tokens) - 1)].text!r} is not expected")

    def leave(self, kind: str, *, is_left: bool) -> None:
        """Notes arithmetic that the answer leaves to do."""
        if is_left:
            self.left.add(kind)

    def compound(self, kind: str, *parts: Sum) -> tuple[object, ...]:
        """An atom that is a sum or a power."""
        self.work.compounds.add((kind, *parts))
        return kind, *parts

    def sum(self) -> Sum:
        """Terms between plus and minus signs."""
        values: list[Sum] = []
        while not values or self.peek(*ADDED):
            is_negative = False
            while self.peek(*ADDED):
                is_negative ^= self.tokens[self.at].text == "-"
                self.at += 1
            value = self.product()
            values.append(self.negative(value) if is_negative else value)
        terms = [term for value in values for term in value]
        self.leave("sum", is_left=(len(values) > 1 and ZERO in values) or len(dict(terms)) < len(terms))
        return total(terms)

    def negative(self, value: Sum) -> Sum:
        """The sum with its signs changed; two signs before a number are work."""
        self.leave("sum", is_left=(rational(value) or 0) < 0)
        return scaled(value, -1)

    def product(self) -> Sum:
        """Factors, with or without a sign between them."""
        start = self.at
        value = self.factor()
        mixed = self._mixed(start)
        value = value if mixed is None else mixed
        while True:
            if self.take("cdot", "*"):
                start, before = self.at, set(self.left)
                factor = self.factor()
                if self._is_ten(start) and 1 <= abs(rational(value) or 0) < 10:
                    self.left &= before
                    value = scaled(value, rational(factor) or 0)
                    continue
                self.leave("product", is_left=1 in (rational(value), rational(factor)))
                value = self.times(value, factor)
            elif self.peek("/", "div"):
                self.leave("product", is_left=self.peek("div"))
                self.at += 1
                value = self.divided(value, self.without_expanding(self.factor))
            elif self._begins_factor():
                value = self.times(value, self.factor())
            else:
                return value

    def _is_ten(self, start: int) -> bool:
        ten, power, *exponent = self.tokens[start : self.at] if self.at > start + 1 else (_END, _END)
        digits = [token for token in exponent if token.text not in ("{", "}", "-", "+")]
        return (ten.text, power.text) == ("10", "^") and len(digits) == 1 and digits[0].kind == "number"

    def _mixed(self, start: int) -> Sum | None:
        """The mixed number that begins here: `1\\frac{1}{2}` or `1 1/2`."""
        whole = self.tokens[start]
        if whole.kind != "number" or self.at != start + 1 or not whole.text.isdigit():
            return None
        if self.peek("frac"):
            before, at = set(self.left), self.at
            part = rational(self.factor())
            if part is not None and 0 < part < 1 and self.left == before and not self.peek("^"):
                return number(int(whole.text) + part)
            self.left &= before
            self.at = at
        above, sign, below = [token.text for token in (*self.tokens[self.at :], _END, _END)[:3]]
        if sign == "/" and above.isdigit() and below.isdigit() and 0 < int(above) < int(below):
            self.at += 3
            return number(int(whole.text) + Fraction(int(above), int(below)))
        return None

    def _begins_factor(self) -> bool:
        token = self.tokens[self.at]
        if token.kind == "number":
            return self.tokens[self.at - 1].kind != "number"
        return token.kind == "letter" or token.text in ("(", "{") or (token.kind == "command" and token.text in _BASES)

    def without_expanding(self, read: Callable[[], Sum]) -> Sum:
        """Reads a divisor, in which a sum in parentheses needs no expansion."""
        before = self.left & {"expand"}
        value = read()
        self.left -= {"expand"} - before
        return value

    def times(self, one: Sum, other: Sum) -> Sum:
        """The product; a sum times anything but a number stays a product."""
        if len(one) > 1 and rational(other) is not None:
            one, other = other, one
        factor = rational(one)
        if factor is not None and len(other) > 1:
            self.leave("expand", is_left=abs(factor.numerator) != 1)
            return scaled(other, factor)
        if not one or not other:
            self.left.add("product")
            return ZERO
        (powers, left), (others, right) = self.single(one), self.single(other)
        are_numbers = factor is not None and rational(other) is not None
        self.leave("product", is_left=(abs(left) != 1 and abs(right) != 1) or are_numbers)
        return self.merged(powers, others, left * right)

    def divided(self, above: Sum, below: Sum) -> Sum:
        """The quotient; a sum over one term becomes a sum of quotients."""
        if not below:
            raise Unreadable("a division by zero")
        powers, divisor = self.single(below)
        is_one = rational(below) is not None and abs(divisor) == 1
        has_signs = bool(above) and divisor < 0 and content(above) < 0
        numbers = [divisor, *(coefficient for _, coefficient in above)]
        is_reducible = any(one.denominator != 1 for one in numbers) or math.gcd(*(one.numerator for one in numbers)) > 1
        self.leave("fraction", is_left=not above or is_one or has_signs or IMAGINARY in powers or is_reducible)
        inverse = {key: -power for key, power in powers.items()}
        if len(above) > 1 and any(isinstance(key, tuple) and key[0] == "sum" for key in powers):
            numerator, shared = self.single(above)
            return self.merged(numerator, inverse, shared / divisor)
        before, quotients, work = set(self.left), list[Sum](), list[set[str]]()
        for monomial, coefficient in above:
            quotients.append(self.merged(dict(monomial), inverse, coefficient / divisor))
            work.append(self.left - before)
            self.left &= before
        self.left |= set.intersection(*work) if work else set()
        return frozenset(term for quotient in quotients for term in quotient)

    def single(self, value: Sum) -> tuple[dict[object, Fraction], Fraction]:
        """Atoms and coefficient of one term; a sum becomes an atom."""
        if len(value) == 1:
            ((monomial, coefficient),) = value
            return dict(monomial), coefficient
        shared = content(value)
        return {self.compound("sum", scaled(value, 1 / shared)): Fraction(1)}, shared

    def merged(self, one: dict[object, Fraction], other: dict[object, Fraction], coefficient: Fraction) -> Sum:
        """A term of the atoms of two; roots of numbers leave the denominator."""
        powers = dict(one)
        for key, power in other.items():
            mine = powers.get(key, Fraction(0))
            is_root = {mine.denominator, power.denominator} == {1, 2} and max(mine, power, key=lambda value: value.denominator) > 0
            self.leave("power", is_left=mine != 0 and not is_root)
            powers[key] = mine + power
        roots = [key for key in powers if isinstance(key, tuple) and key[0] == "root"]
        self.leave("root", is_left=len({degree for _, degree, _ in roots}) < len(roots))
        for key in roots:
            _, degree, radicand = key
            if powers[key] == -1 and degree == 2:
                # 1/sqrt(2) and sqrt(2)/2 are both in use; 2/sqrt(2) is not finished.
                self.leave("fraction", is_left=math.gcd(coefficient.numerator, radicand) > 1)
                powers[key], coefficient = Fraction(1), coefficient / radicand
        return term(powers, coefficient)

    def factor(self) -> Sum:
        """A base with its powers, factorials and degrees."""
        if self.take("+"):
            return self.factor()
        if self.take("-"):
            return self.negative(self.factor())
        value = self.base()
        while self.peek("^", "!", "circ"):
            if self.take("!"):
                value = self.function("!", (value,))
            elif self.take("^") and [token.text for token in self.tokens[self.at : self.at + 3]] == ["{", "circ", "}"]:
                self.at += 3
            elif not self.take("circ"):
                value = self.power(value, self.argument())
        return value

    def argument(self, *, is_digit: bool = False) -> Sum:
        """The argument of a command or a power: braces, or one sign; with `is_digit`, one digit of a number, as in \\frac12."""
        if self.peek("{"):
            return self.base()
        if self.take("-"):
            return scaled(self.argument(), -1)
        if is_digit and (text := self.tokens[self.at].text).isdigit():
            self.tokens[self.at : self.at + 1] = [Token("number", digit) for digit in text]
        return self.base()

    def power(self, base: Sum, exponent: Sum) -> Sum:
        """`base` to `exponent`; only numbers that are small are computed."""
        value, known = rational(base), rational(exponent)
        if known is None:
            sign = -1 if content(exponent) < 0 else 1
            return atom(self.compound("power", base, scaled(exponent, sign)), sign)
        self.leave("power", is_left=known in (0, 1))
        if value is not None:
            if known.denominator != 1:
                return self.root(known.denominator, self.power(base, number(known.numerator)) if known.numerator != 1 else base)
            self.left.add("power")
            digits = abs(known) * max(len(str(abs(value.numerator))), len(str(value.denominator)))
            if digits > MAX_POWER_DIGITS or (value == 0 and known <= 0):
                return atom(("number", value), known)
            return number(value ** int(known))
        if known.denominator != 1 and len(base) > 1:
            return atom(self.compound("sum", base), known)
        powers, coefficient = self.single(base)
        is_one = len(powers) == 1 and set(powers.values()) == {1} and IMAGINARY not in powers
        self.leave("power", is_left=not is_one or (coefficient != 1 and len(base) == 1))
        if coefficient == -1 and known.denominator == 1:
            shared = coefficient ** int(known)
        else:
            shared = rational(self.power(number(coefficient), exponent)) if coefficient != 1 else Fraction(1)
        if shared is None:
            raise Unreadable("a root of a coefficient")
        return term({key: power * known for key, power in powers.items()}, shared)

    def root(self, degree: int, value: Sum) -> Sum:
        """A root of a number or of a term."""
        radicand = rational(value)
        if radicand is None and len(value) == 1:
            ((monomial, coefficient),) = value
            is_left = any(power % degree == 0 or (isinstance(key, tuple) and key[0] == "root") for key, power in monomial)
            self.leave("root", is_left=is_left)
            outside = term({key: power / degree for key, power in monomial})
            return outside if coefficient == 1 else self.times(self.root(degree, number(coefficient)), outside)
        if radicand is None:
            return atom(self.compound("sum", value), Fraction(1, degree))
        if radicand <= 0 or degree > MAX_DEGREE:
            self.left.add("root")
            return atom(("root", degree, radicand))
        if radicand.denominator != 1:
            self.left.add("root")
            below = radicand.denominator
            return scaled(self.root(degree, number(radicand.numerator * below ** (degree - 1))), Fraction(1, below))
        outside, inside = 1, radicand.numerator
        for divisor in range(2, min(MAX_DIVISOR, inside) + 1):
            while inside % divisor**degree == 0:
                inside, outside = inside // divisor**degree, outside * divisor
        exact = math.isqrt(inside) if degree == 2 else 0
        if exact > 1 and exact * exact == inside:
            inside, outside = 1, outside * exact
        is_power = any(degree % part == 0 and round(inside ** (1 / part)) ** part == inside for part in range(2, degree))
        self.leave("root", is_left=outside != 1 or inside == 1 or (is_power and inside < MAX_RADICAND))
        return number(outside) if inside == 1 else scaled(atom(("root", degree, inside)), outside)

    def function(self, name: str, arguments: tuple[Sum, ...]) -> Sum:
        """A function that is not evaluated."""
        self.work.functions.add(name)
        return atom(("function", name, arguments))

    def base(self) -> Sum:
        """A number, a symbol, parentheses, or a command with its arguments."""
        token = self.tokens[self.at]
        if token == _END:
            self._refuse()
        self.at += 1
        if token.kind == "number":
            if self.take("overline", "bar"):
                return self.repeating(token.text)
            if self.take("_"):
                return atom(("digits", token.text, self.argument()))
            return number(Fraction(token.text.removesuffix(".")))
        if token.kind == "letter":
            return self.symbol(token.text)
        if token.kind == "command":
            return self.command(token.text)
        if token.name in ("(", "[", "{", "|"):
            value = self.sum()
            self.need(CLOSING_OF.get(token.text, "|"))
            is_negative = token.text == "|" and bool(value) and content(value) < 0
            return value if token.text != "|" else self.function("abs", (scaled(value, -1) if is_negative else value,))
        return self._refuse()

    def repeating(self, digits: str) -> Sum:
        """A decimal whose last digits repeat, as `0.1\\overline{6}`."""
        places = len(digits.partition(".")[2])
        self.take("{")
        repeated = self.tokens[self.at].text
        if not repeated.isdigit() or "." not in digits:
            self._refuse()
        self.at += 1
        self.take("}")
        return number(Fraction(digits.rstrip(".")) + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**places))

    def symbol(self, name: str) -> Sum:
        """A symbol with its index."""
        if self.take("_"):
            start, depth = self.at, 0
            while self.tokens[self.at] != _END and (self.at == start or depth):
                depth += self.peek("{") - self.peek("}")
                self.at += 1
            name += "_" + "".join(token.text for token in self.tokens[start : self.at] if token.text not in ("{", "}"))
        self.work.symbols.add(name)
        return atom(("symbol", name))

    def command(self, name: str) -> Sum:
        """A command with its arguments."""
        if name == "frac":
            above = self.argument(is_digit=True)
            return self.divided(above, self.without_expanding(lambda: self.argument(is_digit=True)))
        if name == "sqrt":
            degree = 2
            if self.take("["):
                degree = int(rational(self.sum()) or 0)
                self.need("]")
            value = self.argument()
            return self.root(degree, value) if degree > 1 else self._refuse()
        if name in FUNCTIONS:
            return self.named_function(name)
        if name == "binom":
            return self.function("binom", (self.argument(is_digit=True), self.argument(is_digit=True)))
        if name in ("lfloor", "lceil"):
            value = self.sum()
            self.need(f"r{name[1:]}")
            return self.function(name[1:], (value,))
        if name in ACCENTS:
            start = self.at
            value = self.argument()
            is_name = all(token.kind == "letter" or token.text in ("{", "}") for token in self.tokens[start : self.at])
            return value if is_name else self._refuse()
        if name in CONSTANTS:
            return atom(("symbol", name))
        return self.symbol(name) if name in GREEK else self._refuse()

    def named_function(self, name: str) -> Sum:
        """A function with its power, its index and its argument."""
        power, index = None, None
        if name in ("sin", "cos", "tan") and [token.text for token in self.tokens[self.at : self.at + 5]] == ["^", "{", "-", "1", "}"]:
            name, self.at = f"arc{name}", self.at + 5
        while self.peek("^", "_"):
            if self.take("^"):
                power = self.argument()
            else:
                self.at += 1
                index = self.argument()
        arguments = self.arguments()
        if name in ("log", "lg") and (index is None or rational(index) == 10):
            found = self.function("log", arguments)
        elif name == "log" and index == atom(("symbol", "e")):
            found = self.function("ln", arguments)
        elif name == "log" and index is not None:
            found = self.divided(self.function("ln", arguments), self.function("ln", (index,)))
        elif name == "exp":
            found = self.power(self.symbol("e"), arguments[0])
        else:
            found = self.function(name, arguments) if index is None else self.function(f"{name}_", (*arguments, index))
        return found if power is None else self.power(found, power)

    def arguments(self) -> tuple[Sum, ...]:
        """The arguments of a function: in parentheses, between bars, or up to the next sign or function."""
        if self.peek("|"):
            return (self.base(),)
        if self.peek("(", "{"):
            closing = CLOSING_OF[self.tokens[self.at].text]
            found = list[Sum]()
            while not found or self.peek(","):
                self.at += 1
                found.append(self.sum())
            self.need(closing)
            return tuple(found)
        value = self.factor()
        while self._begins_factor() and not self.peek(*FUNCTIONS, "(", "{"):
            value = self.times(value, self.factor())
        return (self.divided(value, self.factor()) if self.take("/") else value,)
