# SPDX-License-Identifier: Apache-2.0
"""Judges mathematics by value, with math-verify, and measures its cost before math-verify and sympy see it.

Each bound is linear in the text. An answer may always be as costly as the expected one. Runs in `mrl.envs.child`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import groupby

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import extract_match, get_extraction_regexes
from sympy import Abs, Basic, Float, Integral, MatrixBase, Number, Product, Sum, Tuple, log

from mrl.envs.letters import choose
from mrl.envs.math_notation import as_set, evened
from mrl.envs.math_number import Plain, answers, is_hedged, read_number, spelled
from mrl.envs.math_size import (
    ANY_EXPECTED,
    BOX,
    FUNCTION_NAMES,
    LIMITS,
    MAX_CHARACTERS,
    MAX_DIGIT_RUN,
    MAX_EXPECTED_DIGITS,
    MAX_FUNCTIONS,
    MAX_VALUE_DIGITS,
    Size,
    differ,
    search_cost,
    size_of,
    value_digits,
)
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
    (
        (priority, pattern, target)
        for patterns, target in get_extraction_regexes(ANSWER_TARGETS)
        for pattern, priority in patterns
    ),
    key=lambda found: found[0],
)

TOO_COSTLY = "too costly to compute"

LEFT_CHARACTERS = 100
BOXES = re.compile(r"\\(?:boxed|fbox)\s*+\{")
PERCENT = re.compile(r"\s?\\?%")
ANSWER_PHRASE = re.compile(r"(?i)answer(?:\s++is)?\s*+:?\s*+((?:(?!answer(?:\s+is\b|\s*:))[^\n])*+)")
# Signs of Markdown around an answer: not the powers of programs.
EMPHASIS = re.compile(
    r"(?<!\w)\*\*|\*\*(?!\w)|`|(?<![\w*])\*(?=[^\s*])([^\s*]{1,60})\*(?![\w*])|(?<!\w)__([^_\s]{1,60})__(?!\w)"
)
SCIENTIFIC = re.compile(r"[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,2}")
HEADING = re.compile(r"(?:\d+[.):]\s*)?[^\W\d_]{2}")
# The signs in a date mean no difference or quotient.
DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[/.-]\d\d?[/.-]\d{4}")
SHORT_WORDS = frozenset(("no", "on", "up"))
ARTICLES = frozenset(("a", "an", "the", "on", "in", "at"))
AMBIGUOUS = re.compile(r"[\d}]\s*+(?:m|g|s|h|l|L|mg|F|C)\s*+$")
LETTER = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?\s*+\(?\s*+([A-F])\s*+\)?\s*+\}?")
FONTS = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname)\s*+\{([^{}]*)\}")
BARE = re.compile(
    r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|left|right|displaystyle|quad)(?![A-Za-z])|\\[()\[\],;:! "
    r"]|[\s$]|(?<=\\)[dt](?=frac)"
)
WORD = re.compile(r"[^\W\d_]{2,}")
DIGITS_OF_BASE = re.compile(r"(?<!\d)\(?(\d++)\)?_(?:\{(\d+)\}|(\d+))")
# math-verify rounds decimals to so many places; of small numbers as many digits count.
PLACES, DIGITS = 6, 4
# It takes differences below so many places for zero, which must be smaller than the numbers. More than the most take it
# seconds.
PRECISION, MAX_PLACES = 15, 10_000

JOINT = re.compile(r"[\s$.]*+(?:,|;|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or)(?:[\s$,]|and|or)*+")
MAX_SEARCH_COST = 3.0e8


class TooCostly(Exception):
    """Finding or computing the mathematics of a text takes too long."""


@dataclass(frozen=True)
class Given:
    """An answer to judge."""

    text: str
    expected: str
    size: Size
    number: Plain | None
    """The expected answer, if it is a plain number."""
    is_stated: bool
    """True if the text is what stands in `<answer>` or behind `####`."""
    is_evened: bool = False
    """True if both answers are in the notation of `mrl.envs.math_notation`."""


@dataclass(frozen=True)
class Found:
    """A piece of mathematics in a text."""

    match: re.Match[str]
    target: ExprExtractionConfig | LatexExtractionConfig
    raw: str
    """The text itself; of boxes their contents."""
    start: int
    end: int
    """Its place in the text; of LaTeX with its signs."""


def score(text: str, expected: str, *, is_strict: bool = False) -> tuple[float, str]:
    """`(1.0 or 0.0, the answer as found)`. Numbers compare by value: 046 is 46, 1,200 is 1200, 0.5 is 1/2.

    In a text with a line `#### 42`, as in GSM8K, only what follows counts. Mathematics that is too costly to find or to
    compute is wrong. With `is_strict`, an answer must be final, see `score_form`. An expected answer that is no
    mathematics, or too costly, is a RowFault. math-verify's own timeouts are off: they report a hang as a wrong answer;
    the pool's deadline finds out whose fault it is.
    """
    size = size_of(expected)
    if not size.fits(ANY_EXPECTED):
        raise RowFault(f"the expected answer {expected!r:.100} is too costly to parse")
    stated = answer_part(text)
    given = Given(stated[-SEARCHED_CHARACTERS:], expected, size, expected_number(expected), len(stated) < len(text))
    try:
        return score_form(given) if is_strict else score_value(given)
    except TooCostly:
        return 0.0, TOO_COSTLY


def expected_number(expected: str) -> Plain | None:
    """The plain number that the expected answer is; None if it is anything else."""
    number = (
        read_number(_in_latex(expected)) if "=" not in expected and DIGITS_OF_BASE.search(expected) is None else None
    )
    # `5m` may be 5 metres or a product.
    is_product = number is not None and AMBIGUOUS.search(expected) is not None
    return number if number is not None and number.is_final and not is_product else None


def score_value(given: Given) -> tuple[float, str]:
    """math-verify's verdict, corrected for words, number bases, exact and small numbers, and unclaimed numbers."""
    gold, num_digits = _parse_expected(given.expected)
    values, piece = find_answer(given.text, given.size, given.expected)
    if not values:
        return 0.0, ""
    if isinstance(values[0], Basic) and value_digits(values[0]) > max(MAX_VALUE_DIGITS, num_digits):
        raise TooCostly
    shown = str(values[-1])
    if _differ(gold, values, given.expected) or _is_hedged(given, piece):
        return 0.0, shown
    places = _places(gold)
    if given.is_evened:
        gold, values = [as_set(gold[0])], [as_set(values[0])]
    same = verify(
        gold, values, float_rounding=places, numeric_precision=max(PRECISION, places), timeout_seconds=NO_TIMEOUT
    )
    return float(same), shown


