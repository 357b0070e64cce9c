# SPDX-License-Identifier: Apache-2.0
"""Payload by reference: rollouts stay where they were sampled, and move straight to the rank that trains on them."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np
import ray
from ray.exceptions import RayError

from mrl.cluster.calls import put
from mrl.config.texts import rounded
from mrl.types import Batch, PayloadRef, Rollout, RolloutInfo, RolloutRequest, TeacherTokens, TrainSequence

T = TypeVar("T")

LOOK_S, PULL_S = 0.25, 60.0


@dataclass(frozen=True)
class Packed:
    """Items as bytes; a receiver restores only those it needs, while Ray would restore all arrays."""

    content: np.ndarray
    """uint8, item after item. An array, so that receivers on a node read one copy of it in Ray's store."""
    ends: np.ndarray
    """int64, of each item."""

    def item(self, index: int) -> object:
        """Restores the item at this index."""
        start = self.ends[index - 1] if index else 0
        return pickle.loads(self.content.data[start : self.ends[index]])


def pack(items: Iterable[Rollout | TeacherTokens | np.ndarray]) -> Packed:
    """The items as one object of Ray's store."""
    parts = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]
    return Packed(
        np.frombuffer(b"".join(parts), dtype=np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)
    )


def pull(infos: Sequence[RolloutInfo], *, timeout_s: float) -> list[Rollout]:
    """The payloads of `infos`, in order, pulled from where they were sampled. RuntimeError: one is lost or late."""
    payloads = [info.payload for info in infos if isinstance(info.payload, PayloadRef)]
    assert len(payloads) == len(infos)
    fetched = _fetch(payloads, Rollout, f"payload of {len(infos)} rollouts", timeout_s=timeout_s)
    rollouts = [fetched[payload] for payload in payloads]
    assert [rollout.request.request_id for rollout in rollouts] == [info.request_id for info in infos], (
        "payload of another rollout"
    )
    return rollouts


def pull_unless(is_over: threading.Event, infos: Sequence[RolloutInfo]) -> list[Rollout]:
    """Calls `pull` in a thread that leaves Ray alone once `is_over`; RuntimeError then."""
    payloads = [info.payload for info in infos if isinstance(info.payload, PayloadRef)]
    missing = list(dict.fromkeys(cast(ray.ObjectRef, payload.reference) for payload in payloads))
    end = time.monotonic() + PULL_S
    while missing and time.monotonic() < end and not is_over.is_set():
        missing = ray.wait(missing, num_returns=len(missing), timeout=LOOK_S)[1]
    if is_over.is_set():
        raise RuntimeError("the attempt is over")
    return pull(infos, timeout_s=LOOK_S)


def put_items(items: Sequence[Rollout | TeacherTokens]) -> list[PayloadRef]:
    """Stores items as one Ray object; returns references to them."""
    reference = put(pack(items)) if items else None
    return [PayloadRef(reference, index) for index in range(len(items))] if reference is not None else []


def pull_teacher(sequences: Sequence[TrainSequence], *, timeout_s: float) -> list[TeacherTokens | None]:
    """Pulls each sequence's teacher outputs from where they were computed; None without a teacher. Else as `pull`."""
    payloads = [sequence.teacher for sequence in sequences if isinstance(sequence.teacher, PayloadRef)]
    fetched = _fetch(payloads, TeacherTokens, f"teacher outputs of {len(payloads)} rollouts", timeout_s=timeout_s)
    return [fetched[sequence.teacher] if isinstance(sequence.teacher, PayloadRef) else None for sequence in sequences]


def with_transcripts(requests: Sequence[RolloutRequest], *, timeout_s: float) -> list[RolloutRequest]:
    """The requests with the earlier turns that they refer to. RuntimeError: one is lost or late."""
    earlier = [request.earlier for request in requests if isinstance(request.earlier, PayloadRef)]
    fetched = _fetch(earlier, Rollout, f"transcripts of {len(requests)} requests", timeout_s=timeout_s)
    return [
        replace(request, earlier=fetched[request.earlier]) if isinstance(request.earlier, PayloadRef) else request
        for request in requests
    ]


def put_arrays(batches: Sequence[Mapping[int, np.ndarray]]) -> list[dict[int, PayloadRef]]:
    """Stores the arrays of all batches as one Ray object; returns references to them in their places."""
    flat = [array for arrays in batches for array in arrays.values()]
    if not flat:
        return [{} for _ in batches]
    reference, places = ray.put(pack(flat)), iter(range(len(flat)))
    return [{index: PayloadRef(reference, next(places)) for index in arrays} for arrays in batches]


def pull_arrays(batches: Sequence[Mapping[int, PayloadRef]], *, timeout_s: float) -> list[dict[int, np.ndarray]]:
    """The arrays that `put_arrays` has stored. RuntimeError: one is lost or late."""
    wanted = [payload for payloads in batches for payload in payloads.values()]
    fetched = _fetch(wanted, np.ndarray, f"tokens of {len(wanted)} sequences", timeout_s=timeout_s)
    return [{index: fetched[payload] for index, payload in payloads.items()} for payloads in batches]


def put_batch(batch: Batch) -> Batch:
    """Stores a batch's payloads as a Ray object per data-parallel rank, while the batch lives; returns the batch."""
    sequences = list(batch.sequences)
    for rows in batch.rows:
        mine = sorted(index for row in rows for index in row)
        for index, payload in zip(mine, put_items([sequences[index].rollout.pulled for index in mine]), strict=True):
            info = replace(sequences[index].rollout, payload=payload)
            sequences[index] = replace(sequences[index], rollout=info)
    return replace(batch, sequences=tuple(sequences))


def _fetch(payloads: Sequence[PayloadRef], kind: type[T], what: str, *, timeout_s: float) -> dict[PayloadRef, T]:
    references = list(dict.fromkeys(cast(ray.ObjectRef, payload.reference) for payload in payloads))
    try:
        packed = dict(zip(references, ray.get(references, timeout=timeout_s) if references else [], strict=True))
    except RayError as error:
        raise RuntimeError(f"{what} could not be pulled within {rounded(timeout_s)} s: {error}") from error
    items = {one: packed[cast(ray.ObjectRef, one.reference)].item(one.index) for one in payloads}
    assert all(isinstance(item, kind) for item in items.values())
    return items
