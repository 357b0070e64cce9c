# SPDX-License-Identifier: Apache-2.0
"""Inspects the run folder before a start: its owner, the checkpoint to resume from, changed inputs. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conversion.files.reading import content_hash, known_hash
from mrl.config.errors import Problem, told
from mrl.config.schema.run import RunConfig
from mrl.store.checkpoints import (
    LEDGER,
    Checkpoint,
    check_models,
    checkpoints_in,
    find_damage,
    find_gone,
    is_damaged,
    newest_step,
)
from mrl.store.identity import IDENTITY, KEYS, UNKNOWN, find_changes, memory_of, models_of
from mrl.store.ledger import Ledger
from mrl.store.marks import find_run, find_strangers
from mrl.store.ownership import Ownership
from mrl.store.run_files import OWNER

# Hashing them takes a second.
MAX_HASHED_BYTES = 512 << 20
IN_USE = "run-folder/in-use"
"""Id of the problem that another process has the run folder."""

Data = Callable[[], dict[str, str] | None]
"""The part `data` of the identity; None if the rows are not here, or too many to read."""


@dataclass
class Folder:
    """State of a run folder before a start."""

    problems: list[Problem] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def look_at_folder(config: RunConfig, data: Sequence[Data], *, is_strict: bool) -> Folder:
    """Reasons to refuse a start because of the run folder, and messages about it.

    `data` are ways to know the data, the fast one first: another one is asked only if those before found other data
    than the run's.
    """
    found, path = Folder(), Path(config.checkpointing.checkpoint_dir).absolute()
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):  # which other rules refuse
        return found
    key = f"checkpointing.checkpoint_dir={config.checkpointing.checkpoint_dir}"
    try:
        if (holder := Ownership(path / OWNER).holder()) is not None:
            text = f"{key} is in use by {holder}; wait for it, stop it, or choose another folder"
            found.problems.append(told(text, IN_USE))
    except (OSError, ValueError) as error:
        found.problems.append(told(error, "run-folder"))
    try:
        ledger = Ledger(path / LEDGER, mends=False)
        run = find_run(path, ledger.state.saved)
        refusals = (
            lambda: find_strangers(path, run, ledger.state.saved, is_damaged),
            lambda: find_gone(path, ledger, allowed=config.checkpointing.allow_changes),
        )
        if refusal := next(filter(None, (look() for look in refusals)), ""):
            found.problems.append(told(refusal, "run-folder"))
            return found
        newest, step = _newest_whole(path, key, found), newest_step(path)
        if newest is None and ledger.state.trained:
            num_trained = len(ledger.state.trained)
            found.doubts.append(
                f"{key}: {LEDGER} has {num_trained} trained steps, and no checkpoint is here: the run starts at step 0"
            )
        if step:
            check_models(Checkpoint(step, path / f"step_{step}"), config)
            _compare(config, path / IDENTITY, step, data, found, is_strict=is_strict)
        place = (newest.step, newest.ledger) if newest is not None else (0, None)
        if obstacle := ledger.find_obstacle(*place):
            found.problems.append(told(obstacle, "run-folder"))
        elif ledger.damage:
            found.doubts.append(f"{key}: {ledger.damage}; a start restores it from the checkpoint, or begins anew")
    except (OSError, ValueError) as error:
        found.problems.append(told(error, "run-folder"))
    return found


def _newest_whole(path: Path, key: str, found: Folder) -> Checkpoint | None:
    """The checkpoint that a run would resume from. Complains about those that it would pass over."""
    for checkpoint in checkpoints_in(path):
        damage = find_damage(checkpoint.folder, with_shards=False)
        if damage is None:
            found.unseen.append(
                f"{key}: the shards of {checkpoint.folder.name}, which the ranks compare with their checksums"
            )
            return checkpoint
        found.doubts.append(f"{key}: a start passes over {checkpoint.folder.name}: {damage}, and sets it aside")
    return None


def _compare(config: RunConfig, file: Path, step: int, data: Sequence[Data], found: Folder, *, is_strict: bool) -> None:
    unknown = list[Path]()

    def hashes(files: Sequence[Path]) -> Mapping[Path, str]:
        known = {path: known_hash(path, memory_of(config)) for path in files}
        lacking = [path for path, digest in known.items() if digest is None]
        reads = is_strict or sum(path.stat().st_size for path in lacking) <= MAX_HASHED_BYTES
        unknown.extend([] if reads else lacking)
        return {path: digest or (content_hash(path) if reads else UNKNOWN) for path, digest in known.items()}

    if not file.exists():
        return
    if not Path(config.policy.model_name).is_dir() or not Path(config.policy.tokenizer.name).is_dir():
        found.unseen.append(
            f"whether the run in {file.parent} had this model, tokenizer and data: the model is not on this machine"
        )
        return
    allowed = config.checkpointing.allow_changes
    refused, said = find_changes(
        file,
        models_of(config, hashes),
        allowed=allowed,
        resumes_at=step,
        names=[name for name in KEYS if name != "data"],
    )
    found.unseen += [
        f"whether {path.name} has the bytes with which the run in {file.parent} began" for path in unknown[:1]
    ]
    changes: tuple[list[str], list[str]] = [], []
    for way in data:
        part = way()
        changes = (
            ([], [])
            if part is None
            else find_changes(file, {"data": part}, allowed=allowed, resumes_at=step, names=["data"])
        )
        found.unseen += [f"whether the run in {file.parent} had these rows"] if part is None else []
        if not any(changes):
            break
    found.problems += [told(text, "run-folder/identity") for text in refused + changes[0]]
    found.doubts += said + changes[1]
