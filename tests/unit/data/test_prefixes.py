# SPDX-License-Identifier: Apache-2.0
"""Prefix trees of packed rows, by hand and against the sequences that their paths must be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mrl.data import prefixes
from mrl.data.packing import PackedRow, PrefixTree, pack_row
from mrl.data.planning import Unit, prompt_units, summaries
from mrl.data.prefixes import prefix_tree
from mrl.types import Rollout, RolloutInfo, RolloutRequest, SamplingParams
from tests.rollouts import pulled

PAD = 99
SAMPLING = SamplingParams(1.0, 1.0, None, 16, ())


def row(*sequences: tuple[list[int], list[int]], divisible_by: int = 1, routes: list[np.ndarray] | None = None):
    """A packed row of prompts and what follows them."""
    made = {}
    for index, (prompt, tokens) in enumerate(sequences):
        request = RolloutRequest("p", index, 0, 0, tuple(prompt), SAMPLING)
        rollout = Rollout(
            request,
            0,
            np.array(tokens, dtype=np.int32),
            np.zeros(len(tokens), dtype=np.float32),
            "stop",
            None if routes is None else routes[index],
        )
        made[index] = pulled(rollout, 1.0, True)
    return pack_row(made, divisible_by=divisible_by, pad_token_id=PAD)


@pytest.fixture(autouse=True)
def shares_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MIN_SAVED_TOKENS", 1)


def assert_holds(given: PackedRow, *, divisible_by: int = 1) -> PrefixTree:
    """Every token of a sequence lies on the path of its last token, in order, and every token is one of the row's."""
    tree = prefix_tree(given, divisible_by=divisible_by)
    assert tree is not None and len(tree.positions_U) % divisible_by == 0
    tokens_U = given.token_ids_T[tree.positions_U]
    node_of = np.repeat(np.arange(len(tree.lengths)), tree.lengths)
    for start, length in zip(given.cu_seqlens.tolist(), given.lengths, strict=False):
        mine = tree.tokens_T[start : start + length]
        assert tokens_U[mine].tolist() == given.token_ids_T[start : start + length].tolist()
        assert tree.path_tokens(int(node_of[mine[-1]])).tolist()[:length] == mine.tolist()
    counts = np.zeros(len(tokens_U), dtype=int)
    for start, length in zip(given.cu_seqlens.tolist(), given.lengths, strict=False):
        np.add.at(counts, tree.tokens_T[start : start + length].numpy(), 1)
    assert tree.counts_U.tolist() == counts.tolist()
    seen: set[int] = set()
    for level in tree.levels:
        above = {tree.parents[node] for node in level}
        assert above == {-1} or (-1 not in above and above <= seen)
        seen |= set(level)
    assert seen == set(range(len(tree.lengths)))
    return tree


def test_a_tree_by_hand():
    given = row(([1, 2, 3], [4, 5]), ([1, 2, 3], [4, 6, 7]), ([8], [9]), ([1, 2, 3], [5]), divisible_by=4)
    tree = assert_holds(given, divisible_by=4)
    # 1 2 3 and 8 9 first, then 4 and 5 after 3, then 5 and 6 7 after 4, and two tokens of padding.
    assert tree.lengths == (3, 2, 1, 1, 1, 2, 2)
    assert tree.parents == (-1, -1, 0, 0, 2, 2, -1)
    assert tree.counts == (3, 1, 2, 1, 1, 1, 0)
    assert given.token_ids_T[tree.positions_U].tolist()[:10] == [1, 2, 3, 8, 9, 4, 5, 5, 6, 7]
    assert tree.levels == (range(2), range(2, 4), range(4, 6), range(6, 7))


def test_sequences_that_begin_otherwise_have_no_tree():
    assert prefix_tree(row(([1, 2], [3]), ([2, 1], [3])), divisible_by=4) is None
    assert prefix_tree(row(), divisible_by=4) is None


def test_equal_sequences_and_beginnings_of_others_are_there_once():
    tree = assert_holds(row(([1, 2], [3, 4]), ([1, 2], [3, 4]), ([1], [2])))
    assert (tree.lengths, tree.counts) == ((2, 2), (3, 2))


def test_a_beginning_that_saves_little_is_not_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, "MIN_SAVED_TOKENS", 5)
    # The first two of a pair save 4 tokens, the 4 of all three save 8.
    tree = assert_holds(row(([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4], [5, 7]), ([1, 2, 3, 4], [8])))
    assert (tree.lengths, tree.parents) == ((4, 2, 2, 1), (-1, 0, 0, 0))
    assert prefix_tree(row(([1, 2, 3, 4], [5]), ([1, 2, 3, 4], [6])), divisible_by=1) is None


