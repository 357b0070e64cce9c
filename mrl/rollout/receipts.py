# SPDX-License-Identifier: Apache-2.0
"""Receipts of answers to agents without a session: finds a sample by its tokens. Needs neither vLLM nor HTTP.

NeMo Gym's `/run` cannot pass a session on. Its servers ask the gateway, and the rollout that comes back says prompt and
answer of every turn in token ids. Those with a receipt were sampled here; all else is not trained.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from mrl.rollout.agent_session import MESSAGE_IDS, AgentSession
from mrl.rollout.turn_tree import SampledAnswer, TreeNode
from mrl.types import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Receipt:
    """One answer of an engine."""

    answer: SampledAnswer
    sampling: SamplingParams
    """Sampling parameters that it was drawn with."""
    engine: int
    altered: Counter[str]
    """See `AgentSession`; of its request."""
    given_at: float = field(default_factory=time.monotonic)


@dataclass
class Receipts:
    """Unclaimed answers, kept while a rollout that may claim them is running."""

    max_age_s: float = math.inf
    """Seconds that a rollout may take, and no receipt that it claims is older."""
    _kept: dict[bytes, list[Receipt]] = field(default_factory=dict)
    _under_way: Counter[SamplingParams] = field(default_factory=Counter)
    _looked_at: float = field(default_factory=time.monotonic, compare=False)

    @contextmanager
    def rollout(self, sampling: SamplingParams) -> Iterator[None]:
        """A rollout that may claim receipts."""
        self._under_way[sampling] += 1
        try:
            yield
        finally:
            self._under_way[sampling] -= 1
            self._under_way += Counter()  # without those that are at 0
            self._drop_unclaimed()

    def _drop_unclaimed(self) -> None:
        now = time.monotonic()
        if self._under_way and now - self._looked_at < self.max_age_s / 4:
            return
        self._looked_at, oldest = now, now - self.max_age_s if self._under_way else math.inf
        before = sum(map(len, self._kept.values()))
        kept = {digest: [one for one in receipts if one.given_at > oldest] for digest, receipts in self._kept.items()}
        self._kept = {digest: receipts for digest, receipts in kept.items() if receipts}
        if num_left := before - sum(map(len, self._kept.values())):
            logger.info("Answers to NeMo Gym's servers that came back in no rollout, and are not trained: %d", num_left)

    def sampling_of(self, body: Mapping[str, object]) -> SamplingParams | None:
        """A request's sampling parameters: those of a rollout under way, if they differ those it names. None: none."""
        named = [
            one
            for one in self._under_way
            if (one.temperature, one.top_p) == (body.get("temperature"), body.get("top_p"))
        ]
        return next(iter((*named, *self._under_way)), None)

    def keep(self, node: TreeNode, session: AgentSession) -> None:
        """Leaves a receipt of the answer to a request, for which `session` was made."""
        assert node.answer is not None
        ids = node.token_ids
        digest = _digest(ids[: len(ids) - len(node.answer.token_ids)], node.answer.token_ids)
        receipt = Receipt(node.answer, session.sampling, session.engines[-1], session.altered)
        self._kept.setdefault(digest, []).append(receipt)

    def find_prefix(self, messages: object) -> tuple[list[int], int, int] | None:
        """The tokens up to the last answer of a conversation sampled here, its number of messages, and its engine."""
        entries = messages if isinstance(messages, list) else []
        for index in range(len(entries) - 2, -1, -1):
            if (ids := _ids_of(entries[index])) is not None and (found := self._kept.get(_digest(*ids))):
                return [*ids[0].tolist(), *ids[1].tolist()], index + 1, found[-1].engine
        return None

    def claim(self, outputs: Sequence[object], session: AgentSession) -> int:
        """Adds the turns sampled for a rollout to the session's tree; the number of tokens that have no receipt.

        Each receipt is good for one turn.
        """
        num_unknown = 0
        for item in outputs:
            if (ids := _ids_of(item)) is None:
                continue
            digest = _digest(*ids)
            kept = self._kept.get(digest, [])
            receipt = next((one for one in kept if one.sampling == session.sampling), None)
            if receipt is None:
                num_unknown += len(ids[1])
                continue
            kept.remove(receipt)
            if not kept:
                del self._kept[digest]
            session.tree.add(ids[0].tolist(), receipt.answer)
            session.altered += receipt.altered
            if receipt.engine not in session.engines:
                session.engines.append(receipt.engine)
        return num_unknown


def _ids_of(item: object) -> tuple[np.ndarray, np.ndarray] | None:
    """The token ids of prompt and answer that a message or an output item carries; None if it has none."""
    if not isinstance(item, Mapping):
        return None
    try:
        prompt, answer = (np.asarray(cast("list[int]", item.get(name) or ()), dtype=np.int32) for name in MESSAGE_IDS)
    except (TypeError, ValueError, OverflowError):
        return None
    return (prompt, answer) if prompt.ndim == answer.ndim == 1 and len(answer) else None


def _digest(prompt_ids: np.ndarray, answer_ids: np.ndarray) -> bytes:
    digest = hashlib.blake2b(len(prompt_ids).to_bytes(8, "little"), digest_size=20)
    for ids in (prompt_ids, answer_ids):
        digest.update(ids.astype(np.int32, copy=False).tobytes())
    return digest.digest()
