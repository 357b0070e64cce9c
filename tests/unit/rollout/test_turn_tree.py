# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from mrl.rollout.turn_tree import SampledAnswer, TurnTree
from mrl.types import UntrainedTurn
from tests.rollouts import request


def answer(ids: list[int], *, version: int = 0, num_versions: int = 1, untrained: str = "") -> SampledAnswer:
    logprobs = np.array([-0.5 - token_id / 8 for token_id in ids], dtype=np.float32)
    return SampledAnswer(np.array(ids, dtype=np.int32), logprobs, "stop", version, num_versions, untrained)


def trained(tree: TurnTree) -> list[tuple[list[int], list[int]]]:
    """The prompt and the answer of each turn that is trained, as the sequences have them."""
    found = []
    for sequence in tree.sequences(request([1])):
        whole = [*sequence.request.token_ids, *sequence.token_ids.tolist()]
        for turn in sequence.turns:
            start = len(sequence.request.token_ids)
            found.append((whole[: start + turn.start], whole[start + turn.start : start + turn.stop]))
    return found


def test_a_turn_keeps_its_own_tokens_alone():
    tree = TurnTree()
    for length in range(2, 40, 4):
        node = tree.add(list(range(length)), answer([length, length + 1]))
        assert node.given.base is None


def test_a_conversation_is_one_sequence():
    tree = TurnTree()
    tree.add([1, 2], answer([3, 4], version=5))
    tree.add([1, 2, 3, 4, 9], answer([6], version=6, num_versions=2))
    (sequence,) = tree.sequences(request([1]))
    assert (list(sequence.request.token_ids), sequence.token_ids.tolist()) == ([1, 2], [3, 4, 9, 6])
    assert sequence.generator_logprobs.tolist() == [-0.875, -1.0, 0.0, -1.25]
    assert [(turn.start, turn.stop, turn.weight_version) for turn in sequence.turns] == [(0, 2, 5), (3, 4, 6)]
    assert sequence.num_weight_versions == 3


def test_a_retry_shares_its_beginning_and_trains_it_once():
    tree = TurnTree()
    tree.add([1], answer([2]))
    for last in (7, 8):
        tree.add([1, 2, 3], answer([last]))
    first, second = tree.sequences(request([1]))
    assert (list(first.request.token_ids), first.token_ids.tolist(), len(first.turns)) == ([1], [2, 3, 8], 2)
    assert (list(second.request.token_ids), second.token_ids.tolist(), len(second.turns)) == ([1, 2, 3], [7], 1)
    assert first.untrained == () and second.untrained == (UntrainedTurn(1, 2, "elsewhere"),)


def test_a_sub_agent_and_a_compacted_conversation_are_trees_of_their_own():
    tree = TurnTree()
    tree.add([1], answer([2]))
    tree.add([50, 51], answer([52]))
    tree.add([1, 2, 3], answer([4, 5, 6]))
    tree.add([1, 99], answer([7]))
    assert [sequence.token_ids.tolist() for sequence in tree.sequences(request([1]))] == [[7], [2, 3, 4, 5, 6], [52]]


def test_of_two_equal_turns_the_later_one_goes_on():
    tree = TurnTree()
    tree.add([1], answer([2]))
    later = tree.add([1], answer([2]))
    assert tree.add([1, 2, 3], answer([4])).parent is later


def test_what_must_not_be_trained_stays_in_the_context_and_is_counted():
    tree = TurnTree()
    tree.add([1], answer([2]))
    tree.add([1, 2, 3], answer([4, 4], untrained="forced"))
    tree.add([1, 2, 3, 4, 4, 5], answer([6]))
    tree.add([1, 2, 3, 4, 4, 5, 6, 7], answer([8, 8, 8], untrained="forced"))
    (sequence,) = tree.sequences(request([1]))
    # The last turn is left out, and the sequence ends before it.
    assert sequence.token_ids.tolist() == [2, 3, 4, 4, 5, 6] and len(sequence.turns) == 2
    assert sequence.generator_logprobs.tolist()[2:4] == [0, 0]
    assert tree.num_untrained() == {"forced": 5} and sequence.untrained == (UntrainedTurn(3, 5, "forced"),)
    tree.add([1, 2, 3], answer([9]))
    # The branch that goes on longer, not the one that must not be trained.
    assert [sequence.token_ids.tolist() for sequence in tree.sequences(request([1]))] == [[2, 3, 9], [6]]
    only = TurnTree()
    only.add([1], answer([2], untrained="forced"))
    assert only.sequences(request([1])) == [] == TurnTree().sequences(request([1]))


