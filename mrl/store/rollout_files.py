# SPDX-License-Identifier: Apache-2.0
"""Rollouts on disk: groups that a checkpoint has not trained on, and the batches of recorded steps, in one format.

Kept groups are a cache by prompt: the ledger alone says which prompts are trained. A thread writes them, at most one
file a second; groups that are not whole lie together in one file, which the next such file replaces.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from conversion.files.durable import WRITE_TIMEOUT_S, make_folder, remove_file
from conversion.files.limits import within
from mrl.env import kill_point
from mrl.store.ledger import LedgerState
from mrl.store.ownership import FolderLost
from mrl.store.records import read_record, write_record
from mrl.types import Batch, PayloadRef, Prompt, PromptKey, Rollout, RolloutGroup, RolloutInfo, RunState

logger = logging.getLogger(__name__)

KEPT, RECORDED = "rollouts", "recorded"
"""Folders in the run folder."""
FILE = re.compile(r"kept_(\d+)\.mrl")
INTERVAL_S = 1.0
FLUSH_S, END_S = 60.0, 10.0
SHARE = 20
"""Writes of unfinished rollouts take at most this part of the time."""
NOT_FINITE = "not_finite_"
"""Begins the names of records of steps with NaN or Inf."""
MAX_NOT_FINITE, MAX_BYTES = 8, 8 * 10**9
SequenceTensors = dict[int, tuple[int, dict[str, np.ndarray]]]
"""Rank and its tensors of a sequence, by index in the batch: float32 by token, at the token before the one they are
of: old_logprobs, reference_logprobs, loss_mask, advantages.
"""


@dataclass(frozen=True)
class KeptFile:
    """Groups before rewards are shaped, with their payloads: whole ones, or ones with `begun` rollouts."""

    conditions: dict[str, str]
    """Digests of everything besides the weights that rollouts and verdicts depend on, by key."""
    groups: tuple[tuple[RolloutGroup, int], ...]
    """Each with the finished steps of the weights that sampled its oldest token."""


@dataclass(frozen=True)
class RecordedStep:
    """A step: the batches of its updates with their payloads, and what the ranks computed of them."""

    step: int
    pad_token_id: int
    layout: str
    """Equal where sums are made in the same order."""
    batches: tuple[Batch, ...]
    computed: tuple[SequenceTensors, ...]
    """Tensors of each batch."""
    metrics: dict[str, float]
    problem: str
    """Empty, or why the step has failed."""


def with_payloads(groups: Sequence[RolloutGroup], payloads: Iterable[Rollout | PayloadRef]) -> list[RolloutGroup]:
    """The groups with the payloads of all their sequences, which come in order."""
    left = iter(payloads)

    def filled(infos: Iterable[RolloutInfo]) -> tuple[RolloutInfo, ...]:
        return tuple(one.with_payloads([next(left) for _ in one.sequences]) for one in infos)

    return [replace(group, rollouts=filled(group.rollouts), begun=filled(group.begun)) for group in groups]


def sequences_of(groups: Iterable[RolloutGroup]) -> list[RolloutInfo]:
    """All sequences of the groups, in the order of `with_payloads`."""
    return [part for group in groups for one in (*group.rollouts, *group.begun) for part in one.sequences]


class KeptRollouts:
    """Writes groups that a checkpoint may need, and hands out those an earlier attempt wrote. `start` comes first."""

    def __init__(
        self,
        folder: Path,
        conditions: dict[str, str],
        *,
        lag: int,
        limit_bytes: float,
        unfinished_s: float = 0.0,
        saves: Callable[[int], bool],
        pull: Callable[[Sequence[RolloutInfo]], list[Rollout]],
        check_owner: Callable[[], None],
    ) -> None:
        """`saves`: whether a checkpoint follows a step. `pull` fetches payloads in a thread; RuntimeError: one lost.

        Groups that are not whole are written every `unfinished_s`; 0: never.
        """
        self._folder, self._conditions, self._lag, self._limit = folder, conditions, lag, limit_bytes
        self._unfinished_s = unfinished_s
        self._saves, self._pull, self._check_owner = saves, pull, check_owner
        self._changed = threading.Condition()
        """Held for whatever is below."""
        self._steps: dict[int, int] = {}
        """Finished steps by weight version."""
        self._checkpoint = 0
        self._whole: dict[PromptKey, tuple[RolloutGroup, int]] = {}
        """Not written, with the step of its weights."""
        self._consumed: dict[PromptKey, int] = {}
        """Step that has consumed a group of `_files`, or of `_whole`."""
        self._files: dict[Path, dict[PromptKey, int]] = {}
        """Steps of the weights of the groups in each file."""
        self._sizes: dict[Path, int] = {}
        self._usable: dict[PromptKey, tuple[RolloutGroup, int]] = {}
        self._taken: dict[PromptKey, tuple[RolloutGroup, int]] = {}
        """Groups that are not whole, from when they are taken until they are seen under way."""
        self._unfinished_files: set[Path] = set()
        """Files that the next write of unfinished groups replaces."""
        self._first = 0, 0
        """Weight version and step with which the attempt begins."""
        self._num_unjudged: Callable[[int], int] = lambda weight_version: 0
        self._unfinished: Callable[[bool], list[RolloutGroup]] = lambda is_last: []
        self._unfinished_at, self._is_last = 0.0, False
        self._is_over, self._is_awaited, self._has_failed, self._is_said = False, False, False, False
        self._last_number, self._written_at = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="kept rollouts", daemon=True)

    def start(self, step: int, weight_version: int, consumed: Collection[PromptKey]) -> None:
        """Reads what past attempts wrote, once `step`'s weights are loaded as `weight_version`; names the useless."""
        self._checkpoint, self._steps, self._first = step, {weight_version: step}, (weight_version, step)
        self._unfinished_at = time.monotonic() + self._unfinished_s
        within(WRITE_TIMEOUT_S, f"mkdir of {self._folder}", make_folder, self._folder)
        reasons = Counter[str]()
        _remove(self._folder.glob(".kept_*"))  # of a write that was killed
        for path in sorted(self._folder.glob("kept_*.mrl")):
            if match := FILE.fullmatch(path.name):
                self._last_number = max(self._last_number, int(match[1]))
                self._read(path, step, consumed, reasons)
        if self._usable or reasons:
            told = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
            logger.info("Prompts whose kept rollouts are used again: %d%s", len(self._usable), told)
        if begun := [one for group, _ in self._usable.values() for one in group.begun]:
            num_tokens = sum(one.num_generated for one in begun)
            logger.info("Rollouts among them that go on: %d, from %d tokens", len(begun), num_tokens)
        self._thread.start()

    def _read(self, path: Path, step: int, consumed: Collection[PromptKey], reasons: Counter[str]) -> None:
        try:
            file = read_record(path, KeptFile)
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            logger.warning("%s; the prompts of its rollouts are asked again", error)
            _remove([path])
            return
        changed = sorted(
            key for key in file.conditions | self._conditions if file.conditions.get(key) != self._conditions.get(key)
        )
        found: dict[PromptKey, int] = {}
        for group, at in file.groups:
            if changed:
                reasons[f"sampled or judged with other {', '.join(changed)}"] += 1
            elif at > step:
                reasons[f"from weights after step {step}, which are rolled back"] += 1
            elif step - at > self._lag:
                reasons[f"older than grpo.async_grpo.max_trajectory_age_steps allows at step {step}"] += 1
            elif group.key not in consumed:
                found[group.key] = at
                before = self._usable.get(group.key)
                if before is None or (not before[0].num_unjudged, before[1]) <= (not group.num_unjudged, at):
                    self._usable[group.key] = group, at
        lasting = tuple((group, at) for group, at in file.groups if at <= step)
        if found and len(lasting) < len(file.groups):
            # A later attempt would reuse the rolled-back groups.
            try:
                write_record(path, KeptFile(file.conditions, lasting))
            except OSError as error:
                logger.warning(
                    "%s: rollouts of no use cannot be taken out, so all of its rollouts are dropped: %s", path, error
                )
                found.clear()
        if found:
            self._files[path], self._sizes[path] = found, path.stat().st_size
            if any(group.num_unjudged for group, _ in file.groups):
                self._unfinished_files.add(path)
        else:
            _remove([path])

    def take(self, epoch: int, prompt: Prompt) -> RolloutGroup | None:
        """The group of a prompt with its payloads, if an earlier attempt has kept it; versions as this one counts."""
        with self._changed:
            group, at = self._usable.pop((epoch, prompt.prompt_id), (None, 0))
        if group is None:
            return None
        # Neither rollouts nor verdicts depend on what a teacher reads.
        asked = replace(prompt, teacher=group.prompt.teacher, teacher_token_ids=group.prompt.teacher_token_ids)
        if changed := [name for name, value in vars(asked).items() if getattr(group.prompt, name) != value]:
            logger.warning(
                "Prompt %s has another %s than when its rollouts were kept; it is asked again",
                prompt.prompt_id,
                " and ".join(changed),
            )
            return None
        first, step = self._first
        version = first - (step - at)
        rollouts = tuple(replace(rollout, weight_version=version) for rollout in group.rollouts)
        begun = tuple(_moved(one.pulled, version - group.oldest_version) for one in group.begun)
        with self._changed:  # once it is whole, it is written like any other
            self._steps.setdefault(version, at)
            if group.num_unjudged:
                self._taken[group.key] = group, at
        return replace(
            group,
            prompt=prompt,
            rollouts=rollouts,
            begun=begun,
            weight_version=version,
            is_kept=not group.num_unjudged,
            num_kept_tokens=sum(one.num_trained for one in (*rollouts, *begun)),
        )

    def note(self, group: RolloutGroup) -> None:
        """Notes a whole group. Any thread may call it; it never waits."""
        with self._changed:
            if (step := self._steps.get(group.oldest_version)) is not None and not self._has_failed:
                self._consumed.pop(group.key, None)
                self._taken.pop(group.key, None)
                self._whole[group.key] = group, step
            if self._is_awaited:  # the thread looks by itself now and then
                self._changed.notify_all()

    def note_trained(self, step: int, consumed: Iterable[PromptKey]) -> None:
        """Notes that a step has consumed these groups."""
        with self._changed:
            on_disk = {key for keys in self._files.values() for key in keys}
            for key in consumed:
                if key in self._whole and not self._is_wanted(self._whole[key][1]):
                    del self._whole[key]
                if key in self._whole or key in on_disk:
                    self._consumed[key] = step

    def prepare(self, step: int, *, ends: bool) -> None:
        """Writes, before a checkpoint of `step`, the groups that a run resumed there needs; waits a while for verdicts.

        Unless the run `ends` there, waits for none of the step's own weights: they can be sampled again.
        """
        last = step if ends else step - 1

        def is_written() -> bool:
            is_due = any(self._whole[group.key][1] <= last for group in self._due())
            return self._has_failed or not (is_due or self._num_unjudged(version))

        with self._changed:
            self._checkpoint, self._is_awaited = step, True
            version = max((version for version, at in self._steps.items() if at <= last), default=-1)
            self._changed.notify_all()
            is_done = self._changed.wait_for(is_written, FLUSH_S)
            self._is_awaited = False
            if not is_done:
                logger.info(
                    "Not all rollouts of step %d are kept: they had no verdict, or were not written, within %g s",
                    step,
                    FLUSH_S,
                )

    def published(self, step: int) -> None:
        """Removes, once the checkpoint of `step` is published, groups that no later attempt needs."""
        with self._changed:
            self._is_said = False
            useless = [
                path
                for path, groups in self._files.items()
                if not any(self._is_needed(key, s, step) for key, s in groups.items())
            ]
            for path in useless:
                del self._files[path]
                del self._sizes[path]
            self._whole = {key: held for key, held in self._whole.items() if self._is_needed(key, held[1], step)}
            on_disk = {key for keys in self._files.values() for key in keys}
            self._consumed = {key: at for key, at in self._consumed.items() if key in on_disk or key in self._whole}
        _remove(useless)

    def write_last(self) -> None:
        """Writes what is unfinished when a run ends that may be resumed, and waits for it for a while."""
        with self._changed:
            self._is_last = self._unfinished_s > 0 and not self._has_failed
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_failed or not self._is_last, FLUSH_S)

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def follow(self, state: RunState, ledger: LedgerState) -> None:
        """Notes that engines hold `state`'s weights, which the ledger trained. The first call begins the attempt."""
        if not self._steps:
            self.start(state.step, state.weight_version, ledger.consumed)
            return
        self.note_trained(state.step, (*ledger.trained.get(state.step, ()), *ledger.dropped.get(state.step, ())))
        with self._changed:
            self._steps.setdefault(state.weight_version, state.step)

    def watch(
        self,
        num_unjudged: Callable[[int], int],
        unfinished: Callable[[bool], list[RolloutGroup]] = lambda is_last: [],
    ) -> None:
        """`num_unjudged` counts sampled groups without all verdicts, of weights up to a version.

        `unfinished` gives, in a thread, the groups that are not whole, whether the run ends or not; RuntimeError: not
        now.
        """
        self._num_unjudged, self._unfinished = num_unjudged, unfinished

    def _is_needed(self, key: PromptKey, step: int, checkpoint: int) -> bool:
        return step + self._lag >= checkpoint and self._consumed.get(key, checkpoint + 1) > checkpoint

    def _is_wanted(self, step: int) -> bool:
        return any(at == self._checkpoint or self._saves(at) for at in range(step, step + self._lag + 1))

    def _due(self) -> list[RolloutGroup]:
        if self._has_failed:
            return []
        return [
            group
            for key, (group, step) in self._whole.items()
            if self._is_wanted(step) and self._consumed.get(key, self._checkpoint + 1) > self._checkpoint
        ]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._is_last or bool(self._due()), timeout=INTERVAL_S)
                rest_s = self._written_at + INTERVAL_S - time.monotonic()
                if rest_s > 0:
                    self._changed.wait_for(lambda: self._is_over, timeout=rest_s)
                if self._is_over:
                    return
                due, has_failed = self._due(), True
                is_last, is_due = self._is_last, 0 < self._unfinished_s and self._unfinished_at <= time.monotonic()
            if due or is_last or (is_due and not self._has_failed):
                try:
                    # Groups that get whole after this look are in `due`, or in the file that is to be replaced.
                    unfinished = self._look(is_last) if is_last or is_due else []
                    with self._changed:
                        due = self._due()
                    if due:
                        self._write([(group, self._steps[group.oldest_version]) for group in due])
                    if unfinished:
                        self._replace(unfinished)
                    has_failed = False
                except (FolderLost, TimeoutError) as error:
                    logger.warning(
                        "%s: rollouts are not kept any more, and a resumed run samples them again: %s",
                        self._folder,
                        error,
                    )
                except (OSError, RuntimeError) as error:  # there may be room later; an engine that has died comes back
                    has_failed = False
                    self._say(error)
                finally:
                    with self._changed:
                        self._is_last = self._is_last and not is_last
                        self._has_failed = has_failed
                        kept = () if has_failed else self._whole.items()
                        self._whole = {key: held for key, held in kept if not any(held[0] is group for group in due)}
                        self._changed.notify_all()

    def _say(self, error: Exception) -> None:
        """Warns of what is not kept, once until the next checkpoint."""
        if not (self._is_over or self._is_said):
            logger.warning(
                "%s: some rollouts are not kept, and a resumed run samples them again: %s", self._folder, error
            )
        self._is_said = True

    def _look(self, is_last: bool) -> list[tuple[RolloutGroup, int]]:
        """The groups that are not whole, each with the step of its weights, if there is anything new to keep."""
        self._unfinished_at = time.monotonic() + self._unfinished_s
        try:
            groups = self._unfinished(is_last)
        except RuntimeError as error:  # whole groups are written all the same
            self._say(error)
            return []
        with self._changed:
            steps = [self._steps.get(group.oldest_version) for group in groups]
            found = [
                (group, step)
                for group, step in zip(groups, steps, strict=True)
                if step is not None and self._is_wanted(step)
            ]
            for group, _ in found:
                self._taken.pop(group.key, None)
            # What this attempt has not asked for yet stays for the next one.
            left = [
                (group, step)
                for group, step in (*self._usable.values(), *self._taken.values())
                if group.num_unjudged and self._is_needed(group.key, step, self._checkpoint)
            ]
        return [*found, *left] if found else []

    def _replace(self, unfinished: Sequence[tuple[RolloutGroup, int]]) -> None:
        """Writes groups that are not whole in the place of those written before. Raises what `_write` raises."""
        start, replaced = time.monotonic(), self._unfinished_files
        self._unfinished_files = {self._write(unfinished, replaced)}
        self._unfinished_at += SHARE * (time.monotonic() - start)
        with self._changed:
            useless = [path for path in replaced if self._files.pop(path, None) is not None]
            for path in useless:
                del self._sizes[path]
        _remove(useless)

    def _write(self, groups: Sequence[tuple[RolloutGroup, int]], replaced: Collection[Path] = ()) -> Path:
        """Writes groups to a new file. OSError, RuntimeError, FolderLost: they cannot be written."""
        self._written_at = time.monotonic()
        path = self._folder / f"kept_{self._last_number + 1:06d}.mrl"
        self._check_owner()
        sequences = sequences_of(group for group, _ in groups)
        pulled = iter(self._pull([one for one in sequences if not isinstance(one.payload, Rollout)]))
        payloads = [one.payload if isinstance(one.payload, Rollout) else next(pulled) for one in sequences]
        size = sum(size for written, size in list(self._sizes.items()) if written not in replaced)
        if size + sum(rollout.num_bytes for rollout in payloads) > self._limit:
            raise OSError(f"the folder may hold checkpointing.keep_rollouts_gb={self._limit / 1e9:g}, and is full")
        filled = with_payloads([group for group, _ in groups], payloads)
        steps = [step for _, step in groups]
        kill_point("kept")
        size = write_record(path, KeptFile(self._conditions, tuple(zip(filled, steps, strict=True))))
        kill_point("kept")
        self._last_number += 1
        with self._changed:
            found = {group.key: step for group, step in groups}
            self._files[path], self._sizes[path] = found, size
        return path


