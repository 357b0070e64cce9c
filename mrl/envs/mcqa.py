# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: the letter that the text settles on. Runs in `mrl.envs.child`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in, text_after_thinking

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

STYLE = r"(?:\\(?:text|textbf|textit|mathrm|mathbf|mbox|boldsymbol)\s*+\{|\*\*|__|\$|\\\(|[\s`\"'“{])*+"
"""Fonts, signs of Markdown and of mathematics, which may stand before a letter."""
NO_WORD = r"(?!\w|['’]\w)"
LETTER = rf"{STYLE}(?:\(\s*+{STYLE}([A-Za-z]){NO_WORD}{STYLE}\)|\[++([A-Za-z])\]|([A-Za-z]){NO_WORD})"
BOXED = re.compile(rf"\\(?:boxed|fbox)\s*+\{{{STYLE}(?i:(?:option|choice|answer)[\s:]*+)?{LETTER}(?=([^\n]{{0,40}}))")
# Behind the word: a colon, `is`, `is clearly option`; the letter of words (`a subtle one`, `I think`) is told apart in `said`.
ANSWER = re.compile(
    r"(?i)(?:(?<!not the )(?<!/)\b(?:answer|(?:correct|right|best)\s+(?:choice|option|letter|statement))\b|答案)['\"]?[\s*_>]*+"
    r"(?:(?:is|was|[=:→是为]|-+>?|–|(?:must|would|should)\s++be|to\s++(?:this|the)\s++question|choice|thus|therefore|indeed|[a-z]{2,10}ly)"
    r"[\s*_]*+)*+"
    rf"(?:(?:option|choice|letter|the)[\s:]*+)*+{LETTER}(?=([^\n]{{0,40}}))"
    r"|\b(?:option|choice)\s+\(?([A-Z])\)?(?=(\s+is\s+(?:the\s+)?(?:correct|right|best)\b))"
)
WIDE = {0xFEE0 + ord(letter): letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ:()"}
"""The letters and signs of Chinese and Japanese keyboards."""
# More letters behind one make several answers; the text of an option may follow.
MORE = re.compile(r"\s*+(?:,|/|&|\band\b|\bor\b|\\text\{\s*+(?:and|or)\s*+\}?)\s*+(?:\\text\{|\()?\s*+[A-Za-z](?![\w'])")
# Behind a letter in a box that is no product, power or equation.
BOX_ENDS = re.compile(r"\s*+(?:[.)\]},:;$*]|[-–—]\s++[A-Za-z]{2}|\\text|\\quad|\\ |$)")
ENDS = re.compile(r"\s*+(?:[.)\]},:;!?*_$\\—–-]|$|because\b|since\b|as\b|is\b)")


def environment(config: EnvConfig) -> Environment:
    """Declares `mcqa`."""
    return built_in("mcqa", config.mcqa, "options", "expected_answer", "template_metadata")


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the chosen letter is the expected one.

    The choice is the last match of the row's own `template_metadata.output_regex` (its first group that is one of the row's letters) if
    there is one and it matches; else the last `\\boxed{letter}`; else, for rows without a regex, what follows the last `Answer:`.
    """
    fields = task.fields
    options = fields.get("options")
    dicts = [option for option in options if isinstance(option, dict)] if isinstance(options, list) else []
    # The blend's rows are padded with nulls.
    letters = sorted({key.upper() for option in dicts for key, value in option.items() if value is not None})
    expected = str(fields.get("expected_answer", task.expected)).strip().upper()
    if not re.fullmatch("[A-Z]", expected) or (letters and expected not in letters):
        raise RowFault(f"the expected answer {expected!r} is none of the options {', '.join(letters) or 'A to Z'}")
    patterns = own_patterns(fields.get("template_metadata"))
    choice = choose(text_after_thinking(task.text), [*patterns, BOXED] if patterns else [BOXED, ANSWER], letters)
    return Outcome(float(choice == expected), extracted=choice)


def choose(text: str, patterns: list[re.Pattern[str]], letters: list[str]) -> str:
    """The letter of the last match of the first pattern that has one; empty if none has."""
    for pattern in patterns:
        for match in reversed(list(pattern.finditer(text.translate(WIDE) if pattern in (BOXED, ANSWER) else text))):
            found = (
                said(match) if pattern in (BOXED, ANSWER) else next((group for group in match.groups() if group), match[0]).strip().upper()
            )
            if re.fullmatch("[A-Z]", found) and (not letters or found in letters):
                return found
    return ""


def said(match: re.Match[str]) -> str:
    """The letter that a match of `BOXED` or `ANSWER` chooses; empty if it is a word of a sentence, or one of several letters."""
    letter, behind = (group for group in match.groups() if group is not None)
    if MORE.match(behind) or (match.re is BOXED and match[3] == letter and BOX_ENDS.match(behind) is None):
        return ""
    # An article has a word behind it; a letter that ends its clause, or any other behind a colon, is none.
    is_odd = letter in "aiI" or (letter.islower() and ":" not in match[0])
    if match.re is ANSWER and is_odd and match[3] == letter and ENDS.match(behind) is None:
        return ""
    return letter.upper()


def own_patterns(metadata: object) -> list[re.Pattern[str]]:
    """The row's own patterns, in order."""
    given = metadata.get("output_regex") if isinstance(metadata, dict) else None
    texts = [given] if isinstance(given, str) else given or []
    try:
        return [re.compile(text) for text in texts]
    except (re.error, RecursionError) as error:
        raise RowFault(f"the row's output_regex {texts!r:.100} is no regular expression: {error}") from error
