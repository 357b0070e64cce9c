"""Rewards for mathematics: the last answer in the text against the expected one, by value, with math-verify. Runs in `mrl.envs.child`."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import groupby

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.parser import extract_match, get_extraction_regexes
from sympy import Basic

from mrl.envs.math_bounds import (
    ANY_EXPECTED,
    BOX,
    MAX_EXPECTED_DIGITS,
    MAX_SEARCH_COST,
    MAX_VALUE_DIGITS,
    Size,
    search_cost,
    size_of,
    value_digits,
)
from mrl.envs.task import Outcome, RowFault, Score, Task

# Of type int in math-verify; 0 and below switch its own deadlines off.
NO_TIMEOUT = 0

GOLD_TARGETS = [LatexExtractionConfig()]
# Of texts of any length: answers stand at the end.
SEARCHED_CHARACTERS = 20_000
# The longest answer of MATH-500 has 159 characters.
DAPO_TAIL_CHARACTERS = 300
ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*+([^\n]+)")
UNITS = (
    "square units degrees integers ways dollars cents points hours minutes inches feet meters km cm gm mph digits edges students meals "
    "multiples"
).split()

ANSWER_TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]
# Of mathematics that cannot be parsed, before the answer is wrong; a try costs as much as this many characters.
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
"""What leaves something to compute."""
# The number in front of an equals sign, if nothing is computed there.
NUMBER_ALONE = re.compile(rf"(?:^|[^\d.,+\-*/^()=\s{{}}])\s*([-+]?{INTEGER}(?:\.\d+)?)\s*$")
LEFT_CHARACTERS = 100
PERCENT = re.compile(r"\s?\\?%")


class TooCostly(Exception):
    """The mathematics of a text, which nobody should compute."""


@dataclass(frozen=True)
class Found:
    """The mathematics that is taken for an answer."""

    values: list[object]
    """The expression and its text; the text alone where it cannot be parsed."""
    left: str
    """What stands left of its last equals sign; empty if there is none."""
    is_percentage: bool

    @property
    def shown(self) -> str:
        """Its text."""
        return str(self.values[-1])


def make(impl: str, is_strict: bool) -> Score:
    """The reward function of `env.math.math_verify_impl`; `is_strict` as `env.math.strict`."""
    judge = {"hf_math_verify": functools.partial(score, is_strict=is_strict), "dapo_math_verify": score_dapo}[impl]

    def reward(task: Task) -> Outcome:
        return Outcome(*judge(task.text, task.expected))

    return reward


def score(text: str, expected: str, *, is_strict: bool = False) -> tuple[float, str]:
    """`(1.0 or 0.0, what was taken for the answer)`. Numbers compare by value: 046 is 46, 1,200 is 1200, 0.5 is 1/2.

    What follows the last `####` is the answer where a text has that mark, as in GSM8K; an equation before it would be taken otherwise.
    Mathematics that is too costly to find or to compute is wrong. With `is_strict`, an answer must be final, see `is_final`.

    Without timeouts of math-verify's own: those report a hang as a wrong answer. The pool's deadline finds out whose fault it is.

    Raises:
        RowFault: the expected answer is not mathematics, or too costly, so that no text could be right.
    """
    gold, size, max_digits = parse_expected(expected)
    try:
        found = find_answer(text.rpartition("####")[2][-SEARCHED_CHARACTERS:], size)
        if found is None:
            return 0.0, ""
        if isinstance(found.values[0], Basic) and value_digits(found.values[0]) > max_digits:
            raise TooCostly
    except TooCostly:
        return 0.0, TOO_COSTLY
    if is_strict and not is_final(found, str(gold[-1])):
        return 0.0, NOT_FINAL + found.shown
    return float(verify(gold, found.values, timeout_seconds=NO_TIMEOUT)), found.shown


def parse_expected(expected: str) -> tuple[list[object], Size, float]:
    """The expected answer in math-verify's terms, and the bounds of answers: their size, and the digits of numbers on the way to a value.

    Raises:
        RowFault: it is not mathematics, or too costly.
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
    return gold, size, max(MAX_VALUE_DIGITS, num_digits)


