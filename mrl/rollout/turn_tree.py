# SPDX-License-Identifier: Apache-2.0
"""Tree of an agent's turns by token prefix, and the training sequences in it. Needs neither vLLM nor HTTP.

A turn goes on from another one if its prompt begins with all tokens of that one, prompt and answer: the next turn of a
conversation does. Retries are branches with one prompt; sub-agents, compacted and rewritten conversations are trees of
their own. Tokens are kept once, as what each turn adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.types import FinishReason, Rollout, RolloutRequest, Turn, UntrainedTurn

NO_ROUTES = "no_routes"
"""Reason not to train a turn: nobody says which experts the tokens before it went through."""
FORCED = "forced"
"""Reason not to train an answer: a schema or grammar chose among its tokens, and their logprobs are not those of the
model alone.
"""
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of an engine, token by token."""

    token_ids: np.ndarray
    """int32 [L], the stop token included; at least one."""
    logprobs: np.ndarray
    """float32 [L], of each token under the distribution that it was drawn from."""
    finish_reason: FinishReason
    weight_version: int
    """Version of the engine when the request came: no token is older."""
    num_weight_versions: int = 1
    """Number of versions of the engine until the answer was complete."""
    untrained: str = ""
    """Reason not to train on it, in a word; empty if there is none."""
    routes: np.ndarray | None = None
    """Routes as in `mrl.types.Rollout`, of prompt and answer from token `routes_start` on; None where none are kept."""
    routes_start: int = 0


@dataclass(eq=False)
class TreeNode:
    """A turn in the tree; the root has no answer."""

    parent: TreeNode | None
    given: np.ndarray
    """int32, tokens of the prompt behind those of the parent."""
    answer: SampledAnswer | None
    length: int
    """Tokens from the beginning to the end of the answer."""
    untrained: str = ""
    """Reason not to train on it: the answer's, or that of the turn's place in the tree."""
    children: list[TreeNode] = field(default_factory=list)

    @property
    def first_route(self) -> int:
        """The first token that went through the model for this turn, not its parent; the last of an answer does not."""
        return 0 if self.parent is None else max(0, self.parent.length - 1)

    @property
    def path(self) -> list[TreeNode]:
        """The turns from the first one to this one."""
        found, node = list[TreeNode](), self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens from the beginning to the end of the answer."""
        parts = [part for node in self.path for part in (node.given, _answer(node).token_ids)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


class TurnTree:
    """The turns of one session."""

    def __init__(self) -> None:
        self._root = TreeNode(None, np.zeros(0, dtype=np.int32), None, 0)
        self.nodes: list[TreeNode] = []
        """In the order of `add`."""

    def add(self, prompt_ids: Sequence[int], answer: SampledAnswer) -> TreeNode:
        """Puts a turn behind the longest one whose tokens its prompt begins with; of equal ones, the latest."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        parent = self._find(ids)
        node = TreeNode(parent, ids[parent.length :].copy(), answer, len(ids) + len(answer.token_ids))
        has_gap = answer.routes is not None and (
            answer.routes_start > node.first_route or parent.untrained == NO_ROUTES
        )
        node.untrained = NO_ROUTES if has_gap else answer.untrained
        parent.children.append(node)
        self.nodes.append(node)
        return node

    def sequences(self, request: RolloutRequest) -> list[Rollout]:
        """Sequences to train on, one for each path to a leaf with turns left to train, so that each turn is in one.

        The one with the latest of these turns comes first: its last answer is the rollout's. What branches share, the
        later one trains. Each answers `request` with another prompt: all before its first trained turn, turns that
        another sequence trains included. It ends with a trained turn.
        """
        taken, places = set[TreeNode](), {node: place for place, node in enumerate(self.nodes)}
        # A path ends before a turn that must not be trained.
        ends = {
            own[-1]
            for node in self.nodes
            if not node.children and (own := [one for one in node.path if not one.untrained])
        }
        found = [_sequence(end.path, taken, request) for end in sorted(ends, key=places.__getitem__, reverse=True)]
        return [sequence for sequence in found if sequence is not None]

    def num_untrained(self) -> dict[str, int]:
        """Sampled tokens that are not trained on, by reason."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            if node.untrained:
                counts[node.untrained] = counts.get(node.untrained, 0) + len(_answer(node).token_ids)
        return counts

    def _find(self, ids: np.ndarray) -> TreeNode:
        best, waiting = self._root, [self._root]
        while waiting:
            for child in _continued(waiting.pop(), ids):
                waiting.append(child)
                # Children are in order of arrival.
                if child.length >= best.length:
                    best = child
        return best


def _continued(node: TreeNode, ids: np.ndarray) -> Iterator[TreeNode]:
    for child in node.children:
        answered_ids = _answer(child).token_ids
        middle = node.length + len(child.given)
        is_prefix = np.array_equal(ids[node.length : middle], child.given) and np.array_equal(
            ids[middle : child.length], answered_ids
        )
        if is_prefix:
            yield child


def _answer(node: TreeNode) -> SampledAnswer:
    assert node.answer is not None, "the root is no turn"
    return node.answer


def _sequence(path: Sequence[TreeNode], taken: set[TreeNode], request: RolloutRequest) -> Rollout | None:
    """The sequence that trains the turns of `path` that are not `taken`, and takes them; None if none is left."""
    mine = [node for node in path if node not in taken and not node.untrained]
    if not mine:
        return None
    taken.update(mine)
    token_ids = mine[-1].token_ids
    first = mine[0].length - len(_answer(mine[0]).token_ids)
    logprobs, turns, versions = np.zeros(len(token_ids) - first, dtype=np.float32), list[Turn](), set[int]()
    for node in mine:
        answer = _answer(node)
        start, stop = node.length - len(answer.token_ids) - first, node.length - first
        logprobs[start:stop] = answer.logprobs
        turns.append(Turn(start, stop, answer.weight_version))
        versions.update(range(answer.weight_version, answer.weight_version + answer.num_weight_versions))
    rest = [(node, len(_answer(node).token_ids)) for node in path if node not in mine]
    others = tuple(
        UntrainedTurn(node.length - length, node.length, node.untrained or ELSEWHERE) for node, length in rest
    )
    drawn = [(answer.routes, node.first_route - answer.routes_start) for node in path for answer in [_answer(node)]]
    routes = [part[skipped:] for part, skipped in drawn if part is not None]
    return Rollout(
        replace(request, token_ids=tuple(token_ids[:first].tolist())),
        weight_version=turns[-1].weight_version,
        token_ids=token_ids[first:],
        generator_logprobs=logprobs,
        finish_reason=_answer(mine[-1]).finish_reason,
        routes=np.concatenate(routes) if routes else None,
        earlier_turns=tuple(turns[:-1]),
        last_turn_start=turns[-1].start,
        num_weight_versions=len(versions),
        untrained=others,
    )
