# SPDX-License-Identifier: Apache-2.0
"""Judges mathematics by value, with math-verify, and measures its cost before math-verify and sympy see it.

Each bound is linear in the text. An answer may always be as costly as the expected one. Runs in `mrl.envs.child`.
"""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass, replace
from decimal import Decimal
from itertools import groupby

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import extract_match, get_extraction_regexes
from sympy import Abs, Add, Basic, Integer, Mul, Number, Pow, Product, Rational, Sum, exp

from mrl.envs.task import RowFault

# Of type int in math-verify; 0 and below switch its own deadlines off.
NO_TIMEOUT = 0

GOLD_TARGETS = [LatexExtractionConfig()]
# The end of a text of any length: answers stand there.
SEARCHED_CHARACTERS = 20_000
ANSWER_TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]
# Characters of mathematics to try to parse before the answer counts as wrong; each try costs at least the minimum.
MAX_TRIED_CHARACTERS = 4_000
MIN_TRIED_CHARACTERS = 50
# math-verify's patterns, in the order in which it tries them.
PATTERNS = sorted(
    ((priority, pattern, target) for patterns, target in get_extraction_regexes(ANSWER_TARGETS) for pattern, priority in patterns),
    key=lambda found: found[0],
)

TOO_COSTLY = "too costly to compute"
NOT_FINAL = "not a final value: "

INTEGER = r"(?:\d[\d,]*+|\d{1,3}(?: \d{3})+)"
DECIMAL = re.compile(rf"([-+]?)\\?\$?({INTEGER}(?:\.\d*)?|\.\d+)(?:\\?%)?")
FRACTION = re.compile(r"[-+]?(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))")
OPERATION = re.compile(r"\\(?:sum|prod|i?int|lim|log|gcd|lcm|max|min|[dt]?binom|lfloor|lceil|bmod|sin|cos|tan)(?![a-z])|[!|%]")
"""Operations that leave something to compute."""
# The number in front of an equals sign, if nothing is computed there.
NUMBER_ALONE = re.compile(rf"(?:^|[^\d.,+\-*/^()=\s{{}}])\s*([-+]?{INTEGER}(?:\.\d+)?)\s*$")
LEFT_CHARACTERS = 100
PERCENT = re.compile(r"\s?\\?%")

BOX = "\\boxed{"
MAX_BOXES = 32
MAX_SEARCH_COST = 3.0e8
"""Steps of math-verify's patterns, about half a second."""

# The longest answer of MATH has some 160 characters and 6 levels, of GSM8K 9 digits.
MAX_CHARACTERS = 1_000
# Parentheses in each other double the parser's work with each level.
MAX_DEPTH = 10
MAX_PARTS = 50
MAX_DIGIT_RUN = 200
MAX_VALUE_DIGITS = 1.0e5
"""Decimal digits of the largest number on the way to a value: sympy takes a tenth of a second for so many."""
MAX_EXPECTED_DIGITS = 1.0e7
# A sum with symbols to the power of n has so many times n digits: simplify expands it.
DIGITS_PER_EXPANSION = 2_000.0
FACTORIALS = ("factorial", "factorial2", "subfactorial", "gamma", "binomial", "fibonacci", "zeta")

_PARTS = re.compile(r",|;|&|\\c[au]p|\\\\")
_DIGITS = re.compile(r"\d+")
_NUMBER_RUN = re.compile(r"[\d.\s+\-*×/^()÷,]+")
# Functions that latex2sympy computes while it parses.
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
    """Elements of lists, sets and unions."""
    digit_run: int
    is_eager: bool
    """Whether parsing it already computes with numbers that may be large."""

    def fits(self, expected: Size) -> bool:
        """Whether it is small, or no larger than the expected answer."""
        return all(mine <= max(most, theirs) for mine, most, theirs in zip(astuple(self), SMALL, astuple(expected), strict=True))


SMALL = (MAX_CHARACTERS, MAX_DEPTH, MAX_PARTS, MAX_DIGIT_RUN, False)
"""The bounds of an answer, by the fields of `Size`, wherever the expected one is not larger."""
ANY_EXPECTED = Size(characters=20_000, depth=12, num_parts=1_000, digit_run=4_000, is_eager=True)
"""The largest expected answer; Python reads no longer numbers."""


class TooCostly(Exception):
    """Finding or computing the mathematics of a text takes too long."""


@dataclass(frozen=True)
class Found:
    """The mathematics in a text that counts as its answer: the expression and its text (only the text if it cannot be parsed), the text
    left of its last equals sign (empty if there is none), and whether a percent sign follows."""

    values: list[object]
    left: str
    is_percentage: bool


