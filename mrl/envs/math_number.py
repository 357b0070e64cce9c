# SPDX-License-Identifier: Apache-2.0
"""Reads plain numbers: integers, decimals, fractions, roots and multiples of pi, with units and words around them.

Numbers are exact. A text that leaves something to compute (`12+30`), or says several numbers or none, is no plain
number. Fractions and roots are read from math-verify's parse of texts that hold nothing else. At the end: numbers that
a text does not claim.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from math_verify import LatexExtractionConfig, parse
from sympy import Basic, Float, Mul, Pow, Rational, UnevaluatedExpr, factorint, pi

# Longer texts are no plain numbers. Parentheses in each other double the parser's work with each level.
MAX_CHARACTERS, MAX_DEPTH, MAX_EXPONENT, MAX_RADICAND = 300, 5, 10_000, 10**15
# Digits of a decimal that stands for a fraction or a root, as in math-verify.
MIN_DIGITS = 6
# Units that differ are other answers: 6 feet are not 6 inches. Each by the beginnings of its names.
UNITS = {
    start: unit
    for unit, *starts in (
        names.split()
        for names in (
            "mm millim,cm centim,km kilom,m meter metre,in inch,ft feet foot,yd yard,mi mile,mi/h mph,km/h kmh "
            "kph,mg,kg kilog,g gram,lb pound,oz ounce,ml mL millil,L l liter litre,s sec,min,h hr hrs "
            "hour,day,week,month,year,cent,dollar usd USD,euro EUR,rad radian,degree °,F fahren,C celsius"
        ).split(",")
    )
    for start in (unit, *starts)
}
LEADING = frozenset(
    "a about all an answer approximately around equals eur euros exactly final given has have hence is it just of "
    "only roughly rs so sum the then therefore there are thus total usd value year".split()
)
"""Words before a number that change nothing."""
COMPUTING = re.compile(
    r"(?i)\b(?:not|and|or|to|plus|minus|less|more|fewer|greater|least|most|times|over|divided|modulo|mod|factorial|power|"
    r"half|halves|thirds?|fourths?|quarters?|fifths?|sixths?|eighths?|tenths?|hundredths?|twice|pi|sqrt|root|sin|cos|tan|log|ln|exp)\b"
)
"""Words behind a number that change it, or hedge it."""
SHORT = frozenset(("of", "the", "a", "in", "at", "pm", "am", "per", "sq"))
MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

_VULGAR = re.compile("(\\d?) ?([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_SUPERSCRIPTS = re.compile("([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_ROOT = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*+\(?(\w+)\)?")
_SIGNS = str.maketrans(
    {
        sign: f" \\{''.join(name)} "
        for sign, *name in (
            "×times ÷div ·cdot ⋅cdot ∙cdot ∞infty ≤le ≥ge ⩽le ⩾ge ≠ne ±pm ∓mp ∪cup ∈in ≈approx ∅emptyset →to "
            "αalpha βbeta γgamma δdelta εepsilon θtheta λlambda μmu ρrho σsigma φphi ωomega τtau πpi"
        ).split()
    }
    | dict.fromkeys("\u2212\u2013\u2012\u2010\u2011", "-")
    | dict.fromkeys("\u200b\u2060\ufeff€£¥₹", "")
    | {"\u2044": "/", "°": "^\\circ ", "º": "^\\circ "}
)
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm|underline|boxed)\s*+"
    r"\{([^{}]*)\}"
)
_NOTHING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|small|[lL]arge|[hH]uge|quad|qquad|[bB]igg?[lr]?)(?![A-Za-z])|\\(?:text)?color\{\w*\}"
    r"|\\[()\[\],;:! ]|\\?\$|[~`]|\*\*"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}\s?|,|,?\\[,!;: ]|[\s~])(?=\d{3}(?!\d))")
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])|\\[ns]icefrac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*+(\d)\s*+(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*+(\d)\s*+\{"), r"\\frac{\1}{"),
    (re.compile(r"\\times|\\ast"), r"\\cdot "),
    (re.compile(r"\\sqrt\s*+(\[\d\])?\s*+(\d)"), r"\\sqrt\1{\2}"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\{([-+:])\}"), r"\1"),
    (re.compile(r"\^\s*+\{?\s*+\\circ\s*+\}?|\\(?:circ|degrees?)(?![A-Za-z])"), " ° "),
    (re.compile(r"\\?%|\b(?:percent|percentage|pct)\b"), " % "),
    (re.compile(r'(?i)"?\b(?:negative|minus)\b\s*+"?\s*+(?=[\d\\])'), "-"),
)
_WORDS = re.compile(r"[^\W\d_]+(?:[\s:,]+[^\W\d_]+)*+:?")
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(
    rf"([-+]?)\s*+({_NUMBER})(?:\s*+(?:\\cdot|\*|x)\s*+10\s*+\^\s*+\{{?\s*+([-+]?\d+)\s*+\}}?|[eE]([-+]?\d+))?"
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\s*+\{?(\d+)\}?")
_MIXED = re.compile(r"([-+]?)\s*+(\d+)\s*+(?:\\frac\{(\d+)\}\{(\d+)\}|(?<=\s)(\d+)\s*+/\s*+(\d+))")
_RATIO = re.compile(
    rf"\\frac\{{\s*+(-?{_NUMBER})\s*+\}}\{{\s*+(-?{_NUMBER})\s*+\}}|(-?{_NUMBER})\s*+/\s*+(-?{_NUMBER})"
)
_BODY = re.compile(r"(?:\\(?:frac|sqrt|pi|cdot|overline|bar)(?![A-Za-z])|(?<=\d)[eE][-+]?\d+|[\d\s.+\-*/^(){}\[\]])+")
_UNIT = re.compile(r'"[^"]*"|[A-Za-z]+|[\^{}/().,\s%°\'-]|(?<=\^)[23]|(?<=\^\{)-?[23]|\\frac')
_LIST = re.compile(r",|;|\b(?:or|and|not)\b")
_HEDGE = re.compile(r"\b(?:or|not)\b")
_UNFINISHED = re.compile(r"(?<!10)(?<!10 )\^(?!\{1/\d\})|-[\s({]*-")
# math-verify adds the numbers of `3(5)` and `1 200`.
_JOINED = re.compile(r"[\d)}]\s*+\(|\)\s*+\d|\d\s++\d")
_EQUALS = re.compile(r"(?<![<>!\\])=+(?!>)|\\(?:equiv|approx|simeq)(?![A-Za-z])")


@dataclass(frozen=True)
class Plain:
    """A plain number: `rational` times the primes of `roots` to their powers, times pi to a power."""

    rational: Fraction
    roots: frozenset[tuple[int, Fraction]] = frozenset()
    """Primes with powers between 0 and 1."""
    pi_power: int = 0
    is_final: bool = True
    """False if a fraction is to be reduced, a root to be drawn, or a product to be computed."""
    step: Fraction | None = None
    """Value of the last digit of an integer or decimal; None for any other number."""
    is_percent: bool = False
    unit: str = ""

    @property
    def approximate(self) -> float:
        """The number as a float."""
        return (
            float(self.rational)
            * math.pi**self.pi_power
            * math.prod(prime ** float(power) for prime, power in self.roots)
        )

    def is_about(self, other: Plain) -> bool:
        """True if this is an integer or decimal, and the other number rounded."""
        if self.step is None:
            return False
        try:
            exact = Fraction(other.approximate) if other.roots or other.pi_power else other.rational
        except OverflowError:
            return False
        return abs(exact - self.rational) <= self.step * Fraction(5001, 10_000)

    def same_number(self, other: Plain) -> bool:
        """True if the numbers are equal, percent signs and units aside."""
        return (self.rational, self.roots, self.pi_power) == (other.rational, other.roots, other.pi_power)


def answers(reply: Plain, gold: Plain) -> bool:
    """True if the reply is the expected number: equal and final, or its decimal of six digits at least if endless.

    `50`, `50%` and `0.5` all answer `50%`; `50%` answers 50.
    """
    if not reply.is_final or (reply.unit and gold.unit and reply.unit != gold.unit):
        return False
    if gold.is_percent and not reply.is_percent and Plain(reply.rational * 100).same_number(gold):
        return True
    if reply.step is None or reply.step == 1 or gold.step is not None or reply.same_number(gold):
        return reply.same_number(gold)
    return abs(reply.rational) >= 10 ** (MIN_DIGITS - 1) * reply.step and reply.is_about(gold)


def read_number(text: str) -> Plain | None:
    """The plain number that a text says; None if it says anything else.

    An equation says the number of its last side, unless another side is another number.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    is_money, text = "\\$" in text, tidy(text)
    sides, signs = [side.strip() for side in _EQUALS.split(text)], _EQUALS.findall(text)
    if len(sides) > 1 and (not sides[-1] or any(map(_LIST.search, sides[1:])) or _HEDGE.search(sides[0])):
        return None
    found = [_one_side(side) for side in sides]
    # Of `a = 1/3 \approx 0.33` the exact number counts; `42 = 6 * 7` says 42.
    exact = max((index + 1 for index, sign in enumerate(signs) if sign[0] == "="), default=0)
    numbers = [found[exact], *found]
    number = next(
        (one for one in numbers if one is not None and one.is_final),
        next((one for one in numbers if one is not None), None),
    )
    if number is None:
        return None
    at = next(index for index, one in enumerate(found) if one is number)
    for index, (side, other) in enumerate(zip(sides, found, strict=True)):
        is_about = any(sign[0] != "=" for sign in signs[min(index, at) : max(index, at)])
        if index != at and not _agrees(side, other, number, is_about=is_about):
            return None
    return replace(number, unit="dollar") if is_money and not number.unit else number