def find_answer(text: str, expected: Size) -> Found | None:
    """What math-verify takes for the answer: the last mathematics that can be parsed, of the kind that comes first; None if there is none.

    Raises:
        TooCostly: to be found, or larger than an answer is.
    """
    if search_cost(text) > MAX_SEARCH_COST:
        raise TooCostly
    unparsed: Found | None = None
    left_to_try = MAX_TRIED_CHARACTERS + expected.characters
    for _, patterns in groupby(PATTERNS, key=lambda entry: entry[0]):
        matches = [(match, target) for _, pattern, target in patterns for match in pattern.finditer(text)]
        for match, target in sorted(matches, key=lambda found: (found[0].end(), -found[0].start()), reverse=True):
            parts = _expressions(match[0])
            left_to_try -= sum(MIN_TRIED_CHARACTERS + len(part) for part in parts)
            if left_to_try < 0 or not all(size_of(part).fits(expected) for part in parts):
                raise TooCostly
            value, shown = extract_match(match, target)
            found = _found([shown], match)
            unparsed = unparsed or (found if shown else None)
            if value is not None:
                # As math-verify: beside the value stands the text of the first try.
                return replace(found, values=[value, *(unparsed.values if unparsed else [])])
    return unparsed


def _found(values: list[object], match: re.Match[str]) -> Found:
    groups = {name: text for name, text in match.groupdict().items() if text}
    start = min((match.start(name) for name in groups), default=match.start())
    before = match.string[max(0, start - LEFT_CHARACTERS) : start].rstrip()
    left = before[:-1] if before.endswith("=") else str(values[-1]).rpartition("=")[0]
    is_percentage = any(name.endswith("percent") for name in groups) or PERCENT.match(match.string, match.end()) is not None
    return Found(values, left, is_percentage)


def _expressions(text: str) -> list[str]:
    """What math-verify parses of a match: what its boxes hold, or all of it."""
    boxes = []
    for start in text.split(BOX)[1:]:
        depth = 1
        end = len(start)
        for index, character in enumerate(start):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                end = index
                break
        boxes.append(start[:end])
    return boxes or [text]


def is_final(found: Found, expected: str) -> bool:
    """Whether nothing is left to compute in an answer; of an equation the right side counts.

    Where a number is expected, it must be an integer or a decimal, or a fraction in lowest terms; a number that is said to be equal to
    another one is none. Else it may use no operation (sums, integrals, factorials, ...) that the expected answer does not use.
    """
    if found.is_percentage and "%" not in expected:
        return False
    if not (DECIMAL.fullmatch(wanted := expected.rpartition("=")[2].strip()) or FRACTION.fullmatch(wanted)):
        return set(OPERATION.findall(found.shown)) <= set(OPERATION.findall(expected))
    answer = found.shown.rpartition("=")[2].strip()
    if "%" in answer and "%" not in expected:
        return False
    if (fraction := FRACTION.fullmatch(answer)) is not None:
        above, below = (int(number) for number in fraction.groups() if number)
        return below > 1 and math.gcd(above, below) == 1
    claimed = NUMBER_ALONE.search(found.left)
    return DECIMAL.fullmatch(answer) is not None and (claimed is None or _decimal(claimed[1]) == _decimal(answer))


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.+-]", "", text))


def score_dapo(text: str, expected: str) -> tuple[float, str]:
    """`(1.0 or 0.0, what was taken for the answer)` by DAPO's rule (arXiv:2503.14476): the line behind the last `Answer:` of the last 300
    characters, equal to the expected answer as text once units, dollars, white space and spellings of LaTeX are evened out.
    """
    lines = ANSWER_LINE.findall(text[-DAPO_TAIL_CHARACTERS:])
    if not lines:
        return 0.0, ""
    answer = plain_answer(lines[-1])
    return float(answer == plain_answer(expected)), answer


def plain_answer(answer: str) -> str:
    """An answer without what does not count: the left of an equation, dollars, text commands, boxes, units, spaces, thousands commas."""
    answer = answer.rpartition("=")[2]
    answer = answer.replace(".$", "$")
    if (between := re.search(r"\$(.*?)\$", answer)) is not None:
        answer = between[1]
    answer = answer.replace("\\$", "").replace("$", "")
    for command in ("text", "mbox", "mathrm", "textbf", "overline", "boxed"):
        answer = re.sub(rf"\\{command}\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"\^\{?\\circ\}?|\\[;,! ]|\\l?dots", "", answer)
    answer = re.sub(rf"\b(?:{'|'.join(UNITS)})\b", "", answer)
    answer = re.sub(r"^\s*an?\s+", "", answer)
    answer = re.sub(r"\s+", "", answer).replace('"', "").replace("{,}", ",")
    return answer.replace(",", "") if re.fullmatch(r"-?[\d,]+(\.\d+)?", answer) else answer


# The first call builds parser tables and fills sympy's caches (0.3 s): that is not the first rollout's time.
score("\\boxed{\\frac{1}{2}}", "0.5")
