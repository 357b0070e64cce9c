"""Payload by reference: rollouts stay where they were sampled, and move straight to the rank that trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from ray.exceptions import RayError

from mrl.data.batch import ExampleBatch
from mrl.types import Batch, Rollout, RolloutInfo, RolloutRequest, TrainSequence


@dataclass(frozen=True)
class PayloadRef:
    """One rollout inside the list of rollouts that an engine returned together."""

    reference: ray.ObjectRef
    index: int


def pull(infos: Sequence[RolloutInfo], *, timeout_s: float) -> list[Rollout]:
    """The payloads of `infos`, in order, pulled from where they were sampled.

    Raises:
        RuntimeError: a payload is lost or did not arrive within `timeout_s`.
    """
    references = list(dict.fromkeys(info.payload.reference for info in infos if isinstance(info.payload, PayloadRef)))
    try:
        fetched = dict(zip(references, ray.get(references, timeout=timeout_s), strict=True))
    except RayError as error:
        raise RuntimeError(f"payload of {len(infos)} rollouts could not be pulled within {timeout_s:g} s: {error}") from error
    rollouts: list[Rollout] = []
    for info in infos:
        assert isinstance(info.payload, PayloadRef)
        rollout: Rollout = fetched[info.payload.reference][info.payload.index]
        assert rollout.request.request_id == info.request_id, "payload reference points at another rollout"
        rollouts.append(rollout)
    return rollouts


def put_batch(examples: ExampleBatch) -> Batch:
    """The batch with its payloads in the object store, one object for each data-parallel rank, as long as the batch lives."""
    infos: dict[int, RolloutInfo] = {}
    for rows in examples.rows:
        mine = sorted(index for row in rows for index in row)
        reference = ray.put([examples.rollouts[index] for index in mine])
        infos |= {index: _info(examples.rollouts[index], PayloadRef(reference, place)) for place, index in enumerate(mine)}
    learned = [sum(turn.stop - turn.start for turn in rollout.turns) for rollout in examples.rollouts]
    return Batch(
        sequences=tuple(TrainSequence(infos[index], advantage=0.0, is_valid=True) for index in range(len(infos))),
        rows=examples.rows,
        logprob_rows=examples.logprob_rows,
        num_valid_tokens=sum(learned),
        num_valid_sequences=len(learned),
        metrics=examples.metrics,
    )


def _info(rollout: Rollout, payload: PayloadRef) -> RolloutInfo:
    request = rollout.request
    return RolloutInfo(
        request.request_id,
        request.prompt_id,
        request.rollout_index,
        rollout.weight_version,
        prompt_length=len(request.token_ids),
        length=len(rollout.token_ids),
        finish_reason=rollout.finish_reason,
        payload=payload,
    )


def with_transcripts(requests: Sequence[RolloutRequest], *, timeout_s: float) -> list[RolloutRequest]:
    """The requests with the transcripts that they refer to.

    Raises:
        RuntimeError: one is lost or did not arrive within `timeout_s`.
    """
    references = list(dict.fromkeys(request.earlier.reference for request in requests if isinstance(request.earlier, PayloadRef)))
    if not references:
        return list(requests)
    try:
        fetched = dict(zip(references, ray.get(references, timeout=timeout_s), strict=True))
    except RayError as error:
        raise RuntimeError(f"transcripts of {len(requests)} requests could not be pulled within {timeout_s:g} s: {error}") from error
    return [
        replace(request, earlier=fetched[request.earlier.reference][request.earlier.index])
        if isinstance(request.earlier, PayloadRef)
        else request
        for request in requests
    ]
