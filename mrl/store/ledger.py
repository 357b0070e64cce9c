# SPDX-License-Identifier: Apache-2.0
"""The ledger: the prompts that a run took, trained on and rolled back, one fsynced JSON line per event: the run's place in the data."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conversion.files.durable import read_whole, sync_descriptor
from mrl.store.ownership import unowned
from mrl.types import PromptKey

logger = logging.getLogger(__name__)


@dataclass
class LedgerState:
    """The state after all events of a ledger. (epoch, prompt id) names a prompt."""

    trained: dict[int, tuple[PromptKey, ...]] = field(default_factory=dict)
    """Step -> its prompts, for every step in the lineage of the surviving weights."""
    dropped: dict[int, tuple[PromptKey, ...]] = field(default_factory=dict)
    """Step -> prompts whose rollouts it left out."""
    taken: dict[PromptKey, int] = field(default_factory=dict)
    """Prompts taken and not consumed yet -> the step that was next then."""
    consumed: set[PromptKey] = field(default_factory=set)
    """All prompts of `trained` and `dropped`."""


class Ledger:
    """Appends events to `ledger.jsonl`; an event is on disk when the call returns, or is written with the next one if the disk is full."""

    def __init__(self, path: Path, *, check_owner: Callable[[], None] = unowned) -> None:
        """`check_owner` raises if another process owns the folder by now; see `mrl.store.ownership`."""
        self.path = path
        self._check_owner = check_owner
        self.state = replay(path)
        self._unwritten = b""

    def take(self, step: int, prompts: Sequence[PromptKey]) -> None:
        """Records that the run asks for rollouts of these prompts while `step` is the next to train."""
        self._append({"event": "taken", "step": step, "prompts": prompts})

    def train(self, step: int, trained: Sequence[PromptKey], dropped: Sequence[PromptKey] = ()) -> None:
        """Records that step `step` has consumed these prompts: it trained on some and dropped others because of their rollouts."""
        event: dict[str, object] = {"event": "trained", "step": step, "prompts": trained}
        self._append(event | ({"dropped": dropped} if dropped else {}))

    def roll_back(self, to_step: int) -> None:
        """Records that the weights of step `to_step` were loaded: later steps no longer count, and taken prompts will be asked again."""
        if self.state.taken or any(step > to_step for step in self.state.trained):
            self._append({"event": "rolled_back", "to_step": to_step})
        if sorted(self.state.trained) != list(range(1, to_step + 1)):
            raise RuntimeError(
                f"{self.path} holds {len(self.state.trained)} trained steps, the checkpoint is of step {to_step}: not one run; "
                "restore both, or start in an empty checkpointing.checkpoint_dir"
            )

    def _append(self, event: dict[str, object]) -> None:
        self._check_owner()
        apply_event(self.state, event)
        had_room = not self._unwritten
        self._unwritten += (json.dumps(event) + "\n").encode()
        try:
            self.flush()
        except OSError as error:
            if had_room:
                logger.warning(
                    "%s cannot be written: %s. The run goes on; no checkpoint is made before the ledger is whole", self.path, error
                )

    def flush(self) -> None:
        """Writes what the disk had no room for; OSError: it still has none, and the file ends with a whole event as before."""
        if not self._unwritten:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync_descriptor(descriptor, self.path)
        except OSError:
            os.truncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)
        self._unwritten = b""


def replay(path: Path) -> LedgerState:
    """The state after all events of `path`; an empty ledger if there is no file.

    Cuts off a last line without its newline: the machine died while writing it, so its event never happened. ValueError: a line is damaged.
    """
    state = LedgerState()
    if not path.exists():
        return state
    content = read_whole(path)
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        logger.warning("%s: cutting off a half-written last line", path)
        os.truncate(path, len(whole))
    for number, line in enumerate(whole.decode().splitlines(), start=1):
        try:
            apply_event(state, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: {error}; the ledger is damaged, start in an empty checkpointing.checkpoint_dir") from error
    return state


def apply_event(state: LedgerState, event: dict) -> None:
    """Applies one event. Raises ValueError if it cannot follow: a gap, a prompt taken or trained twice, or trained without being taken."""
    kind = event["event"]
    if kind == "taken":
        prompts = _keys(event["prompts"])
        if event["step"] != len(state.trained) + 1:
            raise ValueError(f"prompts taken for step {event['step']} after {len(state.trained)} trained steps")
        if twice := [key for key in prompts if key in state.taken or key in state.consumed]:
            raise ValueError(f"prompt {twice[0]} taken twice")
        state.taken |= {key: event["step"] for key in prompts}
    elif kind == "trained":
        step, trained, dropped = event["step"], _keys(event["prompts"]), _keys(event.get("dropped", ()))
        if step != len(state.trained) + 1:
            raise ValueError(f"step {step} trained after {len(state.trained)} trained steps")
        for key in (*trained, *dropped):
            if state.taken.pop(key, None) is None:
                raise ValueError(f"step {step} consumed prompt {key} without taking it")
        state.trained[step] = trained
        if dropped:
            state.dropped[step] = dropped
        state.consumed.update(trained, dropped)
    elif kind == "rolled_back":
        for steps in (state.trained, state.dropped):
            for step in [step for step in steps if step > event["to_step"]]:
                state.consumed.difference_update(steps.pop(step))
        state.taken.clear()
    else:
        raise ValueError(f"unknown event {kind!r}")


def _keys(prompts: Iterable[Sequence]) -> tuple[PromptKey, ...]:
    return tuple((epoch, prompt_id) for epoch, prompt_id in prompts)
