# SPDX-License-Identifier: Apache-2.0
"""Every rule of every family, perturbed on either side, is refused by the proof or shows in the values."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from conversion.boxes import Box, Layout, Piece, SlotLayout
from conversion.families.registry import FAMILIES
from conversion.reshard import ScheduleError
from tests.proof.cases import Case

NUM_SEEDS = 600

Change = Callable[[list[Piece]], list[Piece] | None]
"""A fault in a slot: its pieces, changed, or None where there is nothing to change."""


def rule_of(name: str) -> str:
    """The rule of a slot: its name without the layer's and the expert's number."""
    return re.sub(r"(?<=\.)\d+(?=\.)|(?<=weight)\d+$", "#", name)


def swap(pieces: list[Piece]) -> list[Piece] | None:
    """Two parts of equal size in each other's place; None where there are none."""
    for index, first in enumerate(pieces):
        for other, second in enumerate(pieces[index + 1 :], index + 1):
            if [b - a for a, b in first.local] == [b - a for a, b in second.local] and (first.name, first.box) != (
                second.name,
                second.box,
            ):
                pieces[index], pieces[other] = replace(first, local=second.local), replace(second, local=first.local)
                return pieces
    for index, piece in enumerate(pieces):
        for dim, (start, stop) in enumerate(piece.box):
            if stop - start >= 2:
                pieces[index : index + 1] = swapped_ends(piece, dim)
                return pieces
    return None


def swapped_ends(piece: Piece, dim: int) -> list[Piece]:
    """The first and the last slice along `dim` change places."""
    (low, high), local_dim = piece.box[dim], dim - len(piece.box)
    start, stop = piece.local[local_dim]
    ends = [
        replace(
            piece,
            box=with_range(piece.box, dim, low, low + 1),
            local=with_range(piece.local, local_dim, stop - 1, stop),
        ),
        replace(
            piece,
            box=with_range(piece.box, dim, high - 1, high),
            local=with_range(piece.local, local_dim, start, start + 1),
        ),
    ]
    if high - low > 2:
        middle = with_range(piece.local, local_dim, start + 1, stop - 1)
        ends.append(replace(piece, box=with_range(piece.box, dim, low + 1, high - 1), local=middle))
    return ends


def with_range(box: Box, dim: int, start: int, stop: int) -> Box:
    ranges = list(box)
    ranges[dim] = (start, stop)
    return tuple(ranges)


def shift(pieces: list[Piece]) -> list[Piece] | None:
    """The first part is taken one row further on."""
    if not pieces:
        return None
    (start, stop), *rest = pieces[0].box
    pieces[0] = replace(pieces[0], box=((start + 1, stop + 1), *rest))
    return pieces


def drop(pieces: list[Piece]) -> list[Piece] | None:
    """The last part is missing."""
    return pieces[:-1] if pieces else None


def scale(pieces: list[Piece]) -> list[Piece] | None:
    """Values change on their way: a transform where there is none, or none where there is one."""
    return [replace(piece, transform=None if piece.transform else "neg_exp") for piece in pieces] or None


def mutated(layout: Layout, rule: str, change: Change) -> Layout | None:
    """The layout by a table with one wrong rule; None where it has nothing that the change could apply to."""
    wrong: Layout = dict(layout)
    is_changed = False
    for slot, content in layout.items():
        if rule_of(slot.name) == rule:
            pieces = change(list(content.pieces))
            if pieces is not None:
                wrong[slot] = SlotLayout(content.shape, content.dtype, tuple(pieces), content.padding)
                is_changed = True
    return wrong if is_changed else None


def is_caught(case: Case, rule: str, side: str, change: Change) -> bool | None:
    """True when the proof or the values show the wrong rule; None where it changes nothing read in this case."""
    right = case.sources if side == "source" else case.targets
    wrong = {id(layout): mutated(layout, rule, change) for layout in right.values()}
    if all(layout is None for layout in wrong.values()):
        return None
    layouts = {key: wrong[id(layout)] or layout for key, layout in right.items()}
    try:
        if change is scale and side == "source":
            # Ranks hold other values than the table says. A table that says so is refused whatever the values are.
            faults = case.faults(schedule := case.reshard(), sources=layouts)
        else:
            faults = case.faults(
                schedule := case.reshard(sources=layouts) if side == "source" else case.reshard(targets=layouts)
            )
    except ScheduleError:
        return True
    if faults:
        return True
    # Tied output layers are copies of the embedding: where every worker reads the embedding, nobody reads them.
    pulls = [pull for target in case.targets for pulls in schedule.pulls(target) for pull in pulls]
    return None if side == "source" and rule not in {rule_of(pull.holding.slot.name) for pull in pulls} else False


def rules_of(case: Case) -> Iterator[tuple[str, str]]:
    """(side, rule) of everything that the tables of a case hold."""
    for side, layouts in (("source", case.sources), ("target", case.targets)):
        yield from {(side, rule_of(slot.name)) for layout in layouts.values() for slot in layout}


@pytest.mark.parametrize("change", [swap, shift, drop, scale])
def test_a_wrong_rule_is_caught(change: Change):
    caught: dict[tuple[str, str, str], int] = defaultdict(int)
    seen = set()
    for seed in range(NUM_SEEDS):
        case = Case(random.Random(seed))
        # A single round: more of them take time, and which of them carries a box does not depend on the rule.
        case.buffer_bytes = 1 << 20
        model_type = str(case.drawn.hf_config["model_type"])
        for side, rule in rules_of(case):
            key = (model_type, side, rule)
            seen.add(key)
            if key not in caught and (answer := is_caught(case, rule, side, change)) is not None:
                assert answer, f"seed {seed}: {change.__name__} of {side} {rule} shows nowhere in {case}"
                caught[key] += 1
    assert {model_type for model_type, _, _ in seen} == set(FAMILIES)
    assert len(seen) > 150
    assert seen - caught.keys() == set()
