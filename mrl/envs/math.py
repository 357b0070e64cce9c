"""Rewards for mathematics: the last answer in the text against the expected one, by value, with math-verify. Runs in `mrl.envs.child`."""

from __future__ import annotations

import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mrl.envs.task import Outcome, Score, Task

# Of type int in math-verify; 0 and below switch its own deadlines off.
NO_TIMEOUT = 0

GOLD_TARGETS = [LatexExtractionConfig()]
# The longest answer of MATH-500 has 159 characters.
DAPO_TAIL_CHARACTERS = 300
ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
UNITS = (
    "square units degrees integers ways dollars cents points hours minutes inches feet meters km cm gm mph digits edges students meals "
    "multiples"
).split()

ANSWER_TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]


def make(impl: str) -> Score:
    """The reward function of `env.math.math_verify_impl`."""
    judge = {"hf_math_verify": score, "dapo_math_verify": score_dapo}[impl]

    def reward(task: Task) -> Outcome:
        return Outcome(*judge(task.text, task.expected))

    return reward


def score(text: str, expected: str) -> tuple[float, str]:
    """`(1.0 or 0.0, what was taken for the answer)`. Numbers compare by value: 046 is 46, 1,200 is 1200, 0.5 is 1/2.

    What follows the last `####` is the answer where a text has that mark, as in GSM8K; an equation before it would be taken otherwise.

    Without timeouts of math-verify's own: those report a hang as a wrong answer. The pool's deadline reports it as a hang.

    Raises:
        ValueError: the expected answer is not mathematics, so that no text could be right.
    """
    gold = parse(f"\\boxed{{{expected}}}", extraction_config=GOLD_TARGETS, parsing_timeout=NO_TIMEOUT)
    if not gold:
        raise ValueError(f"the expected answer {expected!r} cannot be parsed")
    answer = parse(text.rpartition("####")[2], extraction_config=ANSWER_TARGETS, parsing_timeout=NO_TIMEOUT)
    if not answer:
        return 0.0, ""
    return float(verify(gold, answer, timeout_seconds=NO_TIMEOUT)), str(answer[-1])


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
