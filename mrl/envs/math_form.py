# SPDX-License-Identifier: Apache-2.0
"""Reads expressions in LaTeX: what they say, the same for all orders and notations, and what they leave to compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from mrl.envs.math_sums import ZERO, Monomial, Sum, Unreadable, atom, content, negative, number, rational, scaled
from mrl.envs.math_tokens import FUNCTIONS, Token

MAX_POWER_DIGITS = 400
OPENING, CLOSING = ("(", "[", "{", "\\{", "langle"), (")", "]", "}", "\\}", "rangle")
ADDED = ("+", "-")
GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi chi psi omega ell hbar "
    "Gamma Delta Theta Lambda Sigma Phi Psi Omega".split()
)
IMAGINARY = ("symbol", "i")
CONSTANTS = ("pi", "infty", "emptyset")
ACCENTS = ("vec", "hat", "bar", "overline", "tilde", "overrightarrow")


class Expression:
    """A reader of one expression.

    `left` collects the kinds of work that it leaves: like terms (`sum`), numbers to multiply (`product`), powers (`power`), fractions to
    reduce (`fraction`), roots (`root`), a number before parentheses (`expand`). `functions` and `compounds` are what stays unevaluated.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0
        self.left: set[str] = set()
        self.functions: set[str] = set()
        self.symbols: set[str] = set()
        self.compounds: set[object] = set()

    def whole(self) -> Sum:
        """The expression that all tokens are."""
        value = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable(f"{self.tokens[self.at].text!r} is not expected")
        return value

    def peek(self, *texts: str) -> bool:
        """True if the next token is one of these."""
        return self.at < len(self.tokens) and self.tokens[self.at].kind != "word" and self.tokens[self.at].text in texts

    def take(self, *texts: str) -> bool:
        """Takes the next token if it is one of these."""
        found = self.peek(*texts)
        self.at += found
        return found

    def need(self, text: str) -> None:
        """Takes this token."""
        if not self.take(text):
            raise Unreadable(f"{text!r} is missing")

    def sum(self) -> Sum:
        """Terms between plus and minus signs."""
        terms: dict[Monomial, Fraction] = {}
        is_first = True
        while is_first or self.peek(*ADDED):
            sign = 1
            while self.peek(*ADDED):
                sign *= -1 if self.tokens[self.at].text == "-" else 1
                self.at += 1
            value = self.product()
            if sign == -1 and (rational(value) or 0) < 0:
                self.left.add("sum")
            if not value and not (is_first and not self.peek(*ADDED)):
                self.left.add("sum")
            for monomial, coefficient in value:
                if monomial in terms:
                    self.left.add("sum")
                terms[monomial] = terms.get(monomial, Fraction(0)) + sign * coefficient
            is_first = False
        return frozenset((monomial, coefficient) for monomial, coefficient in terms.items() if coefficient)

    def product(self) -> Sum:
        """Factors, with or without a sign between them."""
        start = self.at
        value = self.factor()
        mixed = self._mixed(start)
        if mixed is not None:
            value = mixed
        while True:
            if self.take("cdot", "*"):
                start = self.at
                factor = self.factor()
                if self._is_ten(start) and (mantissa := rational(value)) is not None and 1 <= abs(mantissa) < 10:
                    # Scientific notation is a number.
                    power = rational(factor)
                    value = number(mantissa * (power or 0))
                    self.left -= {"power"}
                    continue
                if 1 in (rational(value), rational(factor)):
                    self.left.add("product")
                value = self.times(value, factor)
            elif self.peek("/", "div"):
                if not self.take("/"):
                    self.at += 1
                    self.left.add("product")
                value = self.divided(value, self.without_expanding(self.factor))
            elif self._begins_factor():
                value = self.times(value, self.factor())
            else:
                return value

    def _is_ten(self, start: int) -> bool:
        tokens = self.tokens[start : self.at]
        exponent = [token for token in tokens[2:] if token.text not in ("{", "}", "-", "+")]
        return len(exponent) == 1 and exponent[0].kind == "number" and [token.text for token in tokens[:2]] == ["10", "^"]

    def _mixed(self, start: int) -> Sum | None:
        """The mixed number that begins here: `1\\frac{1}{2}` or `1 1/2`."""
        whole = self.tokens[start]
        if whole.kind != "number" or self.at != start + 1 or not whole.text.isdigit():
            return None
        texts = [token.text for token in self.tokens[self.at : self.at + 7] if token.text not in ("{", "}")]
        if texts[:1] == ["frac"] and len(texts) >= 2:
            before, at = set(self.left), self.at
            part = rational(self.factor())
            if part is not None and 0 < part < 1 and self.left == before and not self.peek("^"):
                return number(int(whole.text) + part)
            self.at, self.left = at, before
        elif len(texts) >= 3 and texts[0].isdigit() and texts[1] == "/" and texts[2].isdigit() and 0 < int(texts[0]) < int(texts[2]):
            self.at += 3
            return number(int(whole.text) + Fraction(int(texts[0]), int(texts[2])))
        return None

    def _begins_factor(self) -> bool:
        if self.at >= len(self.tokens):
            return False
        token = self.tokens[self.at]
        if token.kind == "number":
            return self.at > 0 and self.tokens[self.at - 1].kind != "number"
        return token.kind == "letter" or token.text in ("(", "{") or (token.kind == "command" and token.text in _BASES)

    def without_expanding(self, read: Callable[[], Sum]) -> Sum:
        """Reads what is divided by, where a sum in parentheses needs no expansion."""
        could_expand = "expand" in self.left
        value = read()
        if not could_expand:
            self.left.discard("expand")
        return value

    def times(self, one: Sum, other: Sum) -> Sum:
        """The product; a sum times anything but a number stays a product."""
        if len(one) > 1 and rational(other) is not None:
            one, other = other, one
        factor = rational(one)
        if factor is not None and len(other) > 1:
            if abs(factor.numerator) != 1:
                self.left.add("expand")
            return scaled(other, factor)
        if not one or not other:
            self.left.add("product")
            return ZERO
        (powers, left), (others, right) = self.single(one), self.single(other)
        if (abs(left) != 1 and abs(right) != 1) or (factor is not None and rational(other) is not None):
            self.left.add("product")
        return self.merged(powers, others, left * right)

    def divided(self, above: Sum, below: Sum) -> Sum:
        """The quotient; a sum over one term becomes a sum of quotients."""
        if not below:
            raise Unreadable("a division by zero")
        powers, divisor = self.single(below)
        if not above or (rational(below) is not None and abs(divisor) == 1) or (divisor < 0 and content(above) < 0) or IMAGINARY in powers:
            self.left.add("fraction")
        numerators = [coefficient for _, coefficient in above]
        if divisor.denominator != 1 or any(coefficient.denominator != 1 for coefficient in numerators):
            self.left.add("fraction")
        elif math.gcd(divisor.numerator, *(coefficient.numerator for coefficient in numerators)) > 1:
            self.left.add("fraction")
        inverse = {key: -power for key, power in powers.items()}
        if len(above) > 1 and any(isinstance(key, tuple) and key[0] == "sum" for key in powers):
            numerator, shared = self.single(above)
            return self.merged(numerator, inverse, shared / divisor)
        before, results = set(self.left), []
        for monomial, coefficient in above:
            self.left = set(before)
            results.append((self.merged(dict(monomial), inverse, coefficient / divisor), self.left - before))
        # One term that has nothing in common with the divisor keeps the quotient in lowest terms.
        self.left = before | (set.intersection(*(found for _, found in results)) if results else set())
        return frozenset(term for result, _ in results for term in result)

    def single(self, value: Sum) -> tuple[dict[object, Fraction], Fraction]:
        """Atoms and coefficient of one term; a sum becomes an atom."""
        if len(value) == 1:
            ((monomial, coefficient),) = value
            return dict(monomial), coefficient
        shared = content(value)
        key = ("sum", scaled(value, 1 / shared))
        self.compounds.add(key)
        return {key: Fraction(1)}, shared

    def merged(self, one: dict[object, Fraction], other: dict[object, Fraction], coefficient: Fraction) -> Sum:
        """A term of the atoms of two; roots of numbers leave the denominator."""
        powers = dict(one)
        for key, power in other.items():
            mine = powers.get(key, Fraction(0))
            # Both x*sqrt(x) and sqrt(x)/x are final.
            is_root = {mine.denominator, power.denominator} == {1, 2} and max(mine, power, key=lambda value: value.denominator) > 0
            if mine and not is_root:
                self.left.add("power")
            powers[key] = mine + power
        roots = [key for key in powers if isinstance(key, tuple) and key[0] == "root"]
        if len(roots) > 1 and len({key[1] for key in roots}) < len(roots):
            self.left.add("root")
        for key in roots:
            _, degree, radicand = key
            if powers[key] == -1 and degree == 2:
                # 1/sqrt(2) and sqrt(2)/2 are both in use; 2/sqrt(2) is not finished.
                if math.gcd(coefficient.numerator, radicand) > 1:
                    self.left.add("fraction")
                powers[key], coefficient = Fraction(1), coefficient / radicand
        return frozenset({(frozenset((key, power) for key, power in powers.items() if power), coefficient)})

    def factor(self) -> Sum:
        """A base with what stands behind it: powers, factorials, degrees."""
        if self.peek(*ADDED):
            sign = self.tokens[self.at].text
            self.at += 1
            value = self.factor()
            if sign == "-" and (rational(value) or 0) < 0:
                self.left.add("sum")
            return negative(value) if sign == "-" else value
        value = self.base()
        while True:
            if self.take("^"):
                if self.take("circ"):
                    continue
                at = self.at
                if self.take("{") and self.take("circ") and self.take("}"):
                    continue
                self.at = at
                value = self.power(value, self.argument())
            elif self.take("!"):
                value = self.function("!", (value,))
            elif self.take("circ"):
                continue
            else:
                return value

    def argument(self, *, is_digit: bool = False) -> Sum:
        """The argument of a command or a power: braces, or one sign; with `is_digit`, one digit of a number, as in \\frac12."""
        if self.take("{"):
            value = self.sum()
            self.need("}")
            return value
        if self.peek("-"):
            self.at += 1
            return negative(self.argument())
        if is_digit and self.at < len(self.tokens) and len(text := self.tokens[self.at].text) > 1 and text.isdigit():
            self.tokens = [*self.tokens[: self.at], *(Token("number", digit) for digit in text), *self.tokens[self.at + 1 :]]
        return self.base()

    def power(self, base: Sum, exponent: Sum) -> Sum:
        """`base` to `exponent`; only numbers that are small are computed."""
        value, known = rational(base), rational(exponent)
        if known is None:
            sign = -1 if content(exponent) < 0 else 1
            key = ("power", base, scaled(exponent, Fraction(sign)))
            self.compounds.add(key)
            return atom(key, sign)
        if known in (0, 1):
            self.left.add("power")
        if value is not None:
            if known.denominator != 1:
                return self.root(known.denominator, self.power(base, number(known.numerator)) if known.numerator != 1 else base)
            self.left.add("power")
            digits = abs(known) * max(len(str(abs(value.numerator))), len(str(value.denominator)))
            if digits > MAX_POWER_DIGITS or (value == 0 and known <= 0):
                return atom(("number", value), known)
            return number(value ** int(known))
        if known.denominator != 1 and len(base) > 1:
            self.compounds.add(("sum", base))
            return atom(("sum", base), known)
        powers, coefficient = self.single(base)
        is_one = len(powers) == 1 and set(powers.values()) == {1} and IMAGINARY not in powers
        if not is_one or (coefficient != 1 and len(base) == 1):
            self.left.add("power")
        if coefficient == -1 and known.denominator == 1:
            shared = coefficient ** int(known)
        else:
            shared = rational(self.power(number(coefficient), exponent)) if coefficient != 1 else Fraction(1)
        if shared is None:
            raise Unreadable("a root of a coefficient")
        return frozenset({(frozenset((key, power * known) for key, power in powers.items()), shared)})

    def root(self, degree: int, value: Sum) -> Sum:
        """A root of a number or of a term."""
        radicand = rational(value)
        if radicand is None:
            if len(value) == 1:
                ((monomial, coefficient),) = value
                if any(power % degree == 0 or (isinstance(key, tuple) and key[0] == "root") for key, power in monomial):
                    self.left.add("root")
                powers = frozenset((key, power / degree) for key, power in monomial)
                outside = frozenset({(powers, Fraction(1))})
                return outside if coefficient == 1 else self.times(self.root(degree, number(coefficient)), outside)
            self.compounds.add(("sum", value))
            return atom(("sum", value), Fraction(1, degree))
        if radicand <= 0 or degree > 64:
            self.left.add("root")
            return atom(("root", degree, radicand))
        if radicand.denominator != 1:
            self.left.add("root")
            below = radicand.denominator
            return scaled(self.root(degree, number(radicand.numerator * below ** (degree - 1))), Fraction(1, below))
        outside, inside = 1, radicand.numerator
        for divisor in range(2, min(1_000, inside) + 1):
            while inside % divisor**degree == 0:
                inside, outside = inside // divisor**degree, outside * divisor
        exact = math.isqrt(inside) if degree == 2 else 0
        if degree == 2 and exact > 1 and exact * exact == inside:
            inside, outside = 1, outside * exact
        is_power = any(degree % part == 0 and round(inside ** (1 / part)) ** part == inside for part in range(2, degree))
        if outside != 1 or inside == 1 or (is_power and inside < 10**15):
            self.left.add("root")
        return number(outside) if inside == 1 else scaled(atom(("root", degree, inside)), Fraction(outside))

    def function(self, name: str, arguments: tuple[object, ...]) -> Sum:
        """A function that is not evaluated."""
        self.functions.add(name)
        return atom(("function", name, arguments))

    def base(self) -> Sum:
        """A number, a symbol, parentheses, or a command with its arguments."""
        if self.at >= len(self.tokens):
            raise Unreadable("something is missing")
        token = self.tokens[self.at]
        self.at += 1
        if token.kind == "number":
            if self.take("overline", "bar"):
                return self.repeating(token.text)
            if self.take("_"):
                return atom(("digits", token.text, self.argument()))
            return number(Fraction(token.text if token.text[-1] != "." else token.text[:-1]))
        if token.kind == "letter":
            return self.symbol(token.text)
        if token.kind == "command":
            return self.command(token.text)
        if token.text in ("(", "[", "{"):
            value = self.sum()
            self.need({"(": ")", "[": "]", "{": "}"}[token.text])
            return value
        if token.text == "|":
            value = self.sum()
            self.need("|")
            return self.function("abs", (negative(value) if value and content(value) < 0 else value,))
        raise Unreadable(f"{token.text!r} begins nothing")

    def repeating(self, digits: str) -> Sum:
        """A decimal whose last digits repeat, as `0.1\\overline{6}`."""
        places = len(digits.partition(".")[2])
        self.take("{")
        repeated = self.tokens[self.at].text if self.at < len(self.tokens) else ""
        if not repeated.isdigit() or "." not in digits:
            return self._refuse("a line over nothing")
        self.at += 1
        self.take("}")
        return number(Fraction(digits.rstrip(".")) + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**places))

    def symbol(self, name: str) -> Sum:
        """A symbol with its index."""
        if self.take("_"):
            start = self.at
            self.argument()
            name += "_" + "".join(token.text for token in self.tokens[start : self.at] if token.text not in ("{", "}"))
        self.symbols.add(name)
        return atom(("symbol", name))

    def command(self, name: str) -> Sum:
        """A command with its arguments."""
        if name == "frac":
            above = self.argument(is_digit=True)
            return self.divided(above, self.without_expanding(partial(self.argument, is_digit=True)))
        if name == "sqrt":
            degree = 2
            if self.take("["):
                degree = int(rational(self.sum()) or 0)
                self.need("]")
            value = self.base() if self.peek("(") else self.argument()
            return self.root(degree, value) if degree > 1 else self._refuse("a root without a degree")
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
            return value if is_name else self._refuse("a line over an expression")
        if name in CONSTANTS:
            return atom(("symbol", name))
        if name in GREEK:
            return self.symbol(name)
        return self._refuse(f"\\{name}")

    def _refuse(self, reason: str) -> Sum:
        raise Unreadable(reason)

    def named_function(self, name: str) -> Sum:
        """A function with its power, its index and its argument."""
        power, index = None, None
        if name in ("sin", "cos", "tan") and [token.text for token in self.tokens[self.at : self.at + 5]] == ["^", "{", "-", "1", "}"]:
            name, self.at = f"arc{name}", self.at + 5
        while self.peek("^", "_"):
            self.at += 1
            if self.tokens[self.at - 1].text == "^":
                power = self.argument()
            else:
                index = self.argument()
        if self.peek("(", "{", "|"):
            opened = self.tokens[self.at].text
            arguments = self.base() if opened == "|" else self.list_in(opened)
            if not isinstance(arguments, tuple):
                arguments = (arguments,)
        else:
            arguments = (self.without_signs(),)
        if name in ("log", "lg") and (index is None or rational(index) == 10):
            found = self.function("log", arguments)
        elif name == "log" and index == atom(("symbol", "e")):
            found = self.function("ln", arguments)
        elif name == "log" and index is not None:
            found = self.divided(self.function("ln", arguments), self.function("ln", (index,)))
        elif name == "exp":
            found = self.power(self.symbol("e"), arguments[0])
        else:
            found = self.function(name if index is None else f"{name}_", (*arguments, *([] if index is None else [index])))
        return found if power is None else self.power(found, power)

    def list_in(self, opened: str) -> tuple[Sum, ...]:
        """Arguments in parentheses."""
        self.need(opened)
        found = [self.sum()]
        while self.take(","):
            found.append(self.sum())
        self.need(")" if opened == "(" else "}")
        return tuple(found)

    def without_signs(self) -> Sum:
        """The argument of a function without parentheses: up to the next sign or function."""
        value = self.factor()
        while self._begins_factor() and not self.peek(*FUNCTIONS, "(", "{"):
            value = self.times(value, self.factor())
        if self.take("/"):
            value = self.divided(value, self.factor())
        return value


_BASES = FUNCTIONS | GREEK | {*CONSTANTS, "frac", "sqrt", "binom", "lfloor", "lceil", *ACCENTS}
