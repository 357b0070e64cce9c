# SPDX-License-Identifier: Apache-2.0
"""Judges mathematics by value, with math-verify, and measures its cost before math-verify and sympy see it.

Each bound is linear in the text. An answer may always be as costly as the expected one. Runs in `mrl.envs.child`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from decimal import Decimal
from itertools import groupby

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import extract_match, get_extraction_regexes
from sympy import Abs, Add, Basic, Float, Integer, Integral, MatrixBase, Mul, Number, Pow, Product, Rational, Sum, Tuple, exp, log

from mrl.envs.math_answer import DATE, Reading, read
from mrl.envs.math_same import agrees, magnitudes
from mrl.envs.math_tokens import plain
from mrl.envs.task import RowFault

# Of type int in math-verify; 0 and below switch its own deadlines off.
NO_TIMEOUT = 0

GOLD_TARGETS = [LatexExtractionConfig()]
SEARCHED_CHARACTERS = 20_000
ANSWER_TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]
# Characters of mathematics to try to parse before the answer counts as wrong; each try costs at least the minimum.
MAX_TRIED_CHARACTERS = 4_000
MIN_TRIED_CHARACTERS = 50
PATTERNS = sorted(
    ((priority, pattern, target) for patterns, target in get_extraction_regexes(ANSWER_TARGETS) for pattern, priority in patterns),
    key=lambda found: found[0],
)

TOO_COSTLY = "too costly to compute"

LEFT_CHARACTERS, MAX_PHRASE_CHARACTERS = 100, 200
BOXES = re.compile(r"\\(?:boxed|fbox)\s*+\{")
PERCENT = re.compile(r"\s?\\?%")
COMPUTED = re.compile(r"[\d\s+\-*×÷/().^]*$")
ANSWER_PHRASE = re.compile(r"(?i)answer(?:\s++is)?\s*+:?\s*+((?:(?!answer(?:\s+is\b|\s*:))[^\n])*+)")
NEGATION = re.compile(r"(?i)\b(?:not?|never|up to)\b")
# Signs of Markdown around an answer: not the powers of programs.
EMPHASIS = re.compile(r"(?<!\w)\*\*|\*\*(?!\w)|`|(?<![\w*])\*(?=[^\s*])([^\s*]{1,60})\*(?![\w*])|(?<!\w)__([^_\s]{1,60})__(?!\w)")
SPELLED = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2007": " ", "`": ""})
SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,2}")
HEADING = re.compile(r"(?:\d+[.):]\s*)?[^\W\d_]{2}")
OPERATION = re.compile(r"\\(?:[a-zA-Z]+)|[!|%']")
WORD = re.compile(r"[^\W\d_]{2,}")
DIGITS_OF_BASE = re.compile(r"(?<!\d)(\d++)_(?:\{(\d+)\}|(\d+))")
# math-verify rounds decimals to so many places; of small numbers as many digits count.
PLACES, DIGITS = 6, 4
# It takes differences below so many places for zero, which must be smaller than the numbers. More than the most take it seconds.
PRECISION, MAX_PLACES = 15, 10_000

BOX = "\\boxed{"
JOINT = re.compile(r"[\s$.]*+(?:,|;|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or)(?:[\s$,]|and|or)*+")
DECIMAL_COMMA = re.compile(r"(?<![\d,.])(?:0,\d+|\d+,(?:\d\d?|\d{4,}))(?![\d,]|\.\d)")
MAX_BOXES = 32
MAX_SEARCH_COST = 3.0e8

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
        """True when the value is small, or no larger than the expected answer."""
        return all(mine <= max(most, theirs) for mine, most, theirs in zip(astuple(self), SMALL, astuple(expected), strict=True))


SMALL = (MAX_CHARACTERS, MAX_DEPTH, MAX_PARTS, MAX_DIGIT_RUN, False)
"""The bounds of an answer, by the fields of `Size`, wherever the expected one is not larger."""
ANY_EXPECTED = Size(characters=20_000, depth=12, num_parts=1_000, digit_run=4_000, is_eager=True)
"""The largest expected answer; Python reads no longer numbers."""


class TooCostly(Exception):
    """Finding or computing the mathematics of a text takes too long."""


@dataclass(frozen=True)
class Found:
    """A piece of mathematics in a text."""

    match: re.Match[str]
    target: ExprExtractionConfig | LatexExtractionConfig
    raw: str
    """The text itself; of boxes their contents."""
    left: str
    """The text in front of it, if an equals sign stands between."""


def score(text: str, expected: str, *, is_strict: bool = False) -> tuple[float, str]:
    """`(1.0 or 0.0, the answer as found)`. Numbers compare by value: 046 is 46, 1,200 is 1200, 0.5 is 1/2.

    In a text with a line `#### 42`, as in GSM8K, only what follows counts; otherwise an equation before it might be taken. Mathematics
    that is too costly to find or to compute is wrong. With `is_strict`, an answer must be final, see `score_form`. An expected answer
    that is no mathematics, or too costly, is a RowFault.

    math-verify's own timeouts are off: they report a hang as a wrong answer. The pool's deadline finds out whose fault it is.
    """
    size = size_of(expected)
    if not size.fits(ANY_EXPECTED):
        raise RowFault(f"the expected answer {expected!r:.100} is too costly to parse")
    text = answer_part(text)[-SEARCHED_CHARACTERS:]
    try:
        return score_form(text, expected, size) if is_strict else score_value(text, expected, size)
    except TooCostly:
        return 0.0, TOO_COSTLY


def score_value(text: str, expected: str, size: Size) -> tuple[float, str]:
    """The verdict of math-verify, corrected for words, number bases and small numbers."""
    gold, num_digits = _parse_expected(expected)
    values = find_answer(text, size, expected)
    if not values:
        return 0.0, ""
    if isinstance(values[0], Basic) and value_digits(values[0]) > max(MAX_VALUE_DIGITS, num_digits):
        raise TooCostly
    shown = str(values[-1])
    if _differ(values, expected):
        return 0.0, shown
    places = _places(gold)
    same = verify(gold, values, float_rounding=places, numeric_precision=max(PRECISION, places), timeout_seconds=NO_TIMEOUT)
    return float(same), shown


def score_form(text: str, expected: str, size: Size) -> tuple[float, str]:
    """The verdict on an answer that must say what the expected one says, with nothing left to compute that is not left there too.

    `mrl.envs.math_same` compares the forms. Of an equation the right side counts, if its left side is not another number. Where the
    expected answer is none of its forms, math-verify judges an answer of the same numbers and commands.
    """
    text = EMPHASIS.sub(lambda match: match[1] or match[2] or "", text.translate(SPELLED).replace("\\$", ""))
    text = joined_boxes(BOXES.sub(lambda match: BOX, text))
    if re.fullmatch(r"-?\d*\.\d+", expected):
        text = DECIMAL_COMMA.sub(lambda match: match[0].replace(",", "."), text)
    wanted = read(expected)
    gold = [] if wanted.values else _parse_expected(expected)[0]
    if BOX not in text:
        # math-verify finds no pairs, words and expressions in plain text.
        phrases = ANSWER_PHRASE.findall(text)
        shown = (phrases or text.strip().rsplit("\n", 1)[-1:])[-1].strip()
        shown = shown if "!" in expected else shown.rstrip("!")
        if len(shown) <= MAX_PHRASE_CHARACTERS and size_of(shown).fits(size):
            reading = read(shown, takes_units=not wanted.work.symbols)
            same = agrees(reading, wanted)
            if same or wanted.is_word or (phrases and (reading.values or NEGATION.search(shown)) and _DIGITS.search(shown)):
                return float(bool(same)), shown
    found, answer, start = None, Reading(""), 0
    for piece in pieces(text, size):
        if found is not None and piece.match.start() >= start:
            continue  # a part of what cannot be read
        reading, start = read(piece.raw, takes_units=not wanted.work.symbols), piece.match.start()
        if found is None or reading.values:
            found, answer = piece, reading
        if reading.values or BOX in text:
            break
    if found is None:
        return 0.0, ""
    shown, left = found.raw, COMPUTED.search(found.left)
    if answer.values and left is not None and left[0].strip(" ."):
        answer.is_contradiction |= read(f"{left[0].strip(' .')}={shown}").is_contradiction
    same = agrees(answer, wanted)
    if same is None:
        is_alike = _DIGITS.findall(shown) == _DIGITS.findall(expected)
        values = parse(f"\\boxed{{{shown}}}", extraction_config=GOLD_TARGETS, parsing_timeout=NO_TIMEOUT)
        is_alike = bool(is_alike and values and set(OPERATION.findall(shown)) <= set(OPERATION.findall(expected)))
        same = is_alike and not _differ(values, expected) and verify(gold, values, timeout_seconds=NO_TIMEOUT)
    return float(bool(same)), shown


def _parse_expected(expected: str) -> tuple[list[object], float]:
    """math-verify's reading of the expected answer, and the digits that its value has."""
    text = f"\\boxed{{{_in_latex(expected.strip().rstrip('.'))}}}"
    gold: list[object] = parse(text, extraction_config=GOLD_TARGETS, parsing_timeout=NO_TIMEOUT)
    if not gold:
        raise RowFault(f"the expected answer {expected!r:.100} cannot be parsed")
    num_digits = value_digits(gold[0]) if isinstance(gold[0], Basic) else 0.0
    if num_digits > MAX_EXPECTED_DIGITS:
        raise RowFault(f"the expected answer {expected!r:.100} is too costly to compute")
    return gold, num_digits


