"""The ledger: which prompts were taken, trained and rolled back. One fsynced JSON line per event; it is the data position."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass
class LedgerState:
    """What the lines of a ledger add up to."""

    trained: dict[int, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    """Step -> (epoch, prompt id) of its prompts, for every step in the lineage of the surviving weights."""
    taken: tuple[int, tuple[tuple[int, str], ...]] | None = None
    """Step and prompts that were taken and not trained yet."""


class Ledger:
    """Appends events to `ledger.jsonl`; an event is on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = replay(path)

    def take(self, step: int, prompts: Sequence[tuple[int, str]]) -> None:
        """Step `step` asks for rollouts of these prompts, given as (epoch, prompt id)."""
        self._append({"event": "taken", "step": step, "prompts": [list(prompt) for prompt in prompts]})

    def train(self, step: int) -> None:
        """The prompts taken by step `step` have been trained on."""
        self._append({"event": "trained", "step": step})

    def roll_back(self, to_step: int) -> None:
        """Weights of step `to_step` were loaded: later steps leave the lineage, their prompts will be asked again.

        Raises:
            RuntimeError: steps 1..`to_step` are not all in the ledger.
        """
        if self.state.taken is not None or any(step > to_step for step in self.state.trained):
            self._append({"event": "rolled_back", "to_step": to_step})
        if sorted(self.state.trained) != list(range(1, to_step + 1)):
            raise RuntimeError(
                f"{self.path} holds {len(self.state.trained)} trained steps, the checkpoint is of step {to_step}: not one run; "
                "restore both, or start in an empty checkpointing.checkpoint_dir"
            )

    def _append(self, event: dict[str, object]) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (json.dumps(event) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        apply_event(self.state, event)


def replay(path: Path) -> LedgerState:
    """The state that the lines of `path` add up to; an empty ledger if there is no file.

    A last line without its newline was being written when the machine died: its event never happened, and it is cut off.

    Raises:
        ValueError: a line is not an event, or does not follow from the lines before it; names the line.
    """
    state = LedgerState()
    if not path.exists():
        return state
    content = path.read_bytes()
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
    """Applies one event. Raises ValueError if it cannot follow: a gap, a step trained twice, training what was not taken."""
    kind = event["event"]
    if kind == "taken":
        if event["step"] != len(state.trained) + 1 or state.taken is not None:
            raise ValueError(f"step {event['step']} taken after {len(state.trained)} trained steps")
        state.taken = (event["step"], tuple((epoch, prompt_id) for epoch, prompt_id in event["prompts"]))
    elif kind == "trained":
        if state.taken is None or state.taken[0] != event["step"]:
            raise ValueError(f"step {event['step']} trained without being taken")
        state.trained[event["step"]] = state.taken[1]
        state.taken = None
    elif kind == "rolled_back":
        state.trained = {step: ids for step, ids in state.trained.items() if step <= event["to_step"]}
        state.taken = None
    else:
        raise ValueError(f"unknown event {kind!r}")
