"""Waiting for actors: every wait has a deadline, fails on the first failure, and names what it waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError

from mrl.cluster.advice import way_out

Key = TypeVar("Key")

# A reference that ray.wait calls ready is fetched from local memory; this only bounds a broken store.
FETCH_TIMEOUT_S = 60.0
# Peers of a dead rank may report a broken connection seconds before Ray reports the death.
BLAME_WINDOW_S = 10.0


class DeadlineExceeded(RuntimeError):
    """A wait ran past its deadline; the message names what was awaited and who did not answer."""


class ActorLost(RuntimeError):
    """An actor process died. `key` is the caller's name for it."""

    def __init__(self, key: object, what: str, reason: str) -> None:
        super().__init__(f"{key} died during {what}: {reason}")
        self.key = key


class Background(Protocol):
    """What goes on while the driver waits for something else."""

    def references(self) -> list[ray.ObjectRef]:
        """What it waits for itself."""
        ...

    def advance(self) -> None:
        """Takes what has arrived and starts what comes next. Never waits, and keeps the loss of an actor for later."""
        ...


def wait_all(
    pending: Mapping[Key, ray.ObjectRef],
    *,
    deadline_s: float,
    what: str,
    beside: Background | None = None,
    lost: list[ActorLost] | None = None,
) -> dict[Key, object]:
    """Results by key. Raises soon after one fails: `ActorLost`, `DeadlineExceeded`, or the actor's own error with its key in front.

    `beside` goes on meanwhile. With `lost` an actor that died has no result: its `ActorLost` goes there, and the wait goes on.
    """
    keys = {reference: key for key, reference in pending.items()}
    results: dict[Key, object] = {}
    end = time.monotonic() + deadline_s
    while keys:
        others = [] if beside is None else beside.references()
        ready, _ = ray.wait([*keys, *others], num_returns=1, timeout=max(0.0, end - time.monotonic()))
        if beside is not None and ready and ready[0] not in keys and time.monotonic() < end:
            beside.advance()
            continue
        if not ready or ready[0] not in keys:
            missing = ", ".join(str(key) for key in keys.values())
            raise DeadlineExceeded(f"{what}: no answer from {missing} within {deadline_s:g} s (the limits are set in section `deadlines`)")
        key = keys.pop(ready[0])
        try:
            results[key] = fetch(ready[0], key=key, what=what)
        except (RuntimeError, ValueError) as error:
            if lost is not None and isinstance(error, ActorLost):
                lost.append(error)
                continue
            cause = first_cause(keys, error, what=what)
            if cause is error:
                raise
            raise cause from error
    return {key: results[key] for key in pending if key in results}


def first_cause(pending: Mapping[ray.ObjectRef, object], error: Exception, *, what: str) -> Exception:
    """What to blame for `error`: an actor that died meanwhile, whose peers only lost their connection to it; otherwise `error` itself."""
    if isinstance(error, ActorLost):
        return error
    waiting = dict(pending)
    end = time.monotonic() + BLAME_WINDOW_S
    while waiting and time.monotonic() < end:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
        for reference in ready:
            try:
                fetch(reference, key=waiting.pop(reference), what=what)
            except ActorLost as lost:
                return lost
            except (RuntimeError, ValueError):
                continue
    return error


def fetch(reference: ray.ObjectRef, *, key: object, what: str) -> object:
    """The value of a reference that is ready. Raises `ActorLost`, or the actor's own error with `key` and `what` in front."""
    try:
        return ray.get(reference, timeout=FETCH_TIMEOUT_S)
    except (ActorDiedError, ActorUnavailableError, RayActorError, WorkerCrashedError) as error:
        raise ActorLost(key, what, first_line(error)) from error
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"{what}: the answer of {key} could not be fetched within {FETCH_TIMEOUT_S:g} s") from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        kind = ValueError if isinstance(cause, ValueError) else RuntimeError
        raise kind(f"{key} failed in {what}: {cause}{way_out(cause)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, for messages that must stay on one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
