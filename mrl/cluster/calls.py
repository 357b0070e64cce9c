# SPDX-License-Identifier: Apache-2.0
"""Typed calls to Ray actors. Every wait has a deadline, fails on the first failure, and names what it waited for."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, cast

import ray
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from conversion.files.limits import LimitedThread
from mrl import spans
from mrl.cluster import hangs
from mrl.cluster.errors import ActorLost, ActorName, Aftermath, DeadlineExceeded, NoCluster, way_out
from mrl.cluster.members import dead_head, lost_nodes
from mrl.config.texts import rounded
from mrl.refit import GivenUp
from mrl.shortage import is_shortage

if TYPE_CHECKING:
    from ray.actor import ActorHandle

A = TypeVar("A")
V = TypeVar("V")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Key = TypeVar("Key")

LOSSES = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)
"""Ray's errors for the death of a process."""
# Reducing what a node holds is the way out, not Ray's threshold: beyond it the kernel kills, and not always the right
# process.
SHORT_OF_MEMORY = (
    "Ray's memory monitor killed it, as its node is short of memory (fewer slots or engines a node, "
    "or more memory, help)"
)
# A reference that ray.wait calls ready is fetched from local memory; this only bounds a broken store.
FETCH_TIMEOUT_S = 60.0
# Answers that arrive within so long of each other are taken together: each wait looks at every call that is under way.
GATHER_S = 0.005
# Peers of a dead rank may report a broken connection seconds before Ray reports the death.
BLAME_WINDOW_S = 10.0


def dead_daemons() -> str:
    """Dead daemons of Ray, among those that this process started and the head's, for a message; "" if none is dead."""
    node = ray._private.worker._global_node  # pyright: ignore[reportAttributeAccessIssue]  no public call says it
    found = node.dead_processes() if node is not None else []
    dead = [
        f"{kind} (process {process.pid}, exit code {process.returncode})"
        for kind, process in found
        if kind in hangs.RAY_PROCESSES
    ]
    return f"Ray's {' and '.join(dead)} died" if dead else dead_head()


@cache
def ray_thread() -> LimitedThread:
    """The thread of calls to Ray without limit. It starts Ray, too: the kernel kills Ray's daemons when it ends."""
    return LimitedThread("Ray")


def put(value: T) -> ray.ObjectRef[T]:
    """A reference to `value` in Ray's store; DeadlineExceeded: the store takes nothing."""
    try:
        with hangs.waiting("ray.put", lambda: hangs.RAY_PROCESSES, time.monotonic()):
            return ray_thread().within(FETCH_TIMEOUT_S, "ray.put", ray.put, value)
    except TimeoutError as error:
        reason = hangs.explained([]) or "Ray's daemon on the driver's node (raylet) hangs, or its host does"
        raise DeadlineExceeded(f"{error}: {reason}") from error


def start_actor(actor_class: Callable[[*Ts], A], options: Mapping[str, object], *arguments: *Ts) -> ActorHandle[A]:
    """Starts an actor with these Ray options; does not wait for it.

    Calls in one of its `concurrency_groups` have threads of their own, so many; all others run one after another.
    """
    options = dict(options)
    groups = options.pop("concurrency_groups", None)
    # Ray declares no type for a decorator with arguments.
    decorate = ray.remote if groups is None else cast(Any, ray.remote)(concurrency_groups=groups)
    remote = decorate(cast("type[A]", actor_class))
    return cast("ActorHandle[A]", remote.options(**options).remote(*arguments))


def ask(actor: ActorHandle[A], method: Callable[[A, *Ts], T], *arguments: *Ts) -> ray.ObjectRef[T]:
    """Calls `method` of an actor; does not wait for the answer."""
    return getattr(actor, method.__name__).remote(*arguments)


