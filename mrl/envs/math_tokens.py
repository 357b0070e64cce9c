# SPDX-License-Identifier: Apache-2.0
"""Splits an answer in mathematics into tokens: one spelling for the ways in which LaTeX, Markdown and Unicode write the same thing."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

_NAMED_CHARACTERS = (
    "×times ÷div ·cdot ⋅cdot ∙cdot √sqrt ∞infty ≤le ≥ge ⩽le ⩾ge ≠ne ±pm ∓mp ∪cup ∈in ≈approx ∅emptyset ∠angle ⟨langle ⟩rangle →to "
    "αalpha βbeta γgamma δdelta εepsilon θtheta λlambda μmu ρrho σsigma φphi ωomega τtau πpi"
)
_CHARACTERS = str.maketrans(
    {sign: f" \\{''.join(name)} " for sign, *name in _NAMED_CHARACTERS.split()}
    | dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\uff0d", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u2005\u2006\u2007\u2009\u200a\u202f", "\\,")
    | dict.fromkeys("\u200b\u2060\ufeff€£¥₹", "")
    | {sign: f"^{{{power}}}" for sign, power in zip("⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "0123456789n", strict=True)}
    | {sign: f"_{{{number}}}" for sign, number in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)}
    | {"°": "^\\circ ", "º": "^\\circ ", "\u2044": "/", "'": " \\prime ", "’": "", '"': ""}
)


def _by_spelling(lists: str) -> dict[str, str]:
    return {name: names.split()[0] for names in lists.split(";") for name in names.split()}


UNITS = _by_spelling(
    "mm millimeter millimeters;cm centimeter centimeters centimetre centimetres;m meter meters metre metres;km kilometer kilometers;"
    "in inch inches;ft foot feet;yd yard yards;mi mile miles;mg;g gram grams;kg kilogram kilograms;lb lbs pound pounds;oz ounce ounces;"
    "s sec second seconds;min minute minutes;h hr hrs hour hours;day days;week weeks;month months;year years;ml mL;L liter liters litre;"
    "dollar dollars USD usd;cent cents;euro euros EUR;mph;kmh kph;unit units;rad radian radians;J;N;W;Pa;Hz;K;V;A;mol;"
    "ante;post;Celsius;Fahrenheit"
)
UNITS |= {"mph": "mi h", "kmh": "km h", "kph": "km h"}
"""Names of units, by each the first of its spellings, or the units that it is made of."""
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")

_STYLE = re.compile(
    r"\\(?:text(?:bf|it|rm|normal|sf|tt|sc)?|math(?:rm|bf|it|sf|bb|cal|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm|underline)\s*"
    r"\{([^{}]*)\}"
)
# Also of units: `m/s`.
_WORDS = re.compile(r"[^\W\d_]+(?:(?: +|/)[^\W\d_]+)*+\.?")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!\s*+|\\[,;:!]|\\ |~)(?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\.\d{3}){2,}|(?:'\d{3})+)(?![\d.'])")
_INFIX = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")
_HALF_OF_DAY = re.compile(r"(:\d\d)(?:[\s~]|\\(?:text|mathrm)\{|\\[, ])*+([apAP])\.?\s?[mM](?![A-Za-z])\.?\}?")
_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
_RESPELLED = (
    (rf"(?<=\d) +((?:{_UNIT})/(?:{_UNIT}))$", r"\\text{ \1}"),
    (rf"(?<=\d) +({_UNIT})(\^\{{?[23]\}}?|[²³])$", r"\\text{ \1}\2"),
    (r"(?<![a-z])\{([-:])\}", r"\1"),
    (r"(?<=\d)''", r"\\text{ in}"),
    (r"(°|\\circ\}?)\s*+(?:\\(?:text|mathrm)\{)?C(?![A-Za-z])\}?", r"\1\\text{ Celsius}"),
    (r"(°|\\circ\}?)\s*+(?:\\(?:text|mathrm)\{)?F(?![A-Za-z])\}?", r"\1\\text{ Fahrenheit}"),
    (">=", r"\\ge "),
    ("<=", r"\\le "),
    (" !=", r"\\ne "),
    (r"\\\{\s*+\\\}", r"\\emptyset "),
    (r"\((\w++)\)_(?=\{?\d)", r"\1_"),
)
_NOTHING = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|quad|qquad|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|middle)(?![A-Za-z])\.?"
    r"|(?<!\\)\\[()\[\]!,;: $]|[$~`]|\*\*|\\(?:hspace|vspace|phantom|hphantom|color|textcolor)\*?\{[^{}]*\}|(?<=\\\\)\[[\d.]+\s*[a-z]+\]"
)
_UNIT_FRACTION = re.compile(r'\\[dt]?frac\{\s*+"([^"]*)"\s*+\}\{\s*+"([^"]*)"\s*+(?:(\^)\s*+\{?(\d)\}?\s*+)?\}')
_TOKEN = re.compile(
    r'"(?P<word>[^"]*)"'
    r"|(?P<group>\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)(?:\.\d+)?)"
    r"|(?P<number>\d+(?:\.\d+)?[eE][-+]\d{2,3}(?!\d)|(?:1|\d+\.\d+)[eE][-+]?\d{1,3}(?!\d)|\d+(?:\.\d*)?|\.\d+)"
    r"|(?P<command>\\(?:begin|end)\s*\{\w*\*?\}(?:\{[clr|]*\})?|\\[A-Za-z]+|\\\\|\\[{}%|])"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<sign>[^\s])"
)
_SAME = _by_spelling(
    "frac dfrac tfrac cfrac nicefrac sfrac;binom dbinom tbinom;le leq leqslant;ge geq geqslant;cdot ast times;approx simeq doteq;"
    "| lvert rvert vert mid;emptyset varnothing;cup bigcup;ne neq;{ lbrace;} rbrace;[ lbrack;] rbrack;phi varphi;epsilon varepsilon;"
    "infty infinity;circ degree degrees"
)
_BARE = {"%": "%", "{": "\\{", "}": "\\}", "|": "|", "[": "[", "]": "]"}

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp max min gcd lcm det arg sgn Re Im dim deg tr rank".split()
)
# `\\lnx`, as data sets have it whose spaces were removed; `\\coth` is a function.
_RUN_ON = re.compile(rf"({'|'.join(sorted(FUNCTIONS | {'pi'}, key=len, reverse=True))})([a-gi-zA-Z])")
_NAMED = FUNCTIONS | {"sqrt", "pi", "infty", "infinity", "theta", "alpha", "beta", "degrees"}

PERCENT = frozenset(("percent", "percentage", "pct"))


class Token(NamedTuple):
    """One sign of an answer."""

    kind: str
    """`number`, `command` (without its backslash), `letter`, `word` or `sign`."""
    text: str

    @property
    def name(self) -> str:
        """The token's text; "" for a word."""
        return "" if self.kind == "word" else self.text


