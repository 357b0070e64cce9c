# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: the letter that the text settles on. Runs in `mrl.envs.child`.

Rows with `options` are NeMo Gym's, and get its verdicts. A question whose answer is a letter, as NeMo RL's `math`
grades it with `verifier_type: english_multichoice`, is read more freely: see `mrl.envs.letters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mrl.envs.letters import ANSWER, BOXED, SPELLINGS, choose
from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

MODES = ("strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md")
BOXED_LETTER = re.compile(r"[^A-Za-z]*([A-Z])[^A-Za-z]*|\s*([A-Z])\s*[:).\-].*", re.DOTALL)
COLON = re.compile(r"(?i)answer\s*+:\s*+(.+)")
COLON_MD = re.compile(r"(?i)answer[*_]{0,2}\s*+:[*_\s]{0,2}(.+)")
ALONE = re.compile(r"(?<![A-Za-z])([A-Za-z])(?![A-Za-z])")
BETWEEN = re.compile(r"(?i)\s*[/|&,;]\s*|\s+(?:or|and)\s+|\s+")


def environment(config: EnvConfig) -> Environment:
    """Declares `mcqa`."""
    return built_in(__name__, config.mcqa, "options", "expected_answer", "template_metadata", "grading_mode")


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the chosen letter is the expected one: by `choose_as_gym` for rows with options, else by `choose`."""
    fields, text = task.fields, task.reply.strip()
    given = fields.get("options")
    options = {
        key.upper(): str(value)
        for option in (given if isinstance(given, list) else [])
        for key, value in (option.items() if isinstance(option, dict) else ())
        if value is not None and len(key) == 1 and key.isalpha()
    }
    expected = str(fields.get("expected_answer", task.expected)).strip().upper()
    patterns, mode = own_patterns(fields.get("template_metadata")), fields.get("grading_mode") or MODES[0]
    if not re.fullmatch("[A-Z]", expected) or (options and not patterns and expected not in options):
        raise RowFault(
            f"the expected answer {expected!r} is none of the options {', '.join(sorted(options)) or 'A to Z'}"
        )
    if mode not in MODES:
        raise RowFault(f"grading_mode {mode!r} is none of {', '.join(MODES)}")
    if options:
        choice = choose_as_gym(text, options, patterns, str(mode))
    else:
        choice = choose(text, [*patterns, BOXED] if patterns else [BOXED, ANSWER])
    return Outcome(float(choice == expected), extracted=choice)


def choose_as_gym(text: str, options: Mapping[str, str], patterns: list[re.Pattern[str]], mode: str) -> str:
    """The letter that Gym's `mcqa` server reads: by the last match of the row's patterns, else its `grading_mode`."""
    for pattern in patterns:
        if matches := list(pattern.finditer(text)):
            groups = matches[-1].groups()
            found = (
                (next((group for group in groups if group), "") if groups else matches[-1][0])
                .translate(SPELLINGS)
                .strip()
            )
            if letter := found.upper() if len(found) == 1 and found.isalpha() else _option(found, options):
                return letter
    if mode == "lenient_answer_colon_md":
        return next((letter for part in reversed(COLON_MD.findall(text)) if (letter := _letter_of(part, options))), "")
    if mode == "lenient_answer_colon":
        found = _unwrapped(match[1]).strip() if (match := COLON.search(text)) else ""
        return found.upper() if found.upper() in options else _option(found, options)
    inner = boxed(text)
    match = BOXED_LETTER.fullmatch(_unwrapped(inner))
    if match and (letter := match[1] or match[2]) in options:
        return letter
    if mode == "lenient_boxed":
        inside = [letter for letter, option in options.items() if _even(option) and _even(option) in _even(inner)]
        return inside[0] if len(inside) == 1 else ""
    return ""


def boxed(text: str) -> str:
    """Content of the last `\\boxed{}`, braces within included; empty if there is none, or it does not end."""
    inner, depth = text.rpartition("\\boxed{")[2] if "\\boxed{" in text else "", 1
    for index, character in enumerate(inner):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inner[:index].strip()
    return ""


def _unwrapped(text: str) -> str:
    while text.startswith("\\text{") and text.endswith("}"):
        text = text[len("\\text{") : -1].strip()
    return text


def _even(text: str) -> str:
    return " ".join(text.lower().split())


def _option(found: str, options: Mapping[str, str]) -> str:
    return next((letter for letter, option in options.items() if found and _even(option) == _even(found)), "")


def _letter_of(payload: str, options: Mapping[str, str]) -> str:
    """The letter at the beginning of what follows `Answer:`, or the last lone capital; of a list of letters none."""
    payload = payload.translate(SPELLINGS).strip().strip("*_` \t\n\r.,;:")
    alone = [match for match in ALONE.finditer(payload) if match[1].upper() in options]
    for one, other in zip(alone, alone[1:], strict=False):
        if one[1].upper() != other[1].upper() and BETWEEN.fullmatch(payload, one.end(), other.start()):
            return ""
    leading = re.match(r"[a-zA-Z](?![a-zA-Z0-9])", payload)
    letter = (
        payload if len(payload) == 1 else leading[0] if leading else (re.findall(r"\b[A-Z]\b", payload) or [""])[-1]
    )
    return letter.upper() if letter.upper() in options else ""


def own_patterns(metadata: object) -> list[re.Pattern[str]]:
    """The row's own patterns, in order."""
    given = metadata.get("output_regex") if isinstance(metadata, dict) else None
    texts = [given] if isinstance(given, str) else given or []
    try:
        return [re.compile(text, re.IGNORECASE) for text in texts]
    except (re.error, RecursionError) as error:
        raise RowFault(f"the row's output_regex {texts!r:.100} is no regular expression: {error}") from error
