# SPDX-License-Identifier: Apache-2.0
"""Finds numbers that a text does not claim: `not 42`, `at least 42`, `41 or 42`, `maybe 42`."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from mrl.envs.math_number import MAX_CHARACTERS, Plain, read_number

_NAME = r"(?:[A-Za-z]\w*\s*=\s*)?"
# Between a word and the number behind it; between a number and the word behind it.
_OPEN, _CLOSE = rf"[\s$*_(~]*+(?:\\[(\[]\s*+|\\boxed\{{)?{_NAME}\$?", r"[\s$*_)%\\\]}]*+"
_NUMBER = r"(?:[-+]?[\d.,/]*\d%?|\\[dt]?frac\s*\{\d+\}\{\d+\})"
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
_OR_BEFORE = re.compile(rf"(?i)({_NUMBER}){_CLOSE}\b(?:or|and/or)\b{_OPEN}$")
_OR_BEHIND = re.compile(rf"(?i){_CLOSE}\b(?:or|and/or)\b{_OPEN}({_NUMBER})")
_ALSO = re.compile(r"(?i)\bor\s+(?:more|less|fewer|above|below)\b")
_NUMBERS = re.compile(_NUMBER)
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
