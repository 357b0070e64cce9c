"""Payload by reference: rollouts stay where they were sampled, and move straight to the rank that trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from mrl.types import Rollout, RolloutInfo


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
