# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from conversion.boxes import Slot
from conversion.schedule import Copy, Holding, Pull
from mrl.refit.staging import Quantiser, plan_turns


def layer(name: str, num_bytes: int) -> Quantiser:
    return Quantiser({Slot(name): torch.empty(num_bytes, dtype=torch.uint8, device="meta")}, [], lambda weights: {})


def pull(name: str, *, is_own: bool = False) -> Pull:
    slot, box = Slot(name), ((0, 1),)
    copy = Copy(slot, box, "uint8", None, {0: Holding(slot, box, "uint8")}, 1)
    return Pull(copy, 0, copy.holders[0], None if is_own else 0, 0)


def completed(rounds: Sequence[Sequence[Pull]]) -> dict[Slot, int]:
    return {one.copy.target: number for number, pulls in enumerate(rounds) for one in pulls}


def test_layers_of_one_round_need_room_for_the_largest():
    quantisers = [layer("a", 640), layer("b", 1280), layer("c", 64)]
    rounds = [[pull("a"), pull("b", is_own=True), pull("norm"), pull("c")]]
    plan = plan_turns(quantisers, rounds, completed(rounds))
    assert plan.num_bytes == 1280
    assert [[one.copy.target.name for one in turn.pulls] for turn in plan.rounds[0]] == [["norm"], ["a"], ["b"], ["c"]]


def test_a_layer_waits_for_the_last_worker_and_its_place_is_not_taken():
    quantisers = [layer("a", 640), layer("b", 640), layer("c", 640)]
    rounds = [[pull("a"), pull("a", is_own=True), pull("b")], [pull("c")], []]
    # Another worker of the engine has `a` in the last round only.
    plan = plan_turns(quantisers, rounds, completed(rounds) | {Slot("a"): 2})
    made = [[turn.quantiser for turn in round[1:]] for round in plan.rounds]
    assert made == [[quantisers[1]], [quantisers[2]], [quantisers[0]]]
    assert plan.num_bytes == 1280
    assert plan.offsets[Slot("b")] == plan.offsets[Slot("c")] != plan.offsets[Slot("a")]
    # Boxes of the own GPU come last, as they may wait.
    assert [len(turn.pulls) for turn in plan.rounds[2]] == [0, 1]


def test_weights_that_are_there_at_the_same_time_never_overlap():
    generator = random.Random(7)
    for _ in range(50):
        names = [f"layer {index}" for index in range(12)]
        quantisers = [layer(name, 64 * generator.randint(1, 9)) for name in names]
        rounds: list[list[Pull]] = [[] for _ in range(5)]
        for name in names:
            for _ in range(generator.randint(1, 3)):
                rounds[generator.randrange(5)].append(pull(name, is_own=generator.random() < 0.3))
        plan = plan_turns(quantisers, rounds, completed(rounds))
        owner = [""] * plan.num_bytes
        left = {name: sum(one.copy.target.name == name for pulls in rounds for one in pulls) for name in names}
        sizes = {name: quantiser.num_bytes for name, quantiser in zip(names, quantisers, strict=True)}
        for turn in (turn for round in plan.rounds for turn in round):
            for one in turn.pulls:
                name = one.copy.target.name
                start = plan.offsets[one.copy.target]
                place = range(start, start + sizes[name])
                assert {owner[byte] for byte in place} <= {"", name}
                for byte in place:
                    owner[byte] = name
                left[name] -= 1
            if turn.quantiser is not None:
                (made,) = (slot.name for slot in turn.quantiser.loaded)
                # All of its boxes have come, and its place is free.
                assert left[made] == 0
                owner = ["" if name == made else name for name in owner]
        assert not any(left.values())
