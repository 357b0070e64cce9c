# SPDX-License-Identifier: Apache-2.0
"""The ledger: prompts a run took, trained on and rolled back, one fsynced JSON line per event: its place in the data.

Each checkpoint holds the part that led to it, from which a damaged or lost ledger is restored.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from conversion.files.durable import WRITE_TIMEOUT_S, put_aside, read_whole, sync_descriptor, write_atomic
from conversion.files.limits import within
from conversion.files.reading import parse_json, read_file
from mrl.env import kill_point
from mrl.store.marks import Mark
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
    saved: dict[int, Mark] = field(default_factory=dict)
    """Step -> the mark of its checkpoint, for every checkpoint of the lineage, kept or not."""
    rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> mean rewards of its prompts, by prompt id, where a curriculum needs them."""
    begun: dict[tuple[int, int], int] = field(default_factory=dict)
    """(Data set, epoch) whose prompts a curriculum has chosen -> the step that was next then."""

    def steps(self, last: int) -> dict[int, tuple[tuple[PromptKey, ...], tuple[PromptKey, ...]]]:
        """Step -> the prompts that it trained on and those that it left out, up to a last step."""
        return {step: (prompts, self.dropped.get(step, ())) for step, prompts in self.trained.items() if step <= last}


class Ledger:
    """Appends events to `ledger.jsonl`; each is on disk when the call returns, or, on a full disk, with the next."""

    def __init__(self, path: Path, *, check_owner: Callable[[], None] = unowned, mends: bool = True) -> None:
        """`check_owner` raises if another now owns the folder; see `mrl.store.ownership`. `mends` as for `replay`."""
        self.path = path
        self._check_owner = check_owner
        self.state, self.damage = LedgerState(), ""
        """`damage` says why `state` is empty though there is a file; `roll_back` mends that."""
        self._unwritten = b""
        # The thread that publishes a checkpoint flushes at the same time as the loop.
        self._lock = threading.RLock()
        try:
            self.state = replay(path, mends=mends)
        except TimeoutError:  # a file system without an answer is no damage
            raise
        except (OSError, ValueError) as error:
            self.damage = str(error)

    def take(self, step: int, prompts: Sequence[PromptKey]) -> None:
        """Records that the run asks for rollouts of these prompts while `step` is the next to train."""
        kill_point("rollouts")
        self._append({"event": "taken", "step": step, "prompts": prompts})
        kill_point("rollouts")

    def train(
        self,
        step: int,
        trained: Sequence[PromptKey],
        dropped: Sequence[PromptKey] = (),
        rewards: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Records that `step` consumed these prompts: it trained on some and dropped others for their rollouts.

        `rewards` are mean rewards by prompt id, if a later epoch chooses by them.
        """
        kill_point("rollouts")
        self._append(_trained(step, trained, dropped, rewards))
        kill_point("rollouts")

    def begin_epoch(self, data_set: int, epoch: int) -> tuple[dict[str, float], bool]:
        """The last mean reward of each prompt when this epoch of a data set began; True if it begins now."""
        if is_new := (data_set, epoch) not in self.state.begun:
            self._append(_begun(data_set, epoch, len(self.state.trained) + 1))
        next_step, found = self.state.begun[data_set, epoch], dict[str, float]()
        for step in range(1, next_step):
            found |= self.state.rewards.get(step, {})
        return found, is_new

    def save(self, mark: Mark) -> None:
        """Records that a checkpoint with this mark is published. A thread may call it while the loop goes on."""
        if self.state.saved.get(mark.step) != mark:
            self._append(_saved(mark))

    def copy_to(self, path: Path, mark: Mark | None = None) -> None:
        """Writes a ledger of only the steps trained so far: the part that the checkpoint with this mark holds."""
        events: list[dict[str, object]] = []
        saved = self.state.saved | ({mark.step: mark} if mark is not None else {})
        for step, (trained, dropped) in self.state.steps(len(self.state.trained)).items():
            events += [
                {"event": "taken", "step": step, "prompts": (*trained, *dropped)},
                _trained(step, trained, dropped, self.state.rewards.get(step, {})),
            ]
            events += [_saved(saved[step])] if step in saved else []
        events += [_begun(*key, step) for key, step in self.state.begun.items()]
        text = "".join(json.dumps(event) + "\n" for event in events)
        within(WRITE_TIMEOUT_S, f"write of {path}", path.write_text, text, encoding="utf-8")

    def find_obstacle(self, to_step: int, copy: Path | None) -> str:
        """The reason not to resume from `to_step`, whose ledger copy is at `copy` (None: no copy); "" if none."""
        if stranger := self.find_stranger(to_step, copy):
            return stranger
        if not to_step or (copy is not None and copy.exists()) or not (problem := self._find_problem(to_step, None)):
            return ""
        way_out = "move it away to go on from the one before it, or start in an empty checkpointing.checkpoint_dir"
        return f"{problem}; the checkpoint of step {to_step} holds no copy of the ledger: restore both, {way_out}"

    def find_stranger(self, to_step: int, copy: Path | None) -> str:
        """Reason why a checkpoint is of another run than this ledger, which is whole; "" if it is not."""
        if self.damage or copy is None or not copy.exists():
            return ""
        theirs, ours = replay(copy), self.state
        parted = [
            step for step, mark in theirs.saved.items() if step in ours.saved and mark.run == ours.saved[step].run != ""
        ]
        parted = [step for step in parted if theirs.saved[step].save != ours.saved[step].save]
        if parted:
            return self._other_run(to_step, f"another save of step {parted[0]}: it is of a copy of this run")
        # Of checkpoints of older versions nothing but their prompts tells the run.
        if not theirs.saved and any(
            prompts != ours.trained.get(step, prompts) for step, prompts in theirs.trained.items()
        ):
            return self._other_run(to_step, "other prompts: it is of another run")
        return ""

    def _other_run(self, to_step: int, why: str) -> str:
        return (
            f"{self.path} and the ledger in the checkpoint of step {to_step} name {why}; move step_{to_step} out "
            f"of {self.path.parent}, or choose another checkpointing.checkpoint_dir (if {self.path.name} is what "
            "was exchanged, move that away)"
        )

    def roll_back(self, to_step: int, copy: Path | None = None) -> None:
        """Records that the weights of `to_step` were loaded: later steps do not count, taken prompts are asked again.

        A ledger that is damaged, or of another run than the `copy` in the checkpoint, is set aside, and restored from
        it. RuntimeError: there is no copy.
        """
        if obstacle := self.find_obstacle(to_step, copy):
            raise RuntimeError(obstacle)
        if problem := self._find_problem(to_step, copy):
            self._check_owner()
            text = "" if copy is None else read_file(copy).decode()
            kill_point("fallback")
            aside = put_aside(self.path, "damaged_").name if os.path.lexists(self.path) else "not there"
            kill_point("fallback")
            write_atomic(self.path, text)
            self.state, self.damage = replay(self.path), ""
            logger.warning(
                "%s; restored from %s, the old one is %s", problem, copy or "nothing, as no checkpoint is whole", aside
            )
        if self.state.taken or any(step > to_step for step in self.state.trained):
            self._append({"event": "rolled_back", "to_step": to_step})

    def _find_problem(self, to_step: int, copy: Path | None) -> str:
        if self.damage:
            return self.damage
        steps = self.state.steps(to_step)
        if sorted(steps) != list(range(1, to_step + 1)):
            return (
                f"{self.path} ends at trained step {len(self.state.trained)}, the checkpoint is of step "
                f"{to_step}: not the same run"
            )
        if copy is not None and copy.exists():
            theirs = replay(copy)
            if steps != theirs.steps(to_step):
                return f"{self.path} names other prompts than the checkpoint of step {to_step}: not one run"
            if any(self.state.saved.get(step, mark) != mark for step, mark in theirs.saved.items()):
                return f"{self.path} names other saves than the checkpoint of step {to_step}: not one run"
        return ""

    def _append(self, event: dict[str, object]) -> None:
        assert not self.damage, "roll_back comes first"
        self._check_owner()
        apply_event(self.state, event)
        line = (json.dumps(event) + "\n").encode()
        try:
            with self._lock:
                had_room = not self._unwritten
                self._unwritten += line
                self.flush()
        except TimeoutError:  # it may be written yet: a second write would write it twice
            raise
        except OSError as error:
            if had_room:
                logger.warning(
                    "%s cannot be written: %s. The run goes on; no checkpoint is made before the ledger is whole",
                    self.path,
                    error,
                )

    def flush(self) -> None:
        """Writes events that the full disk refused. OSError: it is still full, and the file ends with a whole event."""
        with self._lock:
            if self._unwritten:
                within(WRITE_TIMEOUT_S, f"write of {self.path}", self._write)
                self._unwritten = b""

    def _write(self) -> None:
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


def replay(path: Path, *, mends: bool = True) -> LedgerState:
    """The state after all events of `path`; an empty ledger if there is no file.

    A last line without its newline does not count, and is cut off if this process `mends` the file: the machine died
    while writing it, so its event never happened. ValueError: a line is damaged.
    """
    state = LedgerState()
    if not path.exists():
        return state
    content = read_whole(path)
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content) and mends:
        logger.warning("%s: cutting off a half-written last line", path)
        within(WRITE_TIMEOUT_S, f"write of {path}", os.truncate, path, len(whole))
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            apply_event(state, _object(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {error!r}; the ledger is damaged") from error
    return state


def _object(line: bytes) -> dict:
    event = parse_json(line)
    if not isinstance(event, dict):
        raise ValueError("no event")
    return event


def apply_event(state: LedgerState, event: dict) -> None:
    """Applies one event. ValueError: it cannot follow: a gap, a prompt taken or trained twice, or trained untaken."""
    kind = event["event"]
    if kind == "taken":
        prompts = _keys(event["prompts"])
        if event["step"] != len(state.trained) + 1:
            raise ValueError(f"prompts taken for step {event['step']} after trained step {len(state.trained)}")
        if twice := [key for key in prompts if key in state.taken or key in state.consumed]:
            raise ValueError(f"prompt {twice[0]} taken twice")
        state.taken |= {key: event["step"] for key in prompts}
    elif kind == "trained":
        step, trained, dropped = event["step"], _keys(event["prompts"]), _keys(event.get("dropped", ()))
        if step != len(state.trained) + 1:
            raise ValueError(f"step {step} trained after step {len(state.trained)}")
        for key in (*trained, *dropped):
            if state.taken.pop(key, None) is None:
                raise ValueError(f"step {step} consumed prompt {key} without taking it")
        state.trained[step] = trained
        if dropped:
            state.dropped[step] = dropped
        if rewards := event.get("rewards"):
            state.rewards[step] = {str(prompt_id): float(reward) for prompt_id, reward in rewards.items()}
        state.consumed.update(trained, dropped)
    elif kind == "rolled_back":
        for steps in (state.trained, state.dropped):
            for step in [step for step in steps if step > event["to_step"]]:
                state.consumed.difference_update(steps.pop(step))
        for of_steps in (state.saved, state.rewards):
            for step in [step for step in of_steps if step > event["to_step"]]:
                del of_steps[step]
        # What was chosen while the step after it was next stays: the rewards then are those that stay.
        for key in [key for key, step in state.begun.items() if step > event["to_step"] + 1]:
            del state.begun[key]
        state.taken.clear()
    elif kind == "begun":
        if event["step"] > len(state.trained) + 1:
            raise ValueError(f"epoch {event['epoch']} begun for step {event['step']} after {len(state.trained)}")
        state.begun[event["data_set"], event["epoch"]] = event["step"]
    elif kind == "saved":
        mark = Mark.of(event)
        if mark.step not in state.trained:
            raise ValueError(f"step {mark.step} saved after trained step {len(state.trained)}")
        state.saved[mark.step] = mark
    else:
        raise ValueError(f"unknown event {kind!r}")


def _trained(
    step: int, trained: Sequence[PromptKey], dropped: Sequence[PromptKey], rewards: Mapping[str, float]
) -> dict[str, object]:
    optional = {"dropped": dropped, "rewards": dict(rewards)}
    named = {name: value for name, value in optional.items() if value}
    return {"event": "trained", "step": step, "prompts": trained, **named}


def _begun(data_set: int, epoch: int, step: int) -> dict[str, object]:
    return {"event": "begun", "data_set": data_set, "epoch": epoch, "step": step}


def _saved(mark: Mark) -> dict[str, object]:
    return {"event": "saved", **mark.as_json()}


def _keys(prompts: Iterable[Sequence]) -> tuple[PromptKey, ...]:
    return tuple((epoch, prompt_id) for epoch, prompt_id in prompts)
