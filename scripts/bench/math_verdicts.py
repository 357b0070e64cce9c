# SPDX-License-Identifier: Apache-2.0
"""Verdicts of env.math.strict and of math-verify on tests/unit/envs/math_answers.txt, by kind. Writes docs/data/math_verdicts.json."""

from __future__ import annotations

import argparse
import json
import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mrl.envs.math_value import score
from tests.answers import Case, cases
from tests.long.record import Row, record

# As NeMo RL calls it.
TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]


def is_right_by_math_verify(case: Case) -> bool:
    """The verdict of math-verify alone."""
    gold = parse(f"\\boxed{{{case.expected}}}", extraction_config=[LatexExtractionConfig()])
    return bool(verify(gold, parse(case.text, extraction_config=TARGETS)))


def rows_of(found: dict[Case, tuple[bool, bool]]) -> list[Row]:
    """A row of counts for each kind, and one for all."""
    rows: list[Row] = []
    for kind in [*sorted({case.kind for case in found}), "all"]:
        some = {case: verdicts for case, verdicts in found.items() if kind in (case.kind, "all")}
        row: Row = {"expected answer": kind}
        for is_right, what, mistake in ((True, "right answers", "refused by"), (False, "wrong or restated", "taken by")):
            row[what] = sum(case.is_right == is_right for case in some)
            for index, judge in enumerate(("strict", "math-verify")):
                row[f"{mistake} {judge}"] = sum(case.is_right == is_right != verdicts[index] for case, verdicts in some.items())
        rows.append(row)
    return rows


def main(*, is_recorded: bool) -> None:
    """Judges every answer twice, prints the counts, and records them."""
    logging.disable(logging.CRITICAL)
    found = {case: (score(case.text, case.expected, is_strict=True)[0] == 1.0, is_right_by_math_verify(case)) for case in cases()}
    rows = rows_of(found)
    for row in rows:
        print(json.dumps(row))
    if is_recorded:
        record("math_verdicts", rows, command="python -m scripts.bench.math_verdicts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.math_verdicts")
    parser.add_argument("--no-record", action="store_true", help="write no docs/data/math_verdicts.json")
    main(is_recorded=not parser.parse_args().no_record)
