# SPDX-License-Identifier: Apache-2.0
"""Reverse text: words of random syllables, and a reward for how much of an answer is the word written backwards.

`python reverse_text.py > words.jsonl` writes the rows that both configs of this name read.
"""

import json
import random
from difflib import SequenceMatcher

NUM_WORDS, NUM_SYLLABLES = 2256, 3


def likeness(response: str, reference_answer: str) -> float:
    return SequenceMatcher(None, response.strip(), reference_answer, autojunk=False).ratio()


def words() -> list[str]:
    draw, found = random.Random(0), dict[str, None]()
    while len(found) < NUM_WORDS:
        found["".join(draw.choice("bdgklmnprst") + draw.choice("aeiou") for _ in range(NUM_SYLLABLES))] = None
    return list(found)


if __name__ == "__main__":
    for word in words():
        print(json.dumps({"question": word, "answer": word[::-1]}))
