# SPDX-License-Identifier: Apache-2.0
"""Rewards for mathematics: last answer in the text against the expected one, by value, or as text by DAPO's rule."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mrl.envs.task import Environment, Outcome, Score, Task, built_in

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

# The longest answer of MATH-500 has 159 characters.
DAPO_TAIL_CHARACTERS = 300
ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*+([^\n]+)")
UNITS = (
    "square units degrees integers ways dollars cents points hours minutes inches feet meters km cm gm mph digits "
    "edges students meals multiples"
).split()


def environment(config: EnvConfig) -> Environment:
    """Declares `math`."""
    return built_in(
        __name__, config.math, "expected_answer", impl=config.math.math_verify_impl, is_strict=config.math.strict
    )


def make(impl: str, is_strict: bool) -> Score:
    """The reward function of `env.math.math_verify_impl`; `is_strict` as `env.math.strict`."""
    if impl != "hf_math_verify":
        return lambda task: Outcome(*score_dapo(seen(task), task.expected))
    from mrl.envs.math_value import score

    return lambda task: Outcome(*score(seen(task), task.expected, is_strict=is_strict))


def seen(task: Task) -> str:
    """The text that is graded: thoughts are part of it, as in NeMo RL, unless NeMo Gym would not see them."""
    return task.reply if task.has_parser else task.text


def score_dapo(text: str, expected: str) -> tuple[float, str]:
    """`(1.0 or 0.0, what was taken for the answer)` by DAPO's rule (arXiv:2503.14476): the line behind the last
    `Answer:` of the last 300 characters, equal to the expected answer as text once units, dollars, white space and
    spellings of LaTeX are evened out.
    """
    lines = ANSWER_LINE.findall(text[-DAPO_TAIL_CHARACTERS:])
    if not lines:
        return 0.0, ""
    answer = plain_answer(lines[-1])
    return float(answer == plain_answer(expected)), answer


def plain_answer(answer: str) -> str:
    """An answer without the left of an equation, dollars, text commands, boxes, units, spaces, thousands commas."""
    answer = answer.rpartition("=")[2]
    answer = re.sub(r",?\\text\{\s*and\s*\}", ",", answer.replace(".$", "$").replace("\\$", ""))
    if (between := re.search(r"\$(.*?)\$", answer)) is not None:
        answer = between[1]
    answer = answer.replace("$", "")
    for command in ("text", "mbox", "mathrm", "textbf", "overline", "boxed"):
        answer = re.sub(rf"\\{command}\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r"\1", answer)
    answer = re.sub(r"\\[dt]frac", r"\\frac", answer)
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)
    answer = re.sub(r"\^\{?\\circ\}?|\\[;,! ]|\\l?dots", "", answer)
    answer = re.sub(rf"\b(?:{'|'.join(UNITS)})\b", "", answer)
    answer = re.sub(r"^\s*an?\s+", "", answer)
    answer = re.sub(r"\s+", "", answer).replace('"', "").replace("{,}", ",")
    return answer.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{2,3})*,\d{3}(\.\d+)?", answer) else answer
