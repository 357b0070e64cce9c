# SPDX-License-Identifier: Apache-2.0
"""An environment as users of verifiers 0.1 to 0.3 write them: additions, judged by a rubric."""

import verifiers as vf
from datasets import Dataset


def load_environment(largest: int = 30, num_eval_examples: int = 4) -> vf.Environment:
    numbers = range(10, largest)
    rows = [{"question": f"{left}+{left}=", "answer": str(2 * left), "info": {"left": left}} for left in numbers]

    def is_right(completion, answer, info) -> float:
        assert int(answer) == 2 * info["left"]
        return float(completion[-1]["content"].strip() == answer)

    def num_digits(completion) -> float:
        return float(sum(character.isdecimal() for character in completion[-1]["content"]))

    data = Dataset.from_list(rows)
    return vf.SingleTurnEnv(
        dataset=data.select(range(num_eval_examples, len(rows))),
        eval_dataset=data.select(range(num_eval_examples)),
        rubric=vf.Rubric(funcs=[is_right, num_digits], weights=[1.0, 0.1]),
    )