def score_form(given: Given) -> tuple[float, str]:
    """The verdict on an answer that must be a plain number if the expected one is; math-verify judges all others."""
    text = EMPHASIS.sub(lambda match: match[1] or match[2] or "", given.text)
    given = replace(given, text=joined_boxes(BOXES.sub(lambda match: BOX, text)))
    shown = _said(given.text)
    if given.number is None:
        return score_symbols(given, shown)
    # math-verify finds few fractions in plain text.
    if BOX not in given.text and (number := read_number(shown)) is not None:
        return float(answers(number, given.number)), shown
    found, start = None, 0
    for piece in pieces(given.text, given.size):
        if found is not None and piece.start >= start:
            continue  # a part of what cannot be read
        number, start = read_number(piece.raw), piece.start
        if found is None or number is not None:
            found = piece, number
        if number is not None or BOX in given.text:
            break
    if found is None:
        return 0.0, ""
    piece, number = found
    if number is None or _is_hedged(given, piece) or _is_contradiction(given.text, piece):
        return 0.0, piece.raw
    return float(answers(number, given.number)), piece.raw


def _said(text: str) -> str:
    """The last box, else what follows the last `answer is`, else the last line."""
    if BOX in text:
        return _up_to_closing_brace(text.rpartition(BOX)[2])
    phrases = ANSWER_PHRASE.findall(text)
    return (phrases or text.strip().rsplit("\n", 1)[-1:])[-1].strip()


def score_symbols(given: Given, said: str) -> tuple[float, str]:
    """math-verify's verdict on an answer as it is written, and in one notation; words and letters compare as text."""
    if (letter := LETTER.fullmatch(given.expected)) is not None:
        chosen = choose(given.text)
        return float((chosen or said.strip(" .()").upper()) == letter[1]), chosen or said
    if bare(said) == bare(given.expected) or _words(said) == _words(given.expected) != "":
        return 1.0, said
    reward, shown = score_value(given)
    if reward or len(said) > MAX_CHARACTERS or not size_of(said).fits(given.size):
        return reward, shown
    boxed = replace(given, text=f"{BOX}{evened(said)}}}", expected=evened(given.expected), is_evened=True)
    try:
        return score_value(boxed)[0], shown
    except RowFault:
        return 0.0, shown


def _is_hedged(given: Given, piece: Found | None) -> bool:
    """True if the expected answer is a plain number, which the text does not claim."""
    return (
        given.number is not None
        and piece is not None
        and is_hedged(given.text, piece.start, piece.end, is_stated=given.is_stated)
    )


def _is_contradiction(text: str, piece: Found) -> bool:
    """True if a plain text says that another number is this one: `41 = 42`."""
    left = text[max(0, piece.start - LEFT_CHARACTERS) : piece.start].rpartition("\n")[2]
    is_equation = BOX not in text and left.rstrip().endswith("=") and not re.search("[^\\W\\d_]", left)
    return is_equation and read_number(left + piece.raw) is None


def bare(text: str) -> str:
    """A text without white space, delimiters of mathematics, fonts and sizes."""
    return re.sub(r"\{(\w|[:-]|\\[A-Za-z]+)\}", r"\1", BARE.sub("", FONTS.sub(r"\1", spelled(text.rstrip(". ")))))


