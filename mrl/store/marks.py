# SPDX-License-Identifier: Apache-2.0
"""Marks: a run folder and its checkpoints are known by content, not names. mrl renames, removes only what it marked."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.durable import put_aside, write_atomic
from conversion.files.reading import parse_json, read_file
from conversion.texts import listed

MARK = "run.json"
"""The mark: in a run folder, and the first file of each checkpoint."""
STATE = "training_info.json"
MARKER = "COMPLETE"
_MARKS = (MARK, STATE, MARKER)
"""Files by which a checkpoint is known. They are removed last."""
_UNFINISHED_MARK = re.compile(rf"\.{re.escape(MARK)}\.[0-9a-f]{{16}}")
"""Name of a mark that `write_atomic` had not renamed yet."""
STEP_FOLDER = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_LEFT = re.compile(r"tmp_(old_)*(tmp_)?step_[0-9]+(\.[0-9]+)?")
"""Names that an interrupted save or removal leaves."""
_PENDING = re.compile(r"tmp_step_[0-9]+")
_NUMBERED = re.compile(
    r"(.*[^a-z])?(global_?)?(steps?|iter|iteration|checkpoint|ckpt|epoch)[-_=]?[0-9]+(\.[a-z]+)?", re.IGNORECASE
)
"""Checkpoints of Megatron (iter_0000020), verl (global_step_20), transformers and TRL (checkpoint-20), torchtitan,
Lightning and others.
"""
OWNER = "owner.json"
_OVERWRITTEN = (
    MARK,
    OWNER,
    "config.yaml",
    "about.json",
    "identity.json",
    "ledger.jsonl",
    "metrics.jsonl",
    "samples.jsonl",
    "loggers.json",
    "report.html",
    "refit.json",
)
_WEIGHTS = re.compile(
    r".*\.(safetensors|distcp|pt|pth|ckpt|msgpack|nemo)|pytorch_model.*\.bin|_CHECKPOINT_METADATA|manifest\.ocdbt",
    re.IGNORECASE,
)
"""Files that trainers keep weights in."""
_SHARD_OF_MODEL = re.compile(r"-[0-9]+-of-[0-9]+\.")
MAX_ENTRIES = 1000
_TRACKERS = ("latest_checkpointed_iteration.txt", "trainer_state.json")
_RUN_STATE = {"step", "weight_version", "metrics"}


@dataclass(frozen=True)
class Mark:
    """The run, the step and the save that a checkpoint is of. That of a run folder has step 0 and no save."""

    run: str
    """Id of the run; "": an older version has written this checkpoint."""
    step: int
    """-1: nothing says it."""
    save: str = ""
    """Id of the save: two copies of a run that both go on have equal runs and steps."""

    def as_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "sum": self._sum()}

    @classmethod
    def of(cls, found: object) -> Mark:
        """ValueError: this is no mark, or a damaged one."""
        if isinstance(found, Mapping) and isinstance(step := found.get("step"), int) and not isinstance(step, bool):
            mark = cls(str(found.get("run")), step, str(found.get("save")))
            if found.get("sum") == mark._sum():
                return mark
        raise ValueError(f"no mark of a run: {str(found)[:100]}")

    def _sum(self) -> str:
        return hashlib.sha256(f"{self.run} {self.step} {self.save}".encode()).hexdigest()[:8]


def new_id() -> str:
    """An id that no other run or save has."""
    return secrets.token_hex(8)


def write_mark(folder: Path, mark: Mark) -> None:
    """Marks a folder. TimeoutError: as `write_atomic`."""
    write_atomic(folder / MARK, json.dumps(mark.as_json()))


def find_mark(folder: Path) -> Mark | None:
    """The mark of a checkpoint, whole, damaged or unfinished, older versions too; None: mrl did not write this folder.

    ValueError: this user may not read what may be its mark.
    """
    refused: PermissionError | None = None
    for read in (_mark_in, _mark_by_state, _mark_by_marker):
        try:
            return read(folder)
        except TimeoutError:
            raise
        except PermissionError as error:
            refused = error
        except (OSError, ValueError):
            continue
    if refused is not None:
        raise unreadable(folder, refused) from refused
    return None


def unreadable(folder: Path, error: PermissionError) -> ValueError:
    """Refuses a checkpoint with a part that this user may not read."""
    way_out = f"start as its user, or let this one read it: chmod -R u+rwX {folder}"
    return ValueError(f"{folder} may be whole, and this user may not read it: {error}; {way_out}")


def _mark_in(folder: Path) -> Mark:
    return Mark.of(parse_json(read_file(folder / MARK)))


def _mark_by_state(folder: Path) -> Mark:
    found = parse_json(read_file(folder / STATE), allows_nan=True)
    # NeMo RL's file of this name has other keys.
    if (
        not isinstance(found, dict)
        or not {"step", "weight_version"} <= found.keys() <= _RUN_STATE
        or type(found["step"]) is not int
    ):
        raise ValueError(f"{folder / STATE} is none of mrl")
    return Mark("", found["step"])


def _mark_by_marker(folder: Path) -> Mark:
    if re.fullmatch(rb"[0-9a-f]{64}", read_file(folder / MARKER)) is None:
        raise ValueError(f"{folder / MARKER} is none of mrl")
    return Mark("", -1)


def is_unmarked(path: Path) -> bool:
    """True for what mrl leaves alone. A folder without any file in it, or but for half a mark, is free to take."""
    if find_mark(path) is not None:
        return False
    names = (name for _, _, files in os.walk(path) for name in files)
    return path.is_symlink() or not path.is_dir() or not all(map(_UNFINISHED_MARK.fullmatch, names))


def put_marked_aside(path: Path, prefix: str) -> Path:
    """Renames a marked folder as `put_aside` does; OSError: mrl has not written it."""
    if is_unmarked(path):
        raise FileExistsError(f"{path} was not written by mrl, which leaves it alone; move it away")
    return put_aside(path, prefix)


def remove_marked(path: Path) -> None:
    """Removes a marked folder, or a link to one, as far as it can. The marks go last: what a kill leaves is marked."""
    if path.is_symlink() or not path.is_dir():
        with suppress(OSError):
            path.unlink()
        return
    for marks in (False, True):
        for entry in path.iterdir():
            if (entry.name in _MARKS) == marks:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    with suppress(OSError):
                        entry.unlink()
        if not marks and any(
            entry.name not in _MARKS for entry in path.iterdir()
        ):  # as a file server keeps it for a while
            return
    with suppress(OSError):
        path.rmdir()


def left_by_kills(folder: Path, run: str) -> list[Path]:
    """Folders in the folder of a run that its interrupted saves and removals have left."""
    paths = [path for path in sorted(folder.iterdir()) if _LEFT.fullmatch(path.name) and not is_unmarked(path)]
    return [path for path in paths if (mark := find_mark(path)) is None or mark.run in ("", run)]


def find_run(folder: Path, saved: Mapping[int, Mark]) -> str:
    """Id of the run that a run folder is of, which has these saves in its ledger; "" where nothing says it."""
    with suppress(OSError, ValueError):
        return _mark_in(folder).run
    runs = {mark.run for mark in saved.values()} or {mark.run for _, mark in _checkpoints(folder) if mark is not None}
    return runs.pop() if len(runs) == 1 else ""


def find_strangers(folder: Path, run: str, saved: Mapping[int, Mark], is_damaged: Callable[[Path], bool]) -> str:
    """Reason to leave a folder alone: it holds checkpoints not of this run or not of their name's step; "" if none.

    `run` is that of `find_run`, `saved` the saves in the ledger. `is_damaged` tells whether a checkpoint differs from
    its manifest.
    """
    if STEP_FOLDER.fullmatch(folder.name) and find_mark(folder) is not None:
        return f"checkpointing.checkpoint_dir={folder} is a checkpoint; name its run folder: {folder.parent}"
    names, said, runs = list[str](), list[str](), {run} - {""}
    for path, mark in _checkpoints(folder):
        match = STEP_FOLDER.fullmatch(path.name)
        if match is None or mark is None:
            names += [path.name] if is_unmarked(path) else []
            continue
        step, known = int(match[1]), saved.get(int(match[1]))
        runs |= {mark.run} - {""}
        if mark.step not in (-1, step) and (mark.run or not is_damaged(path)):
            said.append(
                f"{path.name} is the checkpoint of step {mark.step}, copied or renamed: give it the name "
                f"step_{mark.step}"
            )
        elif run and mark.run not in ("", run):
            said.append(f"{path.name} is of another run")
        elif (
            known is not None
            and known.run == run
            and mark.step == step
            and mark.save != known.save
            and not is_damaged(path)
        ):
            said.append(f"{path.name} is not the save that the ledger names: of a copy of this run, or of another run")
    said += [
        f"{path.name} is the checkpoint of step {step}, renamed: give it the name step_{step}"
        for path, step in _renamed(folder, saved)
    ]
    if len(runs) > 1 and not run:
        said.append("its checkpoints are of several runs, and nothing says whose this folder is")
    if not is_run_folder(folder):
        others = [path for path in folder.iterdir() if not STEP_FOLDER.fullmatch(path.name) and _is_of_others(path)]
        names += [path.name for path in others if not is_run_folder(path)]
        if runs_below := [path.name for path in others if is_run_folder(path)]:
            said.append(f"it holds the folders of runs, {listed(sorted(runs_below))}")
    if names:
        said.insert(0, f"mrl did not write {listed(sorted(set(names)))}")
    if not said:
        return ""
    return (
        f"checkpointing.checkpoint_dir={folder}: {'; '.join(said)}. mrl leaves what is not this run's alone: "
        "choose another folder, or move that out of this one (`python -m mrl.convert mcore-to-hf` makes a folder "
        "for policy.model_name of Megatron's weights)"
    )


def _renamed(folder: Path, saved: Mapping[int, Mark]) -> list[tuple[Path, int]]:
    """Saves that the ledger names, of later steps than each step_N: a start would train these steps again."""
    found, newest = list[tuple[Path, int]](), -1
    for path in sorted(folder.iterdir()):
        if match := STEP_FOLDER.fullmatch(path.name):
            newest = max(newest, int(match[1]))
        elif not path.name.startswith(("damaged_", "tmp_")):
            with suppress(OSError, ValueError):
                mark = _mark_in(path)
                found += [(path, mark.step)] if saved.get(mark.step) == mark else []
    return [(path, step) for path, step in found if step > newest]


def _checkpoints(folder: Path) -> list[tuple[Path, Mark | None]]:
    paths = [
        path for path in sorted(folder.iterdir()) if STEP_FOLDER.fullmatch(path.name) or _PENDING.fullmatch(path.name)
    ]
    return [(path, find_mark(path)) for path in paths]


def _is_of_others(path: Path) -> bool:
    name = path.name
    is_named_so = _NUMBERED.fullmatch(name) is not None and not _LEFT.fullmatch(name)
    is_overwritten = name in _OVERWRITTEN and not _may_be_replaced(path)
    return is_overwritten or name in _TRACKERS or is_named_so or _is_saved(path)


def _may_be_replaced(path: Path) -> bool:
    """True for an empty file, as a kill leaves it, and for the name of an owner of a run folder."""
    with suppress(OSError, ValueError):
        return not path.stat().st_size or (path.name == OWNER and {"process", "job"} <= _object(path).keys())
    return False


def _is_saved(path: Path, *, depth: int = 2) -> bool:
    """True for weights under a name with a number, or in a folder of such a name; one folder deep, too.

    So OpenRLHF (_actor/global_step50), Orbax (100), NeMo (...-epoch=1-consumed_samples=100) and Composer
    (ep0-ba50-rank0.pt) name saves. A model, whose name may have a number, too, has its config.json beside its weights.
    """
    is_model = _SHARD_OF_MODEL.search(path.name) or (path / "config.json").is_file()
    if re.search(r"[0-9]", path.name) and not is_model:
        return _holds_weights(path)
    return depth > 1 and path.is_dir() and any(_is_saved(inner, depth=depth - 1) for inner in _entries(path))


def _holds_weights(path: Path, *, depth: int = 4) -> bool:
    if _WEIGHTS.fullmatch(path.name) is not None:
        return True
    return depth > 0 and path.is_dir() and any(_holds_weights(inner, depth=depth - 1) for inner in _entries(path))


def _entries(folder: Path) -> list[Path]:
    """Entries of a folder, the first of very many; none of one that this user may not read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in itertools.islice(entries, MAX_ENTRIES)]
    return []


def is_run_folder(folder: Path) -> bool:
    """True if mrl has begun a run here, of older versions too."""
    tests: tuple[Callable[[], bool], ...] = (
        lambda: bool(_mark_in(folder)),
        lambda: any(mark is not None for _, mark in _checkpoints(folder)),
        lambda: {"model", "tokenizer", "data"} <= _object(folder / "identity.json").keys(),
        lambda: "mrl" in _object(folder / "about.json"),
        lambda: b'{"event": ' == read_file(folder / "ledger.jsonl")[:10],
    )
    for test in tests:
        with suppress(OSError, ValueError):
            if test():
                return True
    return False


def _object(path: Path) -> Mapping[str, object]:
    found = parse_json(read_file(path))
    return found if isinstance(found, dict) else {}