def _in_latex(expected: str) -> str:
    """The expected answer as math-verify reads it: numbers as 1e-05, and signs and digits of Unicode, are none for it."""
    if len(expected) < MAX_DIGIT_RUN and SCIENTIFIC.fullmatch(expected):
        return format(Decimal(expected), "f")
    if expected.isascii():
        return expected
    return plain("".join(str(int(sign)) if sign.isdecimal() else sign for sign in expected)).replace('"', "")


def answer_part(text: str) -> str:
    """The text in the last `<answer>`, else behind the last `####` that an answer follows, and that is no heading; else all of it."""
    said, _, behind = text.rpartition("<answer>")[2].partition("</answer>")
    if "<answer>" in text and said.strip() and BOX not in behind:
        return said
    end = len(text)
    has_box = BOX in text
    while (at := text.rfind("####", 0, end)) >= 0:
        line = text[at + 4 :].partition("\n")[0].strip(" #*:")
        if not line and not text[at:].strip(" #\n"):
            return ""
        is_heading = HEADING.match(line) is not None or (has_box and BOX not in line and WORD.search(line.replace("\\", "")) is not None)
        if line and not is_heading:
            return text[at + 4 : end]
        end = at
    return text


def _places(gold: list[object]) -> int:
    """Decimal places by which math-verify compares numbers with this expected answer: more than six where one in it is small."""
    smallest = min(_orders(gold[0]) if isinstance(gold[0], Basic | MatrixBase) else (), default=0.0)
    return max(PLACES, min(DIGITS + math.ceil(-smallest), MAX_PLACES))


