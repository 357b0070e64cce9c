# SPDX-License-Identifier: Apache-2.0
"""A tool over turns: three numbers are added by a calculator that adds two, and answers in the next turn.

`python calculator.py > sums.jsonl` writes the rows of calculator.yaml, and `python calculator.py shown > shown.jsonl`
conversations for calculator_sft.yaml.
"""

import json
import random
import re
import sys

NUM_ROWS = 2256


def calculator(turns: list[str], reference_answer: str) -> dict[str, object]:
    """A turn `12+34` calls the tool, any other is the answer. Every right part of the way is worth something."""
    said = turns[-1].strip()
    if call := re.fullmatch(r"(\d{1,4})\+(\d{1,4})", said):
        return {"reward": 0.1 * len(turns), "observation": str(int(call[1]) + int(call[2]))}
    return {"reward": 1.0 if said == reference_answer else 0.0, "calls": len(turns) - 1}


def conversation(numbers: list[int]) -> list[dict[str, object]]:
    """The question, both calls, what the tool says, and the answer; `weight` marks the turns that are learned."""
    first, second, third = numbers
    texts = [f"{first}+{second}+{third}", f"{first}+{second}", f"{first + second}"]
    texts += [f"{first + second}+{third}", f"{sum(numbers)}", f"{sum(numbers)}"]
    roles = ({"role": "user"}, {"role": "assistant", "weight": 1})
    return [roles[index % 2] | {"content": text} for index, text in enumerate(texts)]


if __name__ == "__main__":
    draw = random.Random(0)
    for _ in range(NUM_ROWS):
        terms = [draw.randint(10, 99) for _ in range(3)]
        row = {"question": "+".join(map(str, terms)), "answer": str(sum(terms))}
        print(json.dumps({"messages": conversation(terms)} if sys.argv[1:] == ["shown"] else row))