def _agrees(side: str, other: Plain | None, number: Plain, *, is_about: bool) -> bool:
    """False if a side of an equation is another number."""
    if other is None:
        value = computed(side)
        return (
            value is None or value in (number.rational, number.rational / 100) or bool(number.roots or number.pi_power)
        )
    is_rounded = is_about or any(one.step is not None and one.step < 1 for one in (other, number))
    for factor in (1, 100, Fraction(1, 100)) if number.is_percent or other.is_percent else (1,):
        scaled = replace(
            other, rational=other.rational * factor, step=None if other.step is None else other.step * factor
        )
        if scaled.same_number(number) or (is_rounded and (scaled.is_about(number) or number.is_about(scaled))):
            return True
    return False


def computed(text: str) -> Fraction | None:
    """The value of a sum or product of plain numbers, such as `6 \\cdot 7`; None if the text is anything else."""
    total, product, operator, is_open = Fraction(0), Fraction(1), "*", True
    for part in re.split(r"(\\cdot|\\div|[-+*/])", text.replace("\\frac", "")):
        part = part.strip()
        if part in ("+", "-") and not is_open:
            total, product, operator, is_open = total + product, Fraction(1 if part == "+" else -1), "*", True
        elif part in ("*", "\\cdot", "/", "\\div") and not is_open:
            operator, is_open = part, True
        elif is_open and re.fullmatch(_NUMBER, part):
            value = Fraction(part)
            if operator not in ("*", "\\cdot") and not value:
                return None
            product, is_open = product * (value if operator in ("*", "\\cdot") else 1 / value), False
        elif part:
            return None
    return None if is_open else total + product


