# SPDX-License-Identifier: Apache-2.0
"""Reads answers by their forms: lists, intervals, equations, matrices, units and words around expressions. `math_same` compares them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, takewhile
from typing import Literal, NamedTuple

from mrl.envs.math_form import CLOSING, GREEK, OPENING, Expression, Leftover
from mrl.envs.math_sums import ZERO, Sum, Unreadable, atom, content, evaluate, order, rational, scaled, total
from mrl.envs.math_tokens import PERCENT, UNITS, Token, plain, tokens_of

RELATIONS = {sign: sign for sign in "=<>"} | dict(zip("equiv lt gt le ge ne in approx".split(), "= < > <= >= != in ~".split(), strict=True))
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
SEPARATORS = (",", ";")
NUMBERS = ("Z", "N", "R", "Q")
OF_SEGMENTS = ("|", "{", "}", "frac", "/", ":", "overline", "angle", "cdot")
BEFORE_NUMBERS = frozenset(
    "usd eur rs is the answer final equals about approximately exactly total therefore so year number sum value length area".split()
)
MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
COMPUTING = frozenset(
    "not factorial times plus less more fewer mod modulo divided over half halves third thirds fourth fourths quarter quarters "
    "fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths".split()
)
CHANGING = COMPUTING | frozenset(
    "squared cubed up no never least most than between without except under above below twice thrice double twenty thirty forty fifty "
    "sixty seventy eighty ninety hundred thousand million square squares cube cubes root roots reciprocal inverse opposite product "
    "difference quotient remainder multiple multiples factor factors divisor divisors power logarithm sine cosine tangent".split()
)
MEANT = dict.fromkeys(("all real numbers", "all reals", "real numbers"), "R") | dict.fromkeys(
    ("no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set"), "emptyset"
)
UNIT_POWERS = {"2": "2", "square": "2", "squared": "2", "sq": "2", "3": "3", "cubic": "3", "cubed": "3"}
ARTICLES = frozenset(("a", "an", "the", "on", "in", "at", "it", "is"))
INDEX = re.compile(r"(?:_(?:\w|\{\w+\}))?")
# The signs in a date mean no difference or quotient.
DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[/.-]\d\d?[/.-]\d{4}")
GAP = re.compile(r"(?<!\d) | (?!\d)")
MATRIX = re.compile(r"begin\{([pbB]?(small)?matrix|array)")
INFINITY = atom(("symbol", "infty"))
MAX_ITEMS, MAX_CHARACTERS = 1_000, 20_000
FAULTS = (ValueError, ZeroDivisionError, OverflowError, RecursionError)


class Value(NamedTuple):
    """A value that an answer says."""

    kind: Literal["sum", "relation", "word", "list", "seq", "set", "union", "matrix", "row", "all named", "named"]
    parts: tuple[Value, ...] = ()
    """Parts of a set or union in one fixed order; rows of a matrix; of `all named` each `named`, which has one part."""
    text: str = ""
    """The word; the sign of a relation; the name of what is named; of a seq its brackets, as in `(]`, or the colons of a ratio."""
    sum: Sum = ZERO
    """Difference of the sides, for a sum and a relation."""


@dataclass
class Reading:
    """The values that an answer says, and its notation."""

    text: str
    values: list[Value] = field(default_factory=list)
    """Values that count as said: one; of `a \\approx b` both, if a is about b. Empty if the text is not readable."""
    work: Leftover = field(default_factory=Leftover)
    units: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Words in front of numbers: `July` of `July 4`."""
    takes_units: bool = False
    is_percent: bool = False
    name: str = ""
    is_contradiction: bool = False
    """True if it says of two different numbers that they are the same."""

    @property
    def is_word(self) -> bool:
        """True if the text is words and no mathematics."""
        return bool(self.values) and self.values[0].kind == "word"