def _moved(rollout: Rollout, shift: int) -> RolloutInfo:
    turns = tuple(replace(turn, weight_version=turn.weight_version + shift) for turn in rollout.earlier_turns)
    rollout = replace(rollout, weight_version=rollout.weight_version + shift, earlier_turns=turns)
    return RolloutInfo.of(rollout, rollout)


def drop_kept(folder: Path) -> None:
    """Removes kept groups of earlier attempts: after an attempt that keeps none, their weights would be unknown."""
    _remove(folder.glob("*kept_*.mrl*"))


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            remove_file(path)
        except TimeoutError:
            raise
        except OSError as error:
            logger.warning("%s is of no use any more, and cannot be removed: %s", path, error)


def write_step(folder: Path, record: RecordedStep, *, keeps: int) -> Path | None:
    """Writes a record below the run folder and removes those `keeps` steps older; None, with a warning, on a full disk.

    Of steps that are not finite there are at most `MAX_NOT_FINITE`.
    """
    path = folder / RECORDED / (f"{NOT_FINITE}step_{record.step}.mrl" if record.problem else f"step_{record.step}.mrl")
    size = sum(sequence.rollout.pulled.num_bytes for batch in record.batches for sequence in batch.sequences)
    try:
        make_folder(path.parent)
        for part in path.parent.glob(".*.mrl.*"):  # of a write that was killed
            remove_file(part)
        if record.problem and not path.exists() and len(list(path.parent.glob(f"{NOT_FINITE}*"))) >= MAX_NOT_FINITE:
            raise OSError(f"the folder holds {MAX_NOT_FINITE} such records; move them away")
        if size > MAX_BYTES:
            raise OSError(f"{size / 1e9:.1f} GB of rollouts are more than {MAX_BYTES / 1e9:g}")
        if not record.problem:
            for old in path.parent.glob("step_*.mrl"):
                if (number := re.fullmatch(r"step_(\d+)\.mrl", old.name)) and not record.step - keeps < int(
                    number[1]
                ) <= record.step:
                    remove_file(old)
        write_record(path, record)
    except TimeoutError:
        raise
    except OSError as error:
        logger.warning("%s: the batch of step %d is not recorded: %s", path, record.step, error)
        return None
    return path