class Actors(Generic[V]):
    """Actors of one kind, by index. `call(V.verb, ...)` calls a verb on the object in each; its arguments are typed.

    An actor class has `call(*target, verb, *arguments)` and `apply(*target, function, *arguments)` for it.
    """

    def __init__(self, kind: str, *, deadline_s: float, target: tuple[str, ...] = (), first: int = 0) -> None:
        """`target` names the object inside each actor, if it has several; `first` is the number of the first actor."""
        self.kind = kind
        self.first = first
        self.target = target
        self.deadline_s = deadline_s
        """Default for calls that name no deadline."""
        self.handles: list = []

    def name(self, index: int) -> ActorName:
        return ActorName(self.kind, self.first + index)

    def call(
        self,
        verb: Callable[[V, *Ts], T],
        *arguments: *Ts,
        deadline_s: float | None = None,
        only: Sequence[int] | None = None,
    ) -> dict[int, T]:
        """Calls `verb` on every actor, or on those of `only`, and waits for all of them; answers by index."""
        return self.call_each(
            verb, dict.fromkeys(range(len(self.handles)) if only is None else only, arguments), deadline_s=deadline_s
        )

    def call_each(
        self, verb: Callable[[V, *Ts], T], arguments: Mapping[int, tuple[*Ts]], *, deadline_s: float | None = None
    ) -> dict[int, T]:
        """Calls `verb` with different arguments for each actor, and waits for all of them; answers by index."""
        return self.wait(self.start(verb, arguments), deadline_s=deadline_s, what=verb.__name__)

    def start(
        self, verb: Callable[[V, *Ts], T], arguments: Mapping[int, tuple[*Ts]]
    ) -> dict[ActorName, ray.ObjectRef[T]]:
        """Calls `verb` with different arguments for each actor; does not wait."""
        return {
            self.name(index): self.handles[index].call.remote(*self.target, verb.__name__, *mine)
            for index, mine in arguments.items()
        }

    def wait(
        self, pending: Mapping[ActorName, ray.ObjectRef[T]], *, deadline_s: float | None, what: str
    ) -> dict[int, T]:
        """Waits for calls to some of these actors; answers by index."""
        answers = wait_all(pending, deadline_s=self.deadline_s if deadline_s is None else deadline_s, what=what)
        return {name.index - self.first: answer for name, answer in answers.items()}

    def apply(
        self,
        function: Callable[..., T],
        *arguments: object,
        deadline_s: float | None = None,
        only: Sequence[int] | None = None,
    ) -> list[T]:
        """`function(object, *arguments)` in every actor's process, or in those of `only`; answers by index."""
        asked = range(len(self.handles)) if only is None else only
        pending = {
            self.name(index): self.handles[index].apply.remote(*self.target, function, *arguments) for index in asked
        }
        return list(self.wait(pending, deadline_s=deadline_s, what="apply").values())


