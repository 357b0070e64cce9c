# SPDX-License-Identifier: Apache-2.0
"""Additions of two-digit numbers with two-digit sums, to train and warm-start tiny models on, and their JSONL splits.

The splits share no pair of operands; two of them also hold wrong sums, for preferences.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["tiny", "tiny_dense"]
"""The model that learns them: a nemotron_h with experts, or a dense qwen3."""

SMALLEST, LARGEST = 10, 99
PREFERENCE_SPLITS = ("train", "validation")
# All 640 additions that carry, and of the 1,000 others so many that a model which never carries is wrong more often
# than right.
NUM_WITHOUT_CARRY = 400
NUM_VALIDATION, NUM_PROBE, NUM_WARM_START = 256, 96, 450


@dataclass(frozen=True)
class Addition:
    """A question such as `27+15=`."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def carries(self) -> bool:
        """True if the units add up to ten or more."""
        return self.left % 10 + self.right % 10 >= 10

    @property
    def answer_without_carry(self) -> str:
        """The answer of someone who adds digit by digit and forgets the carry: 27+15=32."""
        return str(self.left + self.right - 10 * self.carries)

    @property
    def swapped(self) -> Addition:
        return Addition(self.right, self.left)


@dataclass(frozen=True)
class Splits:
    """Additions by use. An operand pair and its swap share a split. Warm start ends on answering enough of `probe`."""

    train: list[Addition]
    validation: list[Addition]
    warm_start: list[Addition]
    probe: list[Addition]


def split_additions(seed: int) -> Splits:
    """All additions that carry and `NUM_WITHOUT_CARRY` others, dealt into splits by `seed`.

    Validation asks each pair in one order only, the others in both.
    """
    shuffle = random.Random(seed)
    operands = range(SMALLEST, LARGEST + 1)
    every = [Addition(left, right) for left in operands for right in operands if left <= right <= LARGEST - left]
    others = shuffle.sample([pair for pair in every if not pair.carries], NUM_WITHOUT_CARRY)
    pairs = [pair for pair in every if pair.carries] + others
    shuffle.shuffle(pairs)
    validation, rest = pairs[:NUM_VALIDATION], pairs[NUM_VALIDATION:]
    probe, rest = rest[:NUM_PROBE], rest[NUM_PROBE:]
    warm_start, train = rest[:NUM_WARM_START], rest[NUM_WARM_START:]
    return Splits(
        train=_both_orders(train, shuffle),
        validation=[shuffle.choice((pair, pair.swapped)) for pair in validation],
        warm_start=_both_orders(warm_start, shuffle),
        probe=_both_orders(probe, shuffle),
    )


def write_splits(splits: Splits, folder: Path) -> None:
    """Writes JSONL per split to `folder`: {"question", "answer", "agent_ref"}, preferences of `PREFERENCE_SPLITS`."""
    folder.mkdir(parents=True)
    for name, additions in vars(splits).items():
        files: dict[str, list[dict[str, object]]] = {name: [row_of(addition) for addition in additions]}
        if name in PREFERENCE_SPLITS:
            files[f"{name}_preferences"] = [preference_row(addition) for addition in additions]
        for stem, rows in files.items():
            (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row_of(addition: Addition) -> dict[str, object]:
    """The addition with its sum, and who asks: agent `carrying` or `plain`, so each kind may have its own teacher."""
    agent = {"name": "carrying" if addition.carries else "plain"}
    return {"question": addition.question, "answer": addition.answer, "agent_ref": agent}


def preference_row(addition: Addition) -> dict[str, object]:
    """The addition with its sum preferred to a wrong one of two digits, which follows from the question."""
    wrong = random.Random(addition.question).choice(
        [number for number in range(SMALLEST, LARGEST + 1) if str(number) != addition.answer]
    )
    return {"prompt": addition.question, "chosen": addition.answer, "rejected": str(wrong)}


def _both_orders(pairs: list[Addition], shuffle: random.Random) -> list[Addition]:
    additions = sorted(
        {addition for pair in pairs for addition in (pair, pair.swapped)}, key=lambda addition: addition.question
    )
    shuffle.shuffle(additions)
    return additions