def read(text: str, *, takes_units: bool = False) -> Reading:
    """The reading of an answer; with `takes_units`, `5m` is 5 meters and no product."""
    is_money, text = "\\$" in text, plain(text[:MAX_CHARACTERS])
    reading = Reading(GAP.sub("", " ".join(text.replace('"', "").split())).rstrip("."), takes_units=takes_units)
    if DATE.fullmatch(reading.text):
        reading.values = [Value("word", text=words(reading.text))]
        return reading
    try:
        tokens = tokens_of(text)
        while tokens and tokens[-1].text in (".", ",", ";", ":", "?", "\\"):
            tokens.pop()
        while tokens and tokens[0].text in (":", ",", ";", "=", "approx"):
            del tokens[0]
        if [token.text for token in tokens[:3:2]] == ["(", ")"] and len(tokens) > 3 and tokens[1].text in "ABCDEF":
            tokens = tokens[3:]
        reading.values = _items(_without_parameter(tokens), reading)
        if not reading.units:
            reading.units = ["dollar"] * is_money + ["degree"] * any(token.text == "circ" for token in tokens)
    except FAULTS:
        reading.values, reading.work = [], Leftover()
    return reading


def _without_parameter(tokens: list[Token]) -> list[Token]:
    """Removes the range of an integer parameter, which is called k: `n\\pi (n \\in Z)`, `n\\pi` for any integer n."""
    for at, (letter, sign, *others) in enumerate(zip(tokens, tokens[1:], [*tokens[2:], Token("sign", "")], strict=False)):
        runs_over = sign.text == "in" and others[0].text in ("Z", "N") and all(token.text == ")" for token in tokens[at + 3 :])
        if letter.kind == "letter" and runs_over or letter.text in ("integer", "integers") and at == len(tokens) - 2:
            name, start = (letter if runs_over else sign).text, at
            while start and (tokens[start - 1].kind == "word" or tokens[start - 1].text in (",", "(")):
                start -= 1
            return [Token("letter", "k") if token.text == name else token for token in tokens[:start]] or tokens
    return tokens


