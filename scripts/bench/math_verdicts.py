# SPDX-License-Identifier: Apache-2.0
"""env.math.strict, math-verify verdicts on tests/unit/envs/math_answers.txt by kind: docs/data/math_verdicts.json."""

from __future__ import annotations

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mrl.envs.math_value import expected_number, score
from scripts.bench.turns import bench_parser, report
from tests.answers import Case, cases
from tests.long.record import Row

PLAIN = "plain numbers"
# As NeMo RL calls it.
TARGETS = [ExprExtractionConfig(), LatexExtractionConfig()]


def is_right_by_math_verify(case: Case) -> bool:
    """The verdict of math-verify alone."""
    gold = parse(f"\\boxed{{{case.expected}}}", extraction_config=[LatexExtractionConfig()])
    return bool(verify(gold, parse(case.text, extraction_config=TARGETS)))


def rows_of(found: dict[Case, tuple[bool, bool]]) -> list[Row]:
    """A row of counts for each kind, one for plain numbers, and one for all."""
    rows: list[Row] = []
    kinds = {
        case: (case.kind, "all", *([PLAIN] if expected_number(case.expected) is not None else [])) for case in found
    }
    for kind in [*sorted({case.kind for case in found}), PLAIN, "all"]:
        some = {case: verdicts for case, verdicts in found.items() if kind in kinds[case]}
        row: Row = {"expected answer": kind}
        for is_right, what, mistake in (
            (True, "right answers", "refused by"),
            (False, "wrong or restated", "taken by"),
        ):
            row[what] = sum(case.is_right == is_right for case in some)
            for index, judge in enumerate(("strict", "math-verify")):
                row[f"{mistake} {judge}"] = sum(
                    case.is_right == is_right != verdicts[index] for case, verdicts in some.items()
                )
        rows.append(row)
    return rows


def main() -> None:
    """Judges every answer twice, prints the counts, and records them."""
    options = bench_parser(__doc__).parse_args()
    logging.disable(logging.CRITICAL)
    found = {
        case: (score(case.text, case.expected, is_strict=True)[0] == 1.0, is_right_by_math_verify(case))
        for case in cases()
    }
    report("math_verdicts", rows_of(found), options)


if __name__ == "__main__":
    main()