def _parse_expected(expected: str) -> tuple[list[object], float]:
    text = f"\\boxed{{{_in_latex(expected.strip().rstrip('.'))}}}"
    gold: list[object] = parse(text, extraction_config=GOLD_TARGETS, parsing_timeout=NO_TIMEOUT)
    if not gold:
        raise RowFault(f"the expected answer {expected!r:.100} cannot be parsed")
    num_digits = value_digits(gold[0]) if isinstance(gold[0], Basic) else 0.0
    if num_digits > MAX_EXPECTED_DIGITS:
        raise RowFault(f"the expected answer {expected!r:.100} is too costly to compute")
    return gold, num_digits


def _in_latex(expected: str) -> str:
    """The expected answer as math-verify reads it: numbers as 1e-05, and Unicode signs and digits, are none for it."""
    if len(expected) < MAX_DIGIT_RUN and SCIENTIFIC.fullmatch(expected):
        return format(Decimal(expected), "f")
    return expected if expected.isascii() else spelled(expected)


def answer_part(text: str) -> str:
    """The text in the last `<answer>`, else behind the last `####` that an answer follows, no heading; else all."""
    said, _, behind = text.rpartition("<answer>")[2].partition("</answer>")
    if "<answer>" in text and said.strip() and BOX not in behind:
        return said
    end = len(text)
    has_box = BOX in text
    while (at := text.rfind("####", 0, end)) >= 0:
        line = text[at + 4 :].partition("\n")[0].strip(" #*:")
        if not line and not text[at:].strip(" #\n"):
            return ""
        is_heading = HEADING.match(line) is not None or (
            has_box and BOX not in line and WORD.search(line.replace("\\", "")) is not None
        )
        if line and not is_heading:
            return text[at + 4 : end]
        end = at
    return text


def _places(gold: list[object]) -> int:
    """Decimal places by which math-verify compares numbers with this answer: more than six where one in it is small."""
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


def _differ(gold: list[object], values: list[object], expected: str) -> bool:
    """True if math-verify would take a wrong answer: another word, date, base or exact number, or zero."""
    shown = str(values[-1])
    if _base(shown) != _base(expected):
        return True
    said, wanted = _words(shown), _words(expected)
    if wanted and (said or DATE.fullmatch(expected)):
        return said != wanted
    return differ(gold[0], values[0]) or (values[0] == 0 and isinstance(gold[0], Number) and gold[0] != 0)


def _base(text: str) -> tuple[str, ...] | None:
    """Digits and base of a number that is written with its base; None without one, or in base 10."""
    match = DIGITS_OF_BASE.search(FONTS.sub(r"\1", text))
    return None if match is None or "10" in match.groups() else tuple(group for group in match.groups() if group)


def _words(text: str) -> str:
    """The words of a text that is words alone, or a date, in small letters; else empty: letters may be a product."""
    text = FONTS.sub(r" \1 ", text)
    words = re.findall(r"[^\W\d_]+", text.lower())
    is_word = any(
        len(word) > 3 or word in SHORT_WORDS or (len(word) == 3 and list(word) != sorted(word)) for word in words
    )
    if DATE.fullmatch(text.strip()) or (is_word and not re.search(r"[\d\\^_+*/=<>{}()-]", text)):
        return " ".join(word for word in re.findall(r"[^\W_]+", text.lower()) if word not in ARTICLES)
    return ""


def pieces(text: str, expected: Size) -> Iterator[Found]:
    """The mathematics that math-verify would try, in its order: the last match of the first pattern, and so on."""
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
    start, end = min(map(match.start, bare), default=match.start()), max(map(match.end, bare), default=match.end())
    if BOX in match[0]:
        raw = parts[-1] if "first_latexBoxed" in groups else ", ".join(part for part in parts if part)
    else:
        is_latex = isinstance(target, LatexExtractionConfig)
        raw = ", ".join(groups[name] for name in bare) if is_latex else match.string[start:end]
    is_percentage = len(bare) < len(groups) or PERCENT.match(match.string, match.end()) is not None
    return Found(match, target, raw + "\\%" * is_percentage, start, end)


def find_answer(text: str, size: Size, expected: str = "") -> tuple[list[object], Found | None]:
    """The answer that math-verify would take, and its first try's text; only that if nothing parses. And its place."""
    first: list[object] = []
    for piece in pieces(text, size):
        said = right_side(piece.raw)
        has_limits = LIMITS.search(said) is not None and LIMITS.search(expected) is None
        if has_limits or len(FUNCTION_NAMES.findall(said)) > max(MAX_FUNCTIONS, len(FUNCTION_NAMES.findall(expected))):
            raise TooCostly
        value, shown = extract_match(piece.match, piece.target)
        first = first or ([shown] if shown else [])
        if value is not None:
            return [value, *first], piece
    return first, None


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


# The first call builds parser tables and fills sympy's caches (0.3 s), which must not count against the first rollout.
score("\\boxed{\\frac{1}{2}}", "0.5")