def split(tokens: Sequence[Token], texts: Iterable[str]) -> list[list[Token]]:
    """Splits tokens at separators outside of brackets."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += token.name in OPENING or token.name.startswith("begin{")
        depth -= token.name in CLOSING or token.name.startswith("end{")
        if depth == 0 and token.name in texts:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _items(tokens: Sequence[Token], reading: Reading) -> list[Value]:
    parts = [part for part in split(tokens, (*SEPARATORS, "and", "or")) if part]
    values = [part for part in parts if not (len(part) == 3 and part[1].text == "in" and part[2].text in NUMBERS)]
    values = values or [part[2:] for part in parts]  # x in R
    values = [part for part in values if all(token.name != "ne" for token in part)] or values
    if not values or len(values) > MAX_ITEMS:
        raise Unreadable("nothing")
    names, found = list[str](), list[list[Value]]()
    for variant in (variant for part in values for variant in _signs(part)):
        reading.name = ""
        found.append(_relation(variant, reading))
        names.append(reading.name)
    if len(found) == 1:
        return found[0]
    firsts = tuple(one[0] for one in found)
    if all(names) and len(set(names)) == len(names):
        reading.name = ""
        return [_named(names, firsts)]
    reading.name = names[0] if len(set(names)) == 1 else ""
    if any(sign.name in RELATIONS for sign in tokens) and reading.name and all(value.kind == "seq" for value in firsts):
        return [_unordered("union", firsts)]
    return [Value("list", firsts)]


def _named(names: Iterable[str], values: Iterable[Value]) -> Value:
    return Value("all named", tuple(Value("named", (value,), name) for name, value in zip(names, values, strict=True)))


def _unordered(kind: Literal["set", "union"], values: Iterable[Value]) -> Value:
    return Value(kind, tuple(sorted(set(values), key=order)))


def _signs(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    if not any(token.text in ("pm", "mp") for token in tokens):
        return [tokens]
    swaps = ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"})
    return [[Token("sign", swap[token.text]) if token.text in swap else token for token in tokens] for swap in swaps]


def _relation(tokens: Sequence[Token], reading: Reading) -> list[Value]:
    while len(tokens) > 1 and tokens[0].kind == "word" and tokens[0].text.lower() in ("all", "for", "every", "where"):
        tokens = tokens[1:]
    sides = split(tokens, RELATIONS)
    signs = [RELATIONS[tokens[end - 1].name] for end in accumulate(len(side) + 1 for side in sides[:-1])]
    if not signs:
        return [_side(tokens, reading)]
    if not all(sides):
        raise Unreadable("a relation without a side")
    if set(signs) <= {"in"}:
        reading.name = _symbol(sides[0])
        return [_side(sides[-1], reading)]
    if set(signs) <= {"=", "~"}:
        return _equation(sides, signs, reading)
    if len(signs) > 2 or "~" in signs or "in" in signs:
        raise Unreadable("a chain of relations")
    return [_inequality(sides, signs, reading)]


def _symbol(tokens: Sequence[Token]) -> str:
    first = tokens[0]
    if first.kind != "letter" and (first.kind != "command" or first.text not in GREEK):
        return ""
    name = "".join(token.text for token in tokens)
    return re.sub("[{}]", "", name) if INDEX.fullmatch(name, len(first.text)) else ""


def _equation(sides: list[list[Token]], signs: list[str], reading: Reading) -> list[Value]:
    named = [_symbol(side) for side in sides]
    if named[-1] and not named[0]:
        sides, named, signs = sides[::-1], named[::-1], signs[::-1]
    reading.name = named[0]
    if len(sides) > 2 and all(named[:-1]) and len(set(named)) == len(sides) and not named[-1]:  # a = b = 1
        value = _side(sides[-1], reading)
        return [_named(named[:-1], [value] * len(named[:-1])), value]
    if "~" not in signs and len(sides[0]) == 1 and sides[0][0].kind == "number" and len(sides[-1]) > 1:
        sides = sides[::-1]  # 42 = 6 * 7
    value = _side(sides[-1], reading)
    before = [_computed(side) for side in sides[:-1]]
    reading.is_contradiction |= any(
        _contradicts(other, sides[-1], value, reading) for other, sign in zip(before, signs, strict=True) if sign == "="
    )
    if "~" in signs:
        other = before[signs.index("~")]
        return [value, Value("sum", sum=other)] if other is not None and _rounds_to(other, sides[-1], value, reading) else [value]
    if len(sides) > 2 or before[0] is None or value.kind != "sum" or before[0] == value.sum:
        return [value]
    if not reading.name and _is_opaque(sides[0]):
        reading.name = "".join(token.text for token in sides[0])
    return [value, _compared(before[0], "=", value.sum)]


def _contradicts(left: Sum | None, tokens: Sequence[Token], value: Value, reading: Reading) -> bool:
    """True if an equation equates two different numbers; decimals may be rounded."""
    mine, right = None if left is None else rational(left), rational(value.sum) if value.kind == "sum" else None
    if mine is None or right is None or mine == right or (reading.is_percent and 100 * mine == right):
        return False
    places = len(tokens[-1].text.partition(".")[2])
    return not places or abs(mine - right) > Fraction(1, 10**places)


def _rounds_to(left: Sum, tokens: Sequence[Token], value: Value, reading: Reading) -> bool:
    """True unless a side is a number that the last one is not when rounded: of many that are about the same, any would be right."""
    try:
        exact, rounded = evaluate(left), evaluate(value.sum)
    except FAULTS:
        return True
    written = next((token.text for token in tokens if token.kind == "number"), "0").lower().partition("e")[0]
    scale = abs(rounded) / Fraction(written) if rounded and Fraction(written) else 1  # of a percentage, of scientific notation
    unit = scale * Fraction(1, 10 ** len(written.partition(".")[2]))
    return any(abs(factor * exact - rounded) <= 0.5001 * unit for factor in ((1, 100) if reading.is_percent else (1,)))


def _is_opaque(tokens: Sequence[Token]) -> bool:
    """True if a side names something: `f(x)`, `P(A)`, `AB`, a word."""
    name, *others = tokens
    is_call = name.kind == "letter" and others[:1] != [] and others[0].text == "(" and others[-1].text == ")"
    letters = [token.text for token in tokens if token.kind == "letter"]
    is_ratio = any(token.text == "frac" for token in tokens)
    is_segment = all(text.isupper() or is_ratio for text in letters) and all(
        token.kind == "letter" or token.text in OF_SEGMENTS for token in tokens
    )
    return is_call or (len(letters) > 1 and is_segment) or any(token.kind == "word" for token in tokens)


def _computed(tokens: Sequence[Token]) -> Sum | None:
    """The sum that a side is, words left out; None if it cannot be read."""
    try:
        return Expression([token for token in tokens if token.kind != "word"], Leftover()).whole()
    except FAULTS:
        return None


def _compared(one: Sum, sign: str, other: Sum) -> Value:
    """A relation of two different sums, the same for all ways to write it."""
    difference = total((*one, *scaled(other, -1)))
    if not difference:
        raise Unreadable("a relation of equal sides")
    shared = content(difference)
    return Value("relation", text=sign if shared > 0 else FLIPPED[sign], sum=scaled(difference, 1 / shared))


def _inequality(sides: list[list[Token]], signs: list[str], reading: Reading) -> Value:
    if len(signs) == 2:
        name, directions = _symbol(sides[1]), {sign[0] for sign in signs}
        if not name or len(directions) != 1 or directions == {"!"} or "=" in signs:
            raise Unreadable("a chain of relations")
        if directions == {">"}:
            sides, signs = sides[::-1], signs[::-1]
        value = _interval(_sum(sides[0], reading), _sum(sides[2], reading), is_closed=("=" in signs[0], "=" in signs[1]))
        reading.name = name
        return value
    (sign,) = signs
    if not _symbol(sides[0]) and _symbol(sides[1]):
        sides, sign = sides[::-1], FLIPPED[sign]
    reading.name = _symbol(sides[0])
    bound = _sum(sides[1], reading)
    if not reading.name:
        return _compared(_sum(sides[0], reading), sign, bound)
    if sign == "!=":
        return _all_but(bound)
    is_below, is_closed = sign[0] == "<", "=" in sign
    return _interval(
        None if is_below else bound, bound if is_below else None, is_closed=(not is_below and is_closed, is_below and is_closed)
    )


def _all_but(number: Sum) -> Value:
    return _unordered("union", (_interval(None, number), _interval(number, None)))


def _interval(low: Sum | None, high: Sum | None, *, is_closed: tuple[bool, bool] = (False, False)) -> Value:
    """An interval; without a number it ends nowhere."""
    ends = (scaled(INFINITY, -1) if low is None else low, INFINITY if high is None else high)
    return Value("seq", tuple(Value("sum", sum=end) for end in ends), "(["[is_closed[0]] + ")]"[is_closed[1]])


def _sum(tokens: Sequence[Token], reading: Reading) -> Sum:
    value = _side(tokens, reading)
    if value.kind != "sum":
        raise Unreadable("a number is expected")
    return value.sum


def _sides(parts: Iterable[Sequence[Token]], reading: Reading) -> tuple[Value, ...]:
    return tuple(_side(part, reading) for part in parts)


def _side(tokens: Sequence[Token], reading: Reading) -> Value:
    """One side of a relation, or one element of a list: brackets, a matrix, words, or an expression with a unit."""
    tokens = list(tokens)
    if len(tokens) > 3 and tokens[0].kind == "letter" and tokens[0].text.isupper() and len(split(_bracketed(tokens[1:]) or (), (",",))) > 1:
        del tokens[0]  # P(1, 2)
    if tokens and all(token.kind == "word" or (token.kind == "letter" and len(tokens) > 1 and i) for i, token in enumerate(tokens)):
        text = words(" ".join(token.text for token in tokens))
        return Value("sum", sum=atom(("symbol", MEANT[text]))) if text in MEANT else Value("word", text=text)
    if [token.text for token in tokens[:2]] == ["R", "setminus"] and (inner := _bracketed(tokens[2:])):
        return _all_but(_sum(inner, reading))
    if len(unions := split(tokens, ("cup",))) > 1:
        return _unordered("union", _sides(unions, reading))
    if (inner := _bracketed(tokens)) is not None:
        opened, closed = tokens[0].text, tokens[-1].text
        parts, conditions = split(inner, SEPARATORS), split(inner, ("|", ":"))
        if opened == "\\{" and len(conditions) == 2 and _symbol(conditions[0][:1]):
            return _relation(conditions[1], reading)[0]
        if opened == "\\{":
            return _unordered("set", _sides(parts, reading))
        if len(parts) > 1:
            return Value("seq", _sides(parts, reading), "()" if opened == "langle" else opened + closed)
        if any(token.text.startswith("begin{") for token in inner):
            return _side(inner, reading)
    if any(token.text.startswith("begin{") for token in tokens):
        return _matrix(tokens, reading)
    *before, last = split(tokens, (":",))
    labels = list(takewhile(lambda part: all(token.kind == "word" and token.text.lower() not in CHANGING for token in part), before))
    if labels:  # Total: 5
        return _side(tokens[sum(len(label) + 1 for label in labels) :], reading)
    if before:
        return Value("seq", _sides((*before, last), reading), ":")
    tokens, factor = _without_words(tokens, reading)
    return Value("sum", sum=scaled(Expression(tokens, reading.work).whole(), factor))


def _bracketed(tokens: Sequence[Token]) -> Sequence[Token] | None:
    if len(tokens) < 2 or tokens[0].text not in ("(", "[", "\\{", "langle") or tokens[-1].text not in (")", "]", "\\}", "rangle"):
        return None
    depths = accumulate((token.name in OPENING) - (token.name in CLOSING) for token in tokens[:-1])
    return tokens[1:-1] if all(depths) else None


def _matrix(tokens: Sequence[Token], reading: Reading) -> Value:
    start = next(index for index, token in enumerate(tokens) if token.text.startswith("begin{"))
    is_one = tokens[-1].text.startswith("end{") and not any(token.text.startswith("begin{") for token in tokens[start + 1 :])
    if not MATRIX.match(tokens[start].text) or not is_one:
        raise Unreadable("not one matrix")
    lines = [line for line in split(tokens[start + 1 : -1], ("\\",)) if line]
    rows = [_sides(split(line, ("&",)), reading) for line in lines]
    if start:
        scale = rational(Expression(tokens[:start], reading.work).whole())
        numbers = [rational(value.sum) for row in rows for value in row if value.kind == "sum"]
        if scale is None or len(numbers) != sum(map(len, rows)):
            raise Unreadable("a matrix times something")
        # The inverse of a matrix is written so; other products are to be computed.
        whole = [number.numerator for number in numbers if number is not None and number.denominator == 1]
        if abs(scale.numerator) != 1 or len(whole) != len(numbers) or math.gcd(scale.denominator, *whole) != 1:
            reading.work.left.add("product")
        rows = [tuple(Value("sum", sum=scaled(value.sum, scale)) for value in row) for row in rows]
    return Value("matrix", tuple(Value("row", row) for row in rows))


def _without_words(tokens: list[Token], reading: Reading) -> tuple[list[Token], int]:
    """The expression without the words before and behind it: units, currencies, percent."""
    first = next((index for index, token in enumerate(tokens) if token.kind != "word"), 0)
    named = [token.text.lower() for token in tokens[:first] if token.text.lower() not in BEFORE_NUMBERS]
    if CHANGING.isdisjoint(named):
        tokens = tokens[first:]
        reading.words += named
    if reading.takes_units and len(tokens) > 1 and tokens[-1].kind == "letter" and not any(token.text in "=+" for token in tokens):
        after = next((index for index, token in enumerate(tokens) if token.kind == "letter"), 0)
        if after and all(token.text in UNITS or token.text == "/" for token in tokens[after:]):
            tokens = tokens[:after] + [Token("word", token.text) if token.kind == "letter" else token for token in tokens[after:]]
    end = next((index for index, token in enumerate(tokens) if token.kind == "word" or token.text == "%"), len(tokens))
    tail, factor = tokens[end:], 1
    for earlier, before, token in zip([Token("sign", "")] * 2 + tail, [Token("sign", "")] + tail, tail, strict=False):
        is_power = token.kind == "number" and (earlier if before.text == "-" else before).text in ("^", "{")
        if not (token.kind == "word" or is_power or token.text in ("^", "{", "}", "/", "-", "cdot", "%", "(", ")", ".")):
            raise Unreadable("words in an expression")
        if token.text.lower() in COMPUTING or (token.text in ("squared", "cubed") and before.text not in UNITS):
            raise Unreadable("words that compute")
        reading.is_percent |= token.text == "%" or token.text in PERCENT
        factor *= MULTIPLES.get(token.text, 1)
    of_units = [part for token in tail if token.kind in ("word", "number") for part in token.text.split("/")]
    reading.units += [unit for name in of_units for unit in UNIT_POWERS.get(name, UNITS.get(name, "")).split()]
    end -= bool(tail) and end > 1 and tokens[end - 1].text == "cdot"
    if not end:
        raise Unreadable("words")
    return tokens[:end], factor


def words(text: str) -> str:
    """A text as words are compared: small letters without articles and signs."""
    return " ".join(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in ARTICLES)


REAL_LINE = _interval(None, None)