def _orders(node: Basic | MatrixBase) -> Iterator[float]:
    """Logarithms to base 10 of the numbers in an expression; of a number in parts only its own."""
    if isinstance(node, MatrixBase):
        node = Tuple(*node)
    if not node.is_number:
        for part in node.args:
            yield from _orders(part)
    elif not node.has(Sum, Product, Integral) and isinstance(size := Abs(node.evalf(DIGITS)), Float) and size:
        yield float(log(size, 10))


def _differ(values: list[object], expected: str) -> bool:
    """True if math-verify would be wrong to take an answer for the expected one: words, bases of numbers, and zero."""
    shown = str(values[-1])
    ours, theirs, mine, wanted = read(shown), read(expected), DIGITS_OF_BASE.search(shown), DIGITS_OF_BASE.search(expected)
    if theirs.is_word and (ours.is_word or DATE.fullmatch(expected)):
        return ours.values != theirs.values
    if mine is not None and wanted is not None:
        return [group for group in mine.groups() if group] != [group for group in wanted.groups() if group]
    return isinstance(values[0], Number) and bool(values[0] == 0) and any(magnitudes(theirs.values))


def pieces(text: str, expected: Size) -> Iterator[Found]:
    """The mathematics that math-verify would try, in its order: the last match of the pattern that comes first, and so on."""
    if search_cost(text) > MAX_SEARCH_COST:
        raise TooCostly
    left_to_try = MAX_TRIED_CHARACTERS + expected.characters
    for _, patterns in groupby(PATTERNS, key=lambda entry: entry[0]):
        matches = [(match, target) for _, pattern, target in patterns for match in pattern.finditer(text)]
        for match, target in sorted(matches, key=lambda found: (found[0].end(), -found[0].start()), reverse=True):
            parts = [_up_to_closing_brace(box) for box in match[0].split(BOX)[1:]] or [match[0]]
            left_to_try -= sum(MIN_TRIED_CHARACTERS + len(part) for part in parts)
            if left_to_try < 0 or not all(size_of(part).fits(expected) for part in parts):
                raise TooCostly
            yield _piece(match, target, parts)