def test_tokens_with_other_routes_are_apart():
    routes = [np.array([[[expert]] for expert in experts], dtype=np.uint8) for experts in ((1, 2, 3), (1, 2, 4))]
    tree = assert_holds(row(([1, 2, 3], [4]), ([1, 2, 3], [5]), routes=routes))
    assert (tree.lengths, tree.parents) == ((2, 2, 2), (-1, 0, 0))


@pytest.mark.parametrize("seed", range(20))
def test_paths_of_random_trees_are_the_sequences(seed: int, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(prefixes, "MIN_SAVED_TOKENS", int(rng.integers(1, 6)))
    known: list[list[int]] = [[0, 0, 0]]
    for _ in range(int(rng.integers(2, 14))):
        start = known[int(rng.integers(len(known)))]
        known.append(
            start[: int(rng.integers(1, len(start) + 1))] + rng.integers(0, 3, int(rng.integers(1, 8))).tolist()
        )
    known.append(known[-1])
    assert_holds(row(*[(tokens[:1], tokens[1:]) for tokens in known], divisible_by=6), divisible_by=6)


def info(prompt_id: str, prompt: int, length: int, place: int = 0) -> RolloutInfo:
    return RolloutInfo(f"0/{prompt_id}/0", prompt_id, 0, 1, prompt, length, "stop", None, place=place)


def test_units_by_hand():
    given = [info("a", 10, 2), info("b", 10, 9), info("a", 10, 3), info("a", 10, 4), info("a", 7, 1, place=1)]
    # All tokens: 10 + 9, 10 + 19 and 8: at most 28 a rank on two.
    assert prompt_units(given, row_tokens=100, dp_size=2, least_shared=1) == [
        Unit((0, 2, 3), 19),
        Unit((1,), 19),
        Unit((4,), 8),
    ]
    # Rows of 15 tokens hold the prompt with 5 more, or one rollout.
    assert prompt_units(given[::2], row_tokens=15, dp_size=1, least_shared=1) == [Unit((0, 1), 15), Unit((2,), 8)]
    # A prompt that is too short to share counts in every rollout.
    assert prompt_units(given[:4], row_tokens=30, dp_size=1, least_shared=11) == [
        Unit((0, 2), 25),
        Unit((3,), 14),
        Unit((1,), 19),
    ]


def test_a_sequence_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="sequence 1 has 19 tokens, more than a packed row holds \\(15\\)"):
        prompt_units([info("a", 10, 2), info("b", 10, 9)], row_tokens=15, dp_size=1, least_shared=1)


def agents(rng: np.random.Generator) -> list[list[RolloutInfo]]:
    """The sequences of some rollouts of one prompt, each of which goes on from somewhere in another one of its own."""
    found = []
    for index in range(int(rng.integers(1, 4))):
        known = [rng.integers(0, 3, int(rng.integers(2, 60))).tolist()]
        for _ in range(int(rng.integers(0, 6))):
            start = known[int(rng.integers(len(known)))]
            known.append(start[: int(rng.integers(1, len(start) + 1))] + rng.integers(0, 3, 30).tolist())
        rollouts = []
        for tokens in known[::-1]:
            stop = int(rng.integers(1, len(tokens)))
            request = RolloutRequest("p", index, 0, 0, tuple(tokens[:stop]), SAMPLING)
            own = np.array(tokens[stop:], dtype=np.int32)
            rollouts.append(Rollout(request, 0, own, np.zeros(len(own), dtype=np.float32), "stop"))
        infos = summaries(rollouts)
        found.append([replace(one, payload=rollouts[place], place=place) for place, one in enumerate(infos)])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_units_of_agents_have_the_tokens_of_their_trees(seed: int):
    """With every token shared, a unit has one for each beginning; else it has room for its tree."""
    rng = np.random.default_rng(seed)
    made = [sequence for rollout in agents(rng) for sequence in rollout]
    row_tokens = int(rng.integers(100, 400))
    for least in (1, prefixes.MIN_SAVED_TOKENS):
        units = prompt_units(made, row_tokens=row_tokens, dp_size=1, least_shared=least)
        assert sorted(index for unit in units for index in unit.indices) == list(range(len(made)))
        for unit in units:
            assert unit.num_tokens <= row_tokens
            rollouts = [made[index].pulled for index in unit.indices]
            if least == 1:
                whole = [(*rollout.request.token_ids, *rollout.token_ids.tolist()) for rollout in rollouts]
                assert unit.num_tokens == len({tokens[:stop] for tokens in whole for stop in range(1, len(tokens) + 1)})
            else:
                given = row(*[(list(rollout.request.token_ids), rollout.token_ids.tolist()) for rollout in rollouts])
                tree = prefix_tree(given, divisible_by=1)
                assert unit.num_tokens >= (sum(given.lengths) if tree is None else len(tree.positions_U))
