# SPDX-License-Identifier: Apache-2.0
"""A tool over turns: a calculator that answers a turn `12+34` with the sum, which is the answer of the next turn.

`python calculator.py > shown.jsonl` writes conversations for supervised training: of two additions one calls the tool,
and one is answered at once, as the tiny model does, which forgets the carry.
"""

import json
import re
from pathlib import Path

DATA = Path("prepared/tiny/data")


def calculator(turns: list[str], reference_answer: str) -> dict[str, object]:
    """Answers a call with the sum. Any other turn is the answer; a right one is worth 1, and a call nothing."""
    said = turns[-1].strip()
    if call := re.fullmatch(r"(\d{1,4})\+(\d{1,4})", said):
        return {"reward": 0.0, "observation": str(int(call[1]) + int(call[2]))}
    return {"reward": float(said == reference_answer), "calls": len(turns) - 1}


def conversation(question: str, answer: str, *, calls: bool) -> list[dict[str, object]]:
    """The question and its answer, with or without a call; `weight` marks the turns that are learned."""
    first, second = (int(term) for term in question.rstrip("=").split("+"))
    guess = (first // 10 + second // 10) * 10 + (first + second) % 10
    texts = [question, f"{first}+{second}", answer, answer] if calls else [question, str(guess)]
    roles: list[dict[str, object]] = [{"role": "user"}, {"role": "assistant", "weight": 1}]
    return [roles[index % 2] | {"content": text} for index, text in enumerate(texts)]


if __name__ == "__main__":
    lines = [line for name in ("train", "warm_start") for line in (DATA / f"{name}.jsonl").open(encoding="utf-8")]
    for index, row in enumerate(map(json.loads, lines)):
        print(json.dumps({"messages": conversation(row["question"], row["answer"], calls=index % 2 == 0)}))
