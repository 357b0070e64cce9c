# SPDX-License-Identifier: Apache-2.0
"""Compares an answer with the expected one by their forms: lists, intervals, equations, matrices, units and words around expressions."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from mrl.envs.math_form import CLOSING, GREEK, OPENING, Expression
from mrl.envs.math_sums import Monomial, Sum, Unreadable, atom, content, evaluate, negative, order, rational, scaled
from mrl.envs.math_tokens import PERCENT, UNITS, Token, plain, tokens_of

Value = tuple[Any, ...]
"""A value that an answer says: ("sum", terms), ("word", text), ("list", values), ("set", values), ("seq", "(", "]", values),
("union", values), ("matrix", rows), ("relation", sign, terms), ("named", pairs)."""

RELATIONS = {sign: sign for sign in "=<>"} | {
    "equiv": "=",
    "lt": "<",
    "gt": ">",
    "le": "<=",
    "ge": ">=",
    "ne": "!=",
    "in": "in",
    "approx": "~",
}
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
SEPARATORS = (",", ";")
BEFORE_NUMBERS = frozenset("usd eur rs is the answer final equals about approximately exactly total therefore so".split())
MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
COMPUTING = frozenset("squared cubed factorial times plus minus less more fewer mod modulo divided over half".split())
ARTICLES = frozenset(("a", "an", "the", "on", "in", "at", "it", "is"))
CHOICE = re.compile(r"\(?([A-Z])\)?[.:]?")
CHOSEN = re.compile(r"\(?([A-Z])(?:\)?$|\)[.:]?|[.:])")
INDEX = re.compile(r"(?:_(?:\w|\{\w+\}))?")
LETTER = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z])")
INFINITY = atom(("symbol", "infty"))
MAX_ITEMS, MAX_CHARACTERS = 1_000, 20_000
# What an expression without a value raises.
FAULTS = (ValueError, ZeroDivisionError, OverflowError, RecursionError)
# Of decimals that stand for other numbers, as 0.333333; math-verify rounds to six places.
PLACES, DECIMAL_TOLERANCE, RELATIVE_TOLERANCE = 6, 5.1e-7, 1e-5
EXACT_TOLERANCE = 1e-12


@dataclass
class Reading:
    """The values that an answer says, and its notation."""

    text: str
    values: list[Value] = field(default_factory=list)
    """Values that count as said: one; of `a \\approx b` both. Empty if the text is not readable."""
    left: set[str] = field(default_factory=set)
    """Kinds of work that are left."""
    functions: set[str] = field(default_factory=set)
    symbols: set[str] = field(default_factory=set)
    compounds: set[object] = field(default_factory=set)
    units: list[str] = field(default_factory=list)
    takes_units: bool = False
    is_percent: bool = False
    name: str = ""
    """Symbol that the value is given to."""
    is_contradiction: bool = False
    """True if it says of two different numbers that they are the same."""

    @property
    def is_word(self) -> bool:
        """True if it is no mathematics but words."""
        return bool(self.values) and self.values[0][0] == "word"

    def expression(self, tokens: Sequence[Token]) -> Sum:
        """One expression."""
        reader = Expression(tokens)
        value = reader.whole()
        self.left |= reader.left
        self.functions |= reader.functions
        self.symbols |= reader.symbols
        self.compounds |= reader.compounds
        return value


def read(text: str, *, takes_units: bool = False) -> Reading:
    """The reading of an answer; with `takes_units`, `5m` is 5 meters and no product."""
    text = plain(text[:MAX_CHARACTERS])
    reading = Reading("".join(text.replace('"', "").split()).rstrip("."), takes_units=takes_units)
    try:
        tokens = [*tokens_of(text)]
        while tokens and tokens[-1].text in (".", ",", ";", ":", "?", "\\"):
            tokens.pop()
        while tokens and tokens[0].text in (":", ",", ";", "=", "approx"):
            del tokens[0]
        if [token.text for token in tokens[:3:2]] == ["(", ")"] and len(tokens) > 3 and tokens[1].text in "ABCDEF":
            tokens = tokens[3:]
        reading.values = _items(tokens, reading)
    except FAULTS:
        reading.values = []
    return reading


def split(tokens: Sequence[Token], texts: Iterable[str]) -> list[list[Token]]:
    """The tokens between separators that stand outside of brackets."""
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
    # What a variable runs over is no value.
    values = [part for part in parts if not (len(part) == 3 and part[1].text == "in" and part[2].text in ("Z", "N", "R", "Q"))]
    if not values or len(values) > MAX_ITEMS:
        raise Unreadable("nothing")
    items: list[tuple[str, list[Value]]] = []
    for part in values:
        for variant in _signs(part):
            reading.name = ""
            found = _relation(variant, reading)
            items.append((reading.name, found))
    names = [name for name, _ in items]
    if len(items) == 1:
        return items[0][1]
    firsts = tuple(found[0] for _, found in items)
    if all(names) and len(set(names)) == len(names):
        reading.name = ""
        return [("named", tuple(sorted(zip(names, firsts, strict=True), key=order)))]
    reading.name = names[0] if len(set(names)) == 1 else ""
    if any(token.text == "or" for token in tokens) and all(value[0] == "seq" for value in firsts) and reading.name:
        return [("union", frozenset(firsts))]
    return [("list", firsts)]


def _signs(tokens: Sequence[Token]) -> list[list[Token]]:
    if not any(token.text in ("pm", "mp") for token in tokens):
        return [list(tokens)]
    swaps = ({"pm": "+", "mp": "-"}, {"pm": "-", "mp": "+"})
    return [[Token("sign", swap[token.text]) if token.text in swap else token for token in tokens] for swap in swaps]


def _relation(tokens: Sequence[Token], reading: Reading) -> list[Value]:
    sides = split(tokens, RELATIONS)
    signs = [RELATIONS[token.name] for token in _outside(tokens) if token.name in RELATIONS]
    if not signs:
        return [_side(sides[0], reading)]
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


def _outside(tokens: Sequence[Token]) -> list[Token]:
    depth, found = 0, []
    for token in tokens:
        depth += token.name in OPENING
        depth -= token.name in CLOSING
        if depth == 0:
            found.append(token)
    return found


def _symbol(tokens: Sequence[Token]) -> str:
    """The one symbol that a side is, with its index; empty if it is none."""
    first = tokens[0]
    if first.kind != "letter" and (first.kind != "command" or first.text not in GREEK):
        return ""
    name = "".join(token.text for token in tokens)
    return re.sub("[{}]", "", name) if INDEX.fullmatch(name, len(first.text)) else ""


def _equation(sides: list[list[Token]], signs: list[str], reading: Reading) -> list[Value]:
    named = [_symbol(side) for side in sides]
    if named[-1] and not named[0]:
        sides, named = sides[::-1], named[::-1]
    reading.name = named[0]
    if len(sides[0]) == 1 and sides[0][0].kind == "number" and len(sides[-1]) > 1:
        sides = sides[::-1]  # 42 = 6 * 7
    value = _side(sides[-1], reading)
    before = [_computed(side) for side in sides[:-1]]
    if any(_contradicts(other, sides[-1], value, reading) for other, sign in zip(before, signs, strict=True) if sign == "="):
        reading.is_contradiction = True
    if "~" in signs:
        return [value, *(("sum", other) for other in before if other is not None)]
    relation: list[Value] = []
    if len(sides) == 2 and before[0] is not None and value[0] == "sum":
        difference = _difference(before[0], value[1])
        if difference:
            relation = [("relation", "=", scaled(difference, 1 / content(difference)))]
    if relation and not reading.name and _is_opaque(sides[0]):
        reading.name = "".join(token.text for token in sides[0])
    return [value, *relation]


def _contradicts(left: Sum | None, tokens: Sequence[Token], value: Value, reading: Reading) -> bool:
    """True if an equation says of two different numbers that they are the same; decimals may be rounded."""
    mine, right = None if left is None else rational(left), rational(value[1]) if value[0] == "sum" else None
    if mine is None or right is None or mine == right or (reading.is_percent and 100 * mine == right):
        return False
    places = len(tokens[-1].text.partition(".")[2])
    return not places or abs(mine - right) > Fraction(1, 10**places)


def _is_opaque(tokens: Sequence[Token]) -> bool:
    """True if a side names something: `f(x)`, `P(A)`, `AB`, a word."""
    name, *others = tokens
    is_call = name.kind == "letter" and others[:1] != [] and others[0].text == "(" and others[-1].text == ")"
    is_segment = len(tokens) > 1 and all(token.kind == "letter" and token.text.isupper() for token in tokens)
    return is_call or is_segment or any(token.kind == "word" for token in tokens)


def _computed(tokens: Sequence[Token]) -> Sum | None:
    """The sum that a side is, words left out; None if it cannot be read."""
    try:
        return Expression([token for token in tokens if token.kind != "word"]).whole()
    except FAULTS:
        return None


def _difference(one: Sum, other: Sum) -> Sum:
    totals: dict[Monomial, Fraction] = {}
    for monomial, coefficient in (*one, *negative(other)):
        totals[monomial] = totals.get(monomial, Fraction(0)) + coefficient
    return frozenset((monomial, coefficient) for monomial, coefficient in totals.items() if coefficient)


def _inequality(sides: list[list[Token]], signs: list[str], reading: Reading) -> Value:
    if len(signs) == 2:
        name, directions = _symbol(sides[1]), {sign[0] for sign in signs}
        if not name or len(directions) != 1 or directions == {"!"} or "=" in signs:
            raise Unreadable("a chain of relations")
        low, high = _sum(sides[0], reading), _sum(sides[2], reading)
        if directions == {">"}:
            low, high, signs = high, low, signs[::-1]
        reading.name = name
        return _interval(low, high, is_closed=("=" in signs[0], "=" in signs[1]))
    (sign,) = signs
    if not _symbol(sides[0]) and _symbol(sides[1]):
        sides, sign = sides[::-1], FLIPPED[sign]
    reading.name = _symbol(sides[0])
    bound = _sum(sides[1], reading)
    if reading.name and not Expression(sides[1]).symbols:
        if sign == "!=":
            below, above = ((negative(INFINITY), bound), (bound, INFINITY))
            return "union", frozenset(_interval(*ends, is_closed=(False, False)) for ends in (below, above))
        if sign[0] == "<":
            return _interval(negative(INFINITY), bound, is_closed=(False, "=" in sign))
        return _interval(bound, INFINITY, is_closed=("=" in sign, False))
    difference = _difference(_sum(sides[0], reading), bound)
    if not difference:
        raise Unreadable("a relation of equal sides")
    shared = content(difference)
    return "relation", sign if shared > 0 else FLIPPED[sign], scaled(difference, 1 / shared)


def _interval(low: Sum, high: Sum, *, is_closed: tuple[bool, bool]) -> Value:
    return "seq", "[" if is_closed[0] else "(", "]" if is_closed[1] else ")", (("sum", low), ("sum", high))


def _sum(tokens: Sequence[Token], reading: Reading) -> Sum:
    value = _side(tokens, reading)
    if value[0] != "sum":
        raise Unreadable("a number is expected")
    return value[1]


def _side(tokens: Sequence[Token], reading: Reading) -> Value:
    """One side of a relation, or one element of a list: brackets, a matrix, words, or an expression with a unit."""
    tokens = list(tokens)
    if tokens and all(token.kind == "word" or (token.kind == "letter" and len(tokens) > 1 and i) for i, token in enumerate(tokens)):
        return "word", words(" ".join(token.text for token in tokens))
    unions = split(tokens, ("cup",))
    if len(unions) > 1:
        return "union", frozenset(_side(part, reading) for part in unions)
    if (inner := _bracketed(tokens)) is not None:
        opened, closed = tokens[0].text, tokens[-1].text
        parts = split(inner, SEPARATORS)
        if opened == "\\{":
            return "set", frozenset(_side(part, reading) for part in parts)
        if len(parts) > 1:
            pair = ("(", ")") if opened == "langle" else (opened, closed)
            return "seq", *pair, tuple(_side(part, reading) for part in parts)
        if any(token.text.startswith("begin{") for token in inner):
            return _side(inner, reading)
    if any(token.text.startswith("begin{") for token in tokens):
        return _matrix(tokens, reading)
    if len(ratio := split(tokens, (":",))) > 1:
        return "seq", ":", ":", tuple(_side(part, reading) for part in ratio)
    tokens, factor = _without_words(tokens, reading)
    value = reading.expression(tokens)
    return "sum", scaled(value, Fraction(factor)) if factor != 1 else value


def _bracketed(tokens: Sequence[Token]) -> Sequence[Token] | None:
    """The tokens between the first and the last one, if these are one pair of brackets."""
    if len(tokens) < 2 or tokens[0].text not in ("(", "[", "\\{", "langle") or tokens[-1].text not in (")", "]", "\\}", "rangle"):
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token.name in OPENING) - (token.name in CLOSING)
        if depth == 0:
            return None
    return tokens[1:-1]


def _matrix(tokens: Sequence[Token], reading: Reading) -> Value:
    start = next(index for index, token in enumerate(tokens) if token.text.startswith("begin{"))
    kind = tokens[start].text
    is_one = tokens[-1].text.startswith("end{") and not any(token.text.startswith("begin{") for token in tokens[start + 1 :])
    if not re.match(r"begin\{([pbB]?(small)?matrix|array)", kind) or not is_one:
        raise Unreadable("not one matrix")
    lines = [line for line in split(tokens[start + 1 : -1], ("\\",)) if line]
    rows = tuple(tuple(_side(part, reading) for part in split(line, ("&",))) for line in lines)
    if start:
        scale = rational(reading.expression(tokens[:start]))
        numbers = [rational(value[1]) for row in rows for value in row if value[0] == "sum"]
        if scale is None or len(numbers) != sum(map(len, rows)):
            raise Unreadable("a matrix times something")
        # The inverse of a matrix is written so; other products are to be computed.
        above = [number.numerator for number in numbers if number is not None and number.denominator == 1]
        if abs(scale.numerator) != 1 or len(above) != len(numbers) or math.gcd(scale.denominator, *above) != 1:
            reading.left.add("product")
        rows = tuple(tuple(("sum", scaled(value[1], scale)) for value in row) for row in rows)
    return "matrix", rows


def _without_words(tokens: list[Token], reading: Reading) -> tuple[list[Token], int]:
    """The expression without the words before and behind it: units, currencies, percent."""
    while tokens and tokens[0].kind == "word" and tokens[0].text.lower() in BEFORE_NUMBERS and len(tokens) > 1:
        del tokens[0]
    if reading.takes_units and len(tokens) > 1 and tokens[-1].kind == "letter" and not any(token.text in "=+" for token in tokens):
        after = next((index for index, token in enumerate(tokens) if token.kind == "letter"), 0)
        if after and all(token.text in UNITS or token.text == "/" for token in tokens[after:]):
            tokens = tokens[:after] + [Token("word", token.text) if token.kind == "letter" else token for token in tokens[after:]]
    end = next((index for index, token in enumerate(tokens) if token.kind == "word" or token.text == "%"), len(tokens))
    tail, factor = tokens[end:], 1
    for before, token in pairwise([Token("sign", ""), *tail]):
        is_power = token.kind == "number" and before.text in ("^", "{", "-")
        if not (token.kind == "word" or is_power or token.text in ("^", "{", "}", "/", "-", "cdot", "%", "(", ")", ".")):
            raise Unreadable("words in an expression")
        if token.text.lower() in COMPUTING:
            raise Unreadable("words that compute")
        reading.is_percent |= token.text == "%" or token.text in PERCENT
        factor *= MULTIPLES.get(token.text, 1)
    reading.units += [UNITS[token.text] for token in tail if token.text in UNITS]
    if tail and end > 1 and tokens[end - 1].text == "cdot":
        end -= 1
    if not end:
        raise Unreadable("words")
    return tokens[:end], factor


def words(text: str) -> str:
    """A text as words are compared: small letters without articles and signs."""
    return " ".join(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in ARTICLES)


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
        said = answer.values[0][1] if answer.is_word else words(answer.text)
        return None if not expected.values else said == expected.values[0][1]
    if not answer.values or (answer.is_percent and not expected.is_percent):
        return False
    if answer.units and expected.units and answer.units != expected.units:
        return False
    if answer.name and expected.name and answer.name != expected.name and len(answer.name) == len(expected.name) == 1:
        return False
    if answer.left - expected.left or (expected.symbols and "expand" in expected.left - answer.left):
        return False
    # Of an equation that is no definition both sides count.
    wanted = expected.values[-1:] if expected.values[-1][0] == "relation" and not expected.name else expected.values
    if any(_same(mine, theirs) for mine in _candidates(answer, expected) for theirs in wanted):
        return True
    if answer.functions or not answer.compounds <= expected.compounds:
        return False
    return any(_equal(mine, theirs, answer, expected) for mine in _candidates(answer, expected) for theirs in wanted)


def _equal(mine: Value, theirs: Value, answer: Reading, expected: Reading) -> bool:
    """True if two values without variables are the same numbers; decimals have six places, and five digits of small numbers."""
    if mine[0] != theirs[0] or mine[0] not in ("sum", "seq", "list", "matrix"):
        return False
    if mine[0] != "sum":
        ours, others = (tuple(_numbers(value)) for value in (mine, theirs))
        is_alike = mine[1:-1] == theirs[1:-1] and _shape(mine) == _shape(theirs)
        return is_alike and all(_equal(one, other, answer, expected) for one, other in zip(ours, others, strict=True))
    try:
        found, right = (evaluate(value[1]) for value in (mine, theirs))
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
        if value[0] == "sum":
            with suppress(*FAULTS):
                yield abs(complex(evaluate(value[1])))
        elif value[0] in ("seq", "list", "matrix"):
            yield from magnitudes(_numbers(value))


def _shape(value: Value) -> list[int]:
    return [len(member) if isinstance(member[0], tuple) else 0 for member in value[-1]]


def _numbers(value: Value) -> Iterable[Value]:
    members = value[-1]
    for member in members if isinstance(members, tuple) else ():
        if isinstance(member, tuple) and isinstance(member[0], tuple):
            yield from member
        else:
            yield member


def _candidates(answer: Reading, expected: Reading) -> list[Value]:
    values = list(answer.values)
    if expected.values[-1][0] != "relation" or expected.name:
        # The left side of an equation counts only where an equation is expected, and not one that is solved.
        values = [value for value in values if value[0] != "relation" or value[1] != "="]
    if expected.is_percent and not answer.is_percent and values[0][0] == "sum":
        values.append(("sum", scaled(values[0][1], Fraction(100))))
    return values


def _same(mine: Value, theirs: Value) -> bool:
    """True if two values say the same; brackets may be missing, and what is in no order may be in any."""
    mine, theirs = _unwrapped(mine), _unwrapped(theirs)
    if mine == theirs:
        return True
    match theirs, mine:
        case ("list", members), ("list", others):
            return Counter(map(order, members)) == Counter(map(order, others))
        case ("set", members), ("list", others):
            return members == frozenset(others)
        case ("list", members), ("set", others):
            return frozenset(members) == others
        case ("list", members), ("named", pairs) if len({str(name).partition("_")[0] for name, _ in pairs}) == 1:
            return Counter(map(order, members)) == Counter(order(value) for _, value in pairs)
        case (("list", members), ("seq", "(", ")", others)) | (("seq", "(", ")", members), ("list", others)):
            return members == others
        case ("seq", "(", ")", members), ("matrix", rows):
            return members == tuple(row[0] for row in rows if len(row) == 1) or (len(rows) == 1 and members == rows[0])
        case ("matrix", rows), ("seq", "(", ")", others):
            return others == tuple(row[0] for row in rows if len(row) == 1)
        case ("seq", "(", ")", members), ("named", pairs):
            return members == tuple(value for _, value in pairs)
        case ("named", pairs), (("seq", "(", ")", others) | ("list", others)):
            return others == tuple(value for _, value in pairs)
    return False


def _unwrapped(value: Value) -> Value:
    if value[0] == "set" and len(value[1]) == 1:
        return next(iter(value[1]))
    return value