def score(text: str, expected: str, *, is_strict: bool = False) -> tuple[float, str]:
    """`(1.0 or 0.0, the answer as found)`. Numbers compare by value: 046 is 46, 1,200 is 1200, 0.5 is 1/2.

    In a text with `####`, as in GSM8K, only what follows the last one counts; otherwise an equation before it might be taken.
    Mathematics that is too costly to find or to compute is wrong. With `is_strict`, an answer must be final, see `is_final`. An expected
    answer that is no mathematics, or too costly, is a RowFault.

    math-verify's own timeouts are off: they report a hang as a wrong answer. The pool's deadline finds out whose fault it is.
    """
    size = size_of(expected)
    if not size.fits(ANY_EXPECTED):
        raise RowFault(f"the expected answer {expected!r:.100} is too costly to parse")
    gold: list[object] = parse(f"\\boxed{{{expected}}}", extraction_config=GOLD_TARGETS, parsing_timeout=NO_TIMEOUT)
    if not gold:
        raise RowFault(f"the expected answer {expected!r:.100} cannot be parsed")
    num_digits = value_digits(gold[0]) if isinstance(gold[0], Basic) else 0.0
    if num_digits > MAX_EXPECTED_DIGITS:
        raise RowFault(f"the expected answer {expected!r:.100} is too costly to compute")
    try:
        found = find_answer(text.rpartition("####")[2][-SEARCHED_CHARACTERS:], size)
        if found is None:
            return 0.0, ""
        if isinstance(found.values[0], Basic) and value_digits(found.values[0]) > max(MAX_VALUE_DIGITS, num_digits):
            raise TooCostly
    except TooCostly:
        return 0.0, TOO_COSTLY
    shown = str(found.values[-1])
    if is_strict and not is_final(found, str(gold[-1])):
        return 0.0, NOT_FINAL + shown
    return float(verify(gold, found.values, timeout_seconds=NO_TIMEOUT)), shown


def find_answer(text: str, expected: Size) -> Found | None:
    """The answer that math-verify would take: the last match that can be parsed, of the pattern that comes first; None if there is none.

    TooCostly says that the search takes too long, or that the mathematics is larger than an answer may be.
    """
    if search_cost(text) > MAX_SEARCH_COST:
        raise TooCostly
    unparsed: Found | None = None
    left_to_try = MAX_TRIED_CHARACTERS + expected.characters
    for _, patterns in groupby(PATTERNS, key=lambda entry: entry[0]):
        matches = [(match, target) for _, pattern, target in patterns for match in pattern.finditer(text)]
        for match, target in sorted(matches, key=lambda found: (found[0].end(), -found[0].start()), reverse=True):
            # What math-verify parses of a match: the contents of its boxes, or all of it.
            parts = [_up_to_closing_brace(box) for box in match[0].split(BOX)[1:]] or [match[0]]
            left_to_try -= sum(MIN_TRIED_CHARACTERS + len(part) for part in parts)
            if left_to_try < 0 or not all(size_of(part).fits(expected) for part in parts):
                raise TooCostly
            value, shown = extract_match(match, target)
            groups = {name: text for name, text in match.groupdict().items() if text}
            start = min((match.start(name) for name in groups), default=match.start())
            before = match.string[max(0, start - LEFT_CHARACTERS) : start].rstrip()
            left = before[:-1] if before.endswith("=") else str(shown).rpartition("=")[0]
            is_percentage = any(name.endswith("percent") for name in groups) or PERCENT.match(match.string, match.end()) is not None
            found = Found([shown], left, is_percentage)
            unparsed = unparsed or (found if shown else None)
            if value is not None:
                # As math-verify does: the value, then the text of the first try.
                return replace(found, values=[value, *(unparsed.values if unparsed else [])])
    return unparsed


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text


def is_final(found: Found, expected: str) -> bool:
    """Whether nothing is left to compute in an answer; of an equation the right side counts.

    Where a number is expected, the answer must be an integer, a decimal, or a fraction in lowest terms, and no equation of two different
    numbers. Else it may use no operation (sums, integrals, factorials, ...) that the expected answer does not use.
    """
    shown = str(found.values[-1])
    if found.is_percentage and "%" not in expected:
        return False
    if not (DECIMAL.fullmatch(wanted := expected.rpartition("=")[2].strip()) or FRACTION.fullmatch(wanted)):
        return set(OPERATION.findall(shown)) <= set(OPERATION.findall(expected))
    answer = shown.rpartition("=")[2].strip()
    if "%" in answer and "%" not in expected:
        return False
    if (fraction := FRACTION.fullmatch(answer)) is not None:
        above, below = (int(number) for number in fraction.groups() if number)
        return below > 1 and math.gcd(above, below) == 1
    claimed = NUMBER_ALONE.search(found.left)
    return DECIMAL.fullmatch(answer) is not None and (claimed is None or _decimal(claimed[1]) == _decimal(answer))


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.+-]", "", text))


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


# The first call builds parser tables and fills sympy's caches (0.3 s), which must not count against the first rollout.
score("\\boxed{\\frac{1}{2}}", "0.5")