def routed(ids: list[int], prompt: list[int], mark: int, start: int = 0) -> SampledAnswer:
    """An answer whose tokens from `start` on went through experts with the number of the turn."""
    num_tokens = len(prompt) + len(ids) - 1
    routes = np.stack([np.arange(num_tokens), np.full(num_tokens, mark)], axis=1)[:, None].astype(np.uint8)
    return replace(answer(ids), routes=routes[start:], routes_start=start)


def test_tokens_keep_the_experts_that_they_were_drawn_with():
    tree = TurnTree()
    tree.add([1, 2], routed([3, 4], [1, 2], 1))
    # An engine that knows the beginning tells the rest, and all of it where it does not.
    tree.add([1, 2, 3, 4, 5], routed([6], [1, 2, 3, 4, 5], 2, start=3))
    tree.add([1, 2, 3, 4, 5, 6, 7], routed([8, 9], [1, 2, 3, 4, 5, 6, 7], 3))
    tree.add([1, 2, 3, 4, 7], routed([8], [1, 2, 3, 4, 7], 4, start=3))
    branch, whole = tree.sequences(request([1]))
    assert whole.routes is not None and branch.routes is not None
    assert whole.routes[:, 0, 0].tolist() == list(range(8)) and branch.routes[:, 0, 0].tolist() == list(range(5))
    assert whole.routes[:, 0, 1].tolist() == [1, 1, 1, 2, 2, 3, 3, 3] and branch.routes[:, 0, 1].tolist() == [
        1,
        1,
        1,
        4,
        4,
    ]
    assert len(whole.routes) == len(whole.request.token_ids) + len(whole.token_ids) - 1


def test_turns_whose_beginning_has_no_routes_are_not_trained():
    tree = TurnTree()
    tree.add([1, 2, 3], routed([4], [1, 2, 3], 1, start=2))
    tree.add([1, 2, 3, 4, 5], routed([6, 6], [1, 2, 3, 4, 5], 2, start=3))
    tree.add([9], routed([6], [9], 3))
    (sequence,) = tree.sequences(request([1]))
    assert sequence.token_ids.tolist() == [6] and tree.num_untrained() == {"no_routes": 3}


def reference_parents(turns: list[tuple[list[int], list[int]]]) -> list[int | None]:
    """The turn that each one continues, found by comparing it with all earlier ones."""
    parents = []
    for index, (prompt, _) in enumerate(turns):
        fitting = [other for other in range(index) if (whole := sum(turns[other], [])) == prompt[: len(whole)]]
        parents.append(max(fitting, key=lambda other: (len(sum(turns[other], [])), other), default=None))
    return parents


@pytest.mark.parametrize("seed", range(40))
def test_random_trees_against_a_slow_reference(seed: int):
    """Conversations that branch, are cut and begin anew, over three tokens, so that many begin alike."""
    rng = random.Random(seed)
    tree, turns, reasons = TurnTree(), list[tuple[list[int], list[int]]](), list[str]()
    for _ in range(rng.randint(1, 40)):
        prompt = list(sum(rng.choice(turns), [])) if turns and rng.random() < 0.8 else []
        if rng.random() < 0.2:
            prompt = prompt[: rng.randint(0, len(prompt))]
        prompt = prompt + [rng.randrange(3) for _ in range(rng.randint(0 if prompt else 1, 2))]
        ids = [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        turns.append((prompt, ids))
        reasons.append("forced" if rng.random() < 0.2 else "")
        tree.add(prompt, answer(ids, untrained=reasons[-1]))
    parents = reference_parents(turns)
    places = {node: index for index, node in enumerate(tree.nodes)}
    assert [places.get(node.parent) if node.parent is not None else None for node in tree.nodes] == parents
    assert [node.token_ids.tolist() for node in tree.nodes] == [sum(turn, []) for turn in turns]
    wanted = [turn for turn, reason in zip(turns, reasons, strict=True) if not reason]
    assert sorted(trained(tree)) == sorted(wanted)
    assert sum(tree.num_untrained().values()) == sum(
        len(ids) for (_, ids), reason in zip(turns, reasons, strict=True) if reason
    )
    leaves = set(range(len(turns))) - set(parents)
    assert len(tree.sequences(request([1]))) <= len(leaves)
    for sequence in tree.sequences(request([1])):
        assert sequence.turns[-1].stop == len(sequence.token_ids) and sequence.turns[0].start == 0
        own = np.zeros(len(sequence.token_ids), dtype=bool)
        for turn in sequence.turns:
            assert not own[turn.start : turn.stop].any()
            own[turn.start : turn.stop] = True
        assert sequence.generator_logprobs[own].tolist() == [
            -0.5 - token_id / 8 for token_id in sequence.token_ids[own].tolist()
        ]
        assert not sequence.generator_logprobs[~own].any()
