"""Rewards for mathematics: the last answer in the text against the expected one, by value, with math-verify. Runs in `mrl.envs.child`."""

from __future__ import annotations

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# Of type int in math-verify; 0 and below switch its own deadlines off.
NO_TIMEOUT = 0

GOLD_TARGETS = [LatexExtractionConfig()]
ANSWER_TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]


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


# The first call builds parser tables and fills sympy's caches (0.3 s): that is not the first rollout's time.
score("\\boxed{\\frac{1}{2}}", "0.5")