def spelled(text: str) -> str:
    """The text with signs of Unicode in LaTeX, where math-verify does not read them."""
    text = _VULGAR.sub(lambda match: match[1] + _fraction(match[2]), text)
    text = _SUPERSCRIPTS.sub(
        lambda match: "^{" + unicodedata.normalize("NFKC", match[1]).replace("\u2212", "-") + "}", text
    )
    text = _ROOT.sub(r"\\sqrt{\1}", unicodedata.normalize("NFKC", text))
    return "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text.translate(_SIGNS))


def tidy(text: str) -> str:
    """Text in one spelling, words of a font in double quotes, without thousands separators, currency and spacing."""
    text = spelled(text).replace("\\$", "").replace('"', "")
    for _ in range(4):
        text, count = _FONT.subn(_unstyled, text)
        if not count:
            break
    text = _NOTHING.sub(" ", _THOUSANDS.sub("", text))
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip().rstrip(".,;: ").strip("_ ")


def _fraction(sign: str) -> str:
    return "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\u2044"))


def _unstyled(match: re.Match[str]) -> str:
    content = match[1].strip()
    return f" {content} " if "\\" in content else _WORDS.sub(r' "\g<0>" ', f" {content} ")


def _one_side(text: str) -> Plain | None:
    text = re.sub(r"^(?:[A-Za-z]\w*\s*)?\\in(?![A-Za-z])\s*", "", text)
    while (
        inner := re.fullmatch(r"\\\{(.*)\\\}|\(([^()]*)\)|\[([^\[\]]*)\]|\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    ) is not None:
        text = next(group for group in inner.groups() if group is not None).strip()
    while (word := re.match(r'\s*(?:"([^"]*)"|([A-Za-z]+)(?![A-Za-z_^(]))(\s*:)?', text)) is not None:
        said = (word[1] or word[2]).lower()
        is_said = word[3] or said.endswith((":", " is", " are", " equals"))
        if COMPUTING.search(said) or not (is_said or LEADING.issuperset(said.split())):
            return None
        text = text[word.end() :].lstrip()
    body = _BODY.match(text)
    if body is None:
        return None
    numeric = body[0].rstrip(" (-/^{[.").removesuffix("\\frac") if text[body.end() :].strip() else body[0]
    unit = _unit(text[len(numeric) :].strip())
    number = None if unit is None else _number(numeric.strip())
    if number is None or unit is None:
        return None
    name, factor, is_percent = unit
    step = None if number.step is None else number.step * factor
    return replace(number, rational=number.rational * factor, step=step, is_percent=is_percent, unit=name)


def _unit(text: str) -> tuple[str, int, bool] | None:
    """Unit, multiple (1,000 for thousand) and percentage that the words behind a number say; None if they say more."""
    if _UNIT.sub("", text).strip() or COMPUTING.search(text):
        return None
    name, factor, power, per = "", 1, "", False
    text = re.sub(r"\}\s*+\{", "/", text.replace("\\frac", ""))
    quoted = set(re.findall("[A-Za-z]+", " ".join(re.findall('"[^"]*"', text))))
    if text.strip() == "a":
        return None  # a factor, where `a day` would be a unit
    for word in re.findall(r"[A-Za-z]+|[/°]|[23]", text):
        known = UNITS.get(word) or next(
            (UNITS[word.lower()[:end]] for end in range(len(word), 2, -1) if word.lower()[:end] in UNITS), ""
        )
        if word.lower() in MULTIPLES:
            factor *= MULTIPLES[word.lower()]
        elif word.lower() in ("square", "squared", "sq", "2"):
            power = "2"
        elif word.lower() in ("cubic", "cubed", "3"):
            power = "3"
        elif word in ("/", "per"):
            per = bool(name)
        elif len(word) < 4 and not known and word not in quoted and word not in SHORT:
            return None  # factors
        elif not name or per or (name == "degree" and known in ("C", "F")):
            name = f"{name}/{known}" if per else known
            per = False
    return None if text.strip(' "').endswith(("squared", "cubed")) and not name else (name + power, factor, "%" in text)


def _number(text: str) -> Plain | None:
    if match := _REPEATING.fullmatch(text.replace(" ", "")):
        sign, whole, fixed, repeated = match.groups()
        value = Fraction(
            int(f"0{whole}{fixed}{repeated}") - int(f"0{whole}{fixed}"), 10 ** len(fixed) * (10 ** len(repeated) - 1)
        )
        return Plain(-value if sign == "-" else value)
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _MIXED.fullmatch(text):
        sign, whole, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        if 0 < above < below:
            value = int(whole) + Fraction(above, below)
            return Plain(-value if sign == "-" else value, is_final=math.gcd(above, below) == 1)
    depths = accumulate((sign in "({[") - (sign in ")}]") for sign in text)
    if not _BODY.fullmatch(text) or _JOINED.search(text) or max(depths, default=0) > MAX_DEPTH:
        return None
    values = parse(f"\\boxed{{{text}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=0)
    ratios = [[Fraction(part) for part in match.groups() if part] for match in _RATIO.finditer(text)]
    is_simple = not _UNFINISHED.search(text) and all(
        Fraction(above, below).denominator == abs(below) != 1 for above, below in ratios if below
    )
    try:
        number = (
            _product(values[0], text.count("sqrt") + text.count("^{1/"))
            if values and isinstance(values[0], Basic)
            else None
        )
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    return number and replace(number, is_final=number.is_final and is_simple)


def _decimal(match: re.Match[str]) -> Plain | None:
    sign, digits, *exponents = match.groups()
    exponent = int(next((found for found in exponents if found), "0"))
    if abs(exponent) > MAX_EXPONENT:
        return None
    written, scale = Fraction(digits.rstrip(".")), Fraction(10) ** exponent
    value, step = written * scale, scale / 10 ** len(digits.partition(".")[2])
    return Plain(-value if sign == "-" else value, is_final=exponents[0] is None or 1 <= written < 10, step=step)


def _factors(node: Basic, power: Fraction) -> Iterator[tuple[Basic, Fraction]]:
    if isinstance(node, Mul | UnevaluatedExpr):
        for part in node.args:
            yield from _factors(part, power)
    elif isinstance(node, Pow) and isinstance(node.exp, Rational):
        yield from _factors(node.base, power * Fraction(node.exp.p, node.exp.q))
    else:
        yield node, power


def _product(node: Basic, num_signs: int) -> Plain:
    """The number that a product with so many root signs is; ValueError: it has factors besides numbers, roots, pi."""
    rational, powers, pi_power = Fraction(1), dict[int, Fraction](), 0
    above, below, num_roots, is_final = list[Fraction](), list[Fraction](), 0, True
    has_power_of_ten = False
    for base, power in _factors(node, Fraction(1)):
        if base == pi and power.denominator == 1:
            pi_power += int(power)
            continue
        if not isinstance(base, Rational | Float) or abs(power) > MAX_EXPONENT:
            raise ValueError("no plain number")
        value = Fraction(base.p, base.q) if isinstance(base, Rational) else Fraction(str(base))
        if power.denominator == 1:
            if abs(power) > 1 and value != 10:
                raise ValueError("a power")
            rational *= value ** int(power)
            if value != -1:
                (above if power > 0 else below).append(value)
            has_power_of_ten |= value == 10 and abs(power) != 1
            continue
        if not 0 < value or max(value.numerator, value.denominator) > MAX_RADICAND:
            raise ValueError("no plain root")
        num_roots += 1
        exponents = factorint(value.numerator).values()
        is_final &= (
            value.denominator == 1 and abs(power.numerator) == 1 and math.gcd(power.denominator, *exponents) == 1
        )
        for prime, exponent in [
            *factorint(value.numerator).items(),
            *((p, -e) for p, e in factorint(value.denominator).items()),
        ]:
            is_final &= exponent < power.denominator
            is_final &= power > 0 or all(number.numerator % prime for number in above)
            powers[prime] = powers.get(prime, Fraction(0)) + exponent * power
    for prime, power in powers.items():
        rational *= Fraction(prime) ** math.floor(power)
    is_final &= (
        num_roots == num_signs < 2
        and len(above) < 2
        and len(below) < 2
        and all(value.denominator == 1 != value for value in below)
    )
    is_final &= not (has_power_of_ten and (num_roots or pi_power))
    is_final &= not (above and below) or (
        above[0].denominator == 1 and math.gcd(above[0].numerator, below[0].numerator) == 1
    )
    roots = frozenset((prime, power % 1) for prime, power in powers.items() if power % 1)
    return Plain(rational, roots, pi_power, is_final)


_NAMED = r"(?:[A-Za-z]\w*\s*=\s*)?"
# Between a word and the number behind it; between a number and the word behind it.
_OPEN, _CLOSE = rf"[\s$*_(~]*+(?:\\[(\[]\s*+|\\boxed\{{)?{_NAMED}\$?", r"[\s$*_)%\\\]}]*+"
_SAID_NUMBER = r"(?:[-+]?[\d.,/]*\d%?|\\[dt]?frac\s*\{\d+\}\{\d+\})"
_COMPARED = "more|less|fewer|greater|larger|smaller|bigger|higher|lower|other|rather"
_BEFORE = re.compile(
    r"(?i)(?:\b(?:not?|never|cannot|neither|nor|maybe|perhaps|possibly|probably|either|at\s+(?:least|most)|up\s+to|"
    rf"(?:{_COMPARED})\s+than|between\s.{{1,20}}\band|from\s.{{1,20}}\bto|between|whether(?:\s.{{1,30}})?)"
    r"|n['’]t|[<≤≥≠≮≯±]|&(?:lt|gt|le|ge|ne);|(?<![=>-])>|\\(?:neq?|leq?|geq?|lt|gt|pm|leqslant|geqslant)|\.\.\.|…)"
    rf"(?:\s+(?:be|equal(?:\s+to)?|exactly|even))?{_OPEN}$"
)
_BEHIND = re.compile(
    rf"(?i){_CLOSE}(?:\b(?:or\s+(?:more|less|fewer|so|above|below|maybe)|at\s+(?:least|most)|"
    r"is(?:n['’]t|\s+(?:not|wrong|incorrect|false)))\b|±|\+/?-|\\pm|\?)"
)
_OR_BEFORE = re.compile(rf"(?i)({_SAID_NUMBER}){_CLOSE}\b(?:or|and/or)\b{_OPEN}$")
_OR_BEHIND = re.compile(rf"(?i){_CLOSE}\b(?:or|and/or)\b{_OPEN}({_SAID_NUMBER})")
_ALSO = re.compile(r"(?i)\bor\s+(?:more|less|fewer|above|below)\b")
_NUMBERS = re.compile(_SAID_NUMBER)
_NAMES = re.compile(r"[A-Za-z]\w*\s*=|\\[()\[\]]|[\s$*.]")
# Tags (`</think>`) and tokens of templates (`<|im_end|>`): their `>` compares nothing.
_MARKS = re.compile(r"</?[A-Za-z][\w-]{0,40}>|<\|[^<>|]{1,40}\|>")
_JOINTS = re.compile(r"(?i)(?:[,;&()–—]|or|and|to)+")


def is_hedged(text: str, start: int, end: int, *, is_stated: bool) -> bool:
    """True if the number at `start` to `end` is denied, a bound, a guess, or one of several (`41 or 42`).

    A text that is `is_stated` is an answer and nothing else; in others only `or` joins several.
    """
    before = _MARKS.sub(" ", text[max(0, start - MAX_CHARACTERS) : start].rpartition("\n")[2])
    behind = text[end : end + MAX_CHARACTERS].partition("\n")[0]
    if _BEFORE.search(before) or _BEHIND.match(behind) or _ALSO.search(text[start:end]):
        return True
    others = [match[1] for match in (_OR_BEFORE.search(before), _OR_BEHIND.match(behind)) if match is not None]
    if is_stated and len(text) < MAX_CHARACTERS and _JOINTS.fullmatch(_NAMES.sub("", _NUMBERS.sub("", text))):
        others += _NUMBERS.findall(text)
    mine = read_number(text[start:end]) if others else None
    return any(mine is None or theirs is None or not _same(mine, theirs) for theirs in map(read_number, others))


def _same(one: Plain, other: Plain) -> bool:
    factors = (1, 100, Fraction(1, 100))
    return any(replace(other, rational=other.rational * factor).same_number(one) for factor in factors)