# Letters in front of a digit, as in AB3, that are no word.
MAX_CODE = 20
# Short words that are no products of letters: always, and behind another word.
_WORDS_AT_ONCE = frozenset("yes Yes YES no No NO not Not NOT is Is on On up Up to To so So of Of".split())
_WORDS_BEHIND = frozenset("an as at by be it we he".split())
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_SPELLED = {word: Token("number", str(number)) for number, word in enumerate(_NUMBER_WORDS)} | {"to": Token("sign", ":")}
_SPELLED |= dict.fromkeys(("negative", "minus"), Token("sign", "-"))


def plain(text: str) -> str:
    """The text in ASCII LaTeX without spacing, styles and currency; words stand in double quotes."""
    text = _VULGAR.sub(lambda match: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("\u2044")), text)
    for written, meant in _RESPELLED:
        text = re.sub(written, meant, text)
    text = _GROUPED.sub(lambda match: re.sub("[.']", "", match[0]), _INFIX.sub(_prefixed, text))
    text = _HALF_OF_DAY.sub(lambda match: f"{match[1]} \\text{{{'ante' if match[2] in 'aA' else 'post'}}}", text)
    text = _THOUSANDS.sub("", text.translate(_CHARACTERS))
    for _ in range(4):
        text, count = _STYLE.subn(_unstyled, text)
        if not count:
            break
    return _NOTHING.sub(" ", _UNIT_FRACTION.sub(r' "\1"/"\2"\3\4 ', text.replace("\\$", ""))).strip()


def _prefixed(match: re.Match[str]) -> str:
    return f"\\{'frac' if match[2] == 'over' else 'binom'}{{{match[1]}}}{{{match[3]}}}"


def _unstyled(match: re.Match[str]) -> str:
    content = match[1].strip()
    if content[:1] + content[-1:] == "()" and len(content) > 3:
        content = content[1:-1]  # 42 (apples)
    if content in FUNCTIONS and content not in UNITS:
        return f"\\{content} "
    if _WORDS.fullmatch(content) and (len(content) > 1 or match[0].startswith("\\text")):
        return f' "{content.rstrip(".")}" '
    return f" {content} "


def tokens_of(text: str) -> list[Token]:
    """The tokens of an answer that `plain` has written; commas of thousands belong to numbers outside of brackets."""
    found: list[Token] = []
    depth = at = 0
    while (match := _TOKEN.search(text, at)) is not None:
        kind, content = match.lastgroup or "", match[match.lastgroup or 0]
        at = match.end()
        if kind == "group" and depth and "," in content:
            content = content[: content.index(",")]
            kind, at = "number", match.start() + len(content)
        if kind in ("group", "number"):
            found.append(Token("number", content.replace(",", "").replace(" ", "")))
        elif kind in ("letters", "word") and [token.text for token in found[-2:]] == ["_", "{"] and content.lower() not in _SPELLED:
            found += [Token("letter", letter) for letter in content if letter != " "]
        elif kind == "letters":
            is_code = text[at : at + 1].isdigit() and len(content) < MAX_CODE and content not in UNITS and content not in ("and", "or")
            before = found[-1].kind if found else ""
            found += [Token("letter", letter) for letter in content] if is_code else _letters(content, before)
        elif kind == "word":
            found += [_word(word) for word in content.split()]
        elif kind == "command":
            name = content[1:].replace(" ", "")
            name = _SAME.get(name, name)
            if (run_on := _RUN_ON.fullmatch(name)) is not None:
                found += [Token("command", run_on[1]), Token("letter", run_on[2])]
            else:
                found.append(Token("sign", _BARE[name]) if name in _BARE else Token("command", name))
        else:
            found.append(Token("sign", content))
        if found and found[-1].kind == "sign":
            depth += (found[-1].text in ("(", "[", "\\{")) - (found[-1].text in (")", "]", "\\}"))
    return found


def _letters(run: str, before: str) -> list[Token]:
    if run in _NAMED:
        return [Token("command", _SAME.get(run, run))]
    is_word = run in UNITS or run in PERCENT or run in ("and", "or") or run in _WORDS_AT_ONCE
    is_word |= len(run) > 3 or (len(run) == 3 and list(run) != sorted(run)) or (before == "word" and run in _WORDS_BEHIND)
    return [_word(run)] if is_word and len(run) > 1 else [Token("letter", letter) for letter in run]


def _word(text: str) -> Token:
    if text.lower() in _SPELLED:
        return _SPELLED[text.lower()]
    return Token("sign" if text in ("and", "or") else "word", text)