def wait_all(
    pending: Mapping[Key, ray.ObjectRef[T]],
    *,
    deadline_s: float,
    what: str,
    ignores_deaths: bool = False,
    on_failure: Callable[[], None] | None = None,
) -> dict[Key, T]:
    """Waits for all calls; answers by key.

    With `ignores_deaths`, an actor that died gives no answer. `on_failure` is called before an error's cause is looked
    for.

    Raises:
        ActorLost, DeadlineExceeded: as soon as it happens.
        ValueError, RuntimeError: an actor's own error, with its key in front.
    """
    keys = {reference: key for key, reference in pending.items()}
    answers: dict[Key, T] = {}
    start = time.monotonic()
    end = start + deadline_s
    with hangs.waiting(what, lambda: [str(key) for key in list(keys.values())], start):
        while keys:
            ready, _ = ray.wait(list(keys), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                missing = [str(key) for key in keys.values()]
                limit = f"{rounded(deadline_s)} s (the limits are set in section `deadlines`)"
                told = f"; {reason}" if (reason := hangs.explained(missing)) else ""
                text = f"{what}: no answer from {', '.join(missing)} within {limit}{told}"
                raise DeadlineExceeded(text, keys.values())
            ready, _ = ray.wait(list(keys), num_returns=len(keys), timeout=GATHER_S)
            for reference in ready:
                key = keys.pop(reference)
                try:
                    answers[key] = fetch(reference, actor=key, what=what)
                except (RuntimeError, ValueError) as error:
                    if ignores_deaths and isinstance(error, ActorLost):
                        continue
                    if on_failure is not None:
                        on_failure()
                    cause = first_cause(keys, error, what=what)
                    if cause is error:
                        raise
                    raise cause from error
    spans.add(f"wait: {what}", start, calls=len(pending))
    return {key: answers[key] for key in pending if key in answers}


def first_cause(pending: Mapping[ray.ObjectRef, object], error: Exception, *, what: str) -> Exception:
    """The error to report for `error`: a death among `pending` actors, whose peers only lost connection, else `error`.

    In place of an aftermath, the first of another kind, if one comes; in place of a complaint about a peer, the peer's
    own lack of memory, or a DeadlineExceeded with its name if it gives no answer at all.
    """
    if isinstance(error, ActorLost | NoCluster):
        return error
    waiting = dict(pending)
    end = time.monotonic() + BLAME_WINDOW_S
    while waiting and time.monotonic() < end:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
        for reference in ready:
            try:
                fetch(reference, actor=waiting.pop(reference), what=what)
            except (ActorLost, NoCluster) as lost:
                return lost
            except (RuntimeError, ValueError) as other:
                if isinstance(error, Aftermath) or (is_shortage(other) and not is_shortage(error)):
                    error = other
    if lost := lost_nodes():
        return NoCluster(f"{lost}; {error}")
    message = hangs.who_is_to_blame(error, [str(name) for name in waiting.values()], what=what)
    return error if message is None else DeadlineExceeded(message, waiting.values())


def fetch(reference: ray.ObjectRef[T], *, actor: object, what: str) -> T:
    """The answer of a ready call. Raises ActorLost if the actor died, else its error with its name and `what` in front.

    NoCluster: a daemon of Ray has died, or another node, and actors with it.
    """
    with translated(actor, what):
        return ray.get(reference, timeout=FETCH_TIMEOUT_S)


async def answered(reference: ray.ObjectRef[T], *, actor: object, what: str) -> T:
    """The answer to a call of an actor, as `fetch` gives it, in an event loop. Waits as long as it takes."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def take(found: Future[T]) -> None:
        if answer.done():  # nobody waits any more
            return
        try:
            answer.set_result(found.result(timeout=0))
        except Exception as error:
            answer.set_exception(error)

    def tell(found: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed: what Ray still has to say after the run
            loop.call_soon_threadsafe(take, found)

    reference.future().add_done_callback(tell)
    with translated(actor, what):
        return await answer


@contextmanager
def translated(actor: object, what: str) -> Iterator[None]:
    """Raises Ray's errors in the `with` block as the driver's own; see `fetch`."""
    try:
        yield
    except LOSSES as error:
        if dead := dead_daemons():
            raise NoCluster(f"{dead}, and all actors with it; {actor} gave no answer to {what}") from error
        if lost := lost_nodes():
            raise NoCluster(f"{lost}, and all actors there with it; {actor} gave no answer to {what}") from error
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if (limit := resource.getrlimit(resource.RLIMIT_CPU)[0]) != resource.RLIM_INFINITY:
            reason += f" The system ends each process that has computed for {limit} s (ulimit -t)."
        raise ActorLost(
            actor, what, f"{SHORT_OF_MEMORY}: {reason}" if isinstance(error, OutOfMemoryError) else reason
        ) from error
    except GetTimeoutError as error:
        raise DeadlineExceeded(
            f"{what}: the answer of {actor} could not be fetched within {FETCH_TIMEOUT_S:g} s"
        ) from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        kind = (
            ValueError if isinstance(cause, ValueError) else Aftermath if isinstance(cause, GivenUp) else RuntimeError
        )
        raise kind(f"{actor} failed in {what}: {cause}{way_out(cause)}") from error
    except RayError as error:
        raise RuntimeError(
            f"the answer of {actor} to {what} is lost: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
