# SPDX-License-Identifier: Apache-2.0
"""The letter that a text settles on, in its own words: `choose`. Reads more freely than NeMo Gym's `mcqa`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import normalize

STYLE = r"(?:\\(?:text|textbf|textit|mathrm|mathbf|mbox|boldsymbol)\s*+\{|\*\*|__|\$|\\\(|[\s`\"'“{])*+"
"""Fonts, signs of Markdown and of mathematics, which may stand before a letter."""
# Vowel signs of Arabic and Bengali are no \w; Japanese, Korean and Chinese put a copula or a noun behind without a
# space.
NO_WORD = r"(?!(?!です|입니다|번|选项|選項)[\w\u064b-\u065f\u0980-\u09ff]|['’]\w)"
ANY = "[A-Za-zأبجدঅবডঢ]"
LETTER = rf"{STYLE}(?:\(\s*+{STYLE}({ANY}){NO_WORD}{STYLE}\)|\[++({ANY})\]|({ANY}){NO_WORD})"
BOXED = re.compile(rf"\\(?:boxed|fbox)\s*+\{{{STYLE}(?i:(?:option|choice|answer)[\s:]*+)?{LETTER}(?=([^\n]{{0,40}}))")
ANSWER_WORDS = (
    "antwort|respuesta|risposta|resposta|réponse|jawaban|jibu|[iì]d[aá]h[uù]n|àdáhùn|àmọ̀nà|ànúgọ|àṣàyàn|答[案え复曰]?|답변?|उत्तर|উত্তর"
    r"|(?:إجابة|جواب)(?:\s++ال(?:نهائي|صحيح)ة?)?"
)
"""The word for answer in the languages of multilingual questions; behind it stands a colon or one of `LINKS`."""
LINKS = "finale?|corre(?:cta|ta|tta|cte)|akhir|es|est|ist|è|é|adalah|هي|هو"
# Behind the word: a colon, `is`, `is clearly option`; the letter of words (`a subtle one`, `I think`) is told apart in
# `said`.
ANSWER = re.compile(
    r"(?i)(?:(?:(?<!not the "
    r")(?<!/)\b(?:answer|(?:correct|right|best)\s+(?:choice|option|letter|statement))\b|答案)['\"]?[\s*_>]*+"
    r"(?:(?:is|was|[=:→是为]|-+>?|–|(?:must|would|should)\s++be|to\s++(?:this|the)\s++question|choice|thus|therefore|indeed|[a-z]{2,10}ly)"
    r"[\s*_]*+)*+"
    rf"|(?:{ANSWER_WORDS})[\s*_]*+(?=[:ঃ]|(?:{LINKS})\b)(?:(?:{LINKS})\b[\s*_]*+)*+[:ঃ]?[\s*_]*+)"
    rf"(?:(?:option|choice|letter|the)[\s:]*+)*+{LETTER}(?=([^\n]{{0,40}}))"
    r"|\b(?:option|choice)\s+\(?([A-Z])\)?(?=(\s+is\s+(?:the\s+)?(?:correct|right|best)\b))"
)
MORE = re.compile(
    r"\s*+(?:[,/&、،]|\b(?:and|or|e|y|o|ou|et|und|oder|dan|atau|na|au|و|أو)\b|\\text\{\s*+(?:and|or)\s*+\}?)\s*+(?:\\text\{|\()?\s*+"
    rf"{ANY}(?![\w'])"
)
# Behind a letter in a box that is no product, power or equation.
BOX_ENDS = re.compile(r"\s*+(?:[.)\]},:;$*]|[-–—]\s++[A-Za-z]{2}|\\text|\\quad|\\ |$)")
ENDS = re.compile(r"\s*+(?:[.)\]},:;!?*_$\\—–-]|$|because\b|since\b|as\b|is\b)")


SPELLINGS = str.maketrans(
    {
        other: f" {letter}"
        for others, letter in (("أঅＡ", "A"), ("بবＢ", "B"), ("جডＣ", "C"), ("دঢＤ", "D"))
        for other in others
    }
)


def choose(text: str, patterns: Sequence[re.Pattern[str]] = (BOXED, ANSWER)) -> str:
    """The letter of the last match of the first pattern that has one; empty if none has."""
    for pattern in patterns:
        # NFKC writes letters and colons of Chinese and Japanese keyboards as those of Latin ones.
        for match in reversed(list(pattern.finditer(normalize("NFKC", text) if pattern in (BOXED, ANSWER) else text))):
            found = (
                said(match)
                if pattern in (BOXED, ANSWER)
                else next((group for group in match.groups() if group), match[0]).strip().upper()
            )
            if re.fullmatch("[A-Z]", found):
                return found
    return ""


def said(match: re.Match[str]) -> str:
    """The letter a match of `BOXED` or `ANSWER` chooses; empty if a word of a sentence or one of several letters."""
    letter, behind = (group for group in match.groups() if group is not None)
    if MORE.match(behind) or (match.re is BOXED and match[3] == letter and BOX_ENDS.match(behind) is None):
        return ""
    # An article has a word behind it; a letter that ends its clause, or any other behind a colon, is none.
    is_odd = letter in "aiI" or (letter.islower() and ":" not in match[0])
    if match.re is ANSWER and is_odd and match[3] == letter and ENDS.match(behind) is None:
        return ""
    return letter.translate(SPELLINGS).strip().upper()