def _piece(match: re.Match[str], target: ExprExtractionConfig | LatexExtractionConfig, parts: list[str]) -> Found:
    groups = {name: content for name, content in match.groupdict().items() if content}
    bare = [name for name in groups if not name.endswith("percent")]
    start = min(map(match.start, bare), default=match.start())
    before = match.string[max(0, start - LEFT_CHARACTERS) : start].rstrip()
    if BOX in match[0]:
        raw = parts[-1] if "first_latexBoxed" in groups else ", ".join(parts)
    else:
        is_latex = isinstance(target, LatexExtractionConfig)
        raw = ", ".join(groups[name] for name in bare) if is_latex else match.string[start : max(map(match.end, bare))]
    is_percentage = len(bare) < len(groups) or PERCENT.match(match.string, match.end()) is not None
    return Found(match, target, raw + "\\%" * is_percentage, before[:-1] if before.endswith("=") else "")


def find_answer(text: str, size: Size, expected: str = "") -> list[object]:
    """The answer that math-verify would take, and the text of its first try; only the text if nothing can be parsed."""
    first: list[object] = []
    for piece in pieces(text, size):
        said = right_side(piece.raw)
        has_limits = LIMITS.search(said) is not None and LIMITS.search(expected) is None
        if has_limits or len(FUNCTION_NAMES.findall(said)) > max(MAX_FUNCTIONS, len(FUNCTION_NAMES.findall(expected))):
            raise TooCostly
        value, shown = extract_match(piece.match, piece.target)
        first = first or ([shown] if shown else [])
        if value is not None:
            return [value, *first]
    return first


def right_side(text: str) -> str:
    """The text behind the last equals sign outside of braces: of an equation it counts."""
    depth = start = 0
    for index, character in enumerate(text):
        depth += (character in "{(") - (character in "})")
        if character == "=" and depth <= 0:
            start = index + 1
    return text[start:]


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text


def joined_boxes(text: str) -> str:
    """The text with boxes that have only a comma, "and" or "or" between them as one box: the values of a list."""
    first, *parts = text.split(BOX)
    joined, opening = [first], BOX
    for index, part in enumerate(parts):
        content = _up_to_closing_brace(part)
        goes_on = index + 1 < len(parts) and JOINT.fullmatch(part, len(content) + 1) is not None
        joined += [opening, content if goes_on else part]
        opening = ", " if goes_on else BOX
    return "".join(joined)


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
