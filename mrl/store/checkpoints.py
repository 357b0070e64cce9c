# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run folder: written aside, sealed by a manifest and a completion marker, then renamed.

A folder `step_N` without its marker, or with a file that differs from the manifest, does not exist for a resuming run,
which renames it `damaged_step_N`: no later start and no pruning counts it again.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

from conversion.families.registry import family
from conversion.files.durable import IO_TIMEOUT_S, sync_file, write_atomic
from conversion.files.limits import within
from conversion.files.manifest import HF_CONFIG_FILE, RUN_CONFIG_FILE, FileRecord, file_record
from conversion.files.reading import find_difference, name_inside, read_file, read_json, sha256_file
from mrl.config.schema.run import CheckpointingConfig, RunConfig
from mrl.env import kill_point
from mrl.phases import ModelName
from mrl.store.ledger import Ledger
from mrl.store.marks import (
    MARK,
    MARKER,
    STATE,
    STEP_FOLDER,
    Mark,
    find_mark,
    left_by_kills,
    new_id,
    put_marked_aside,
    remove_marked,
    unreadable,
    write_mark,
)
from mrl.store.ownership import unowned
from mrl.store.ranking import BEST, ranking_of, read_ranking
from mrl.store.run_files import METRIC_KEYS, METRICS, read_rows
from mrl.types import RunState

logger = logging.getLogger(__name__)

RUN_CONFIG = "config.yaml"
MANIFEST = "manifest.json"
LEDGER = "ledger.jsonl"
"""File of the run's ledger; a checkpoint holds the part up to its step."""
SAVE_TIME = "time/checkpoint"
"""Metric of each step that saved."""
DAMAGED, REMOVED = "damaged_", "tmp_old_"
"""Begin the names of folders that are no checkpoints any more."""
MODEL_FOLDERS: Mapping[ModelName, str] = {"policy": "policy", "critic": "value"}
"""Folders of the trained models in a checkpoint. Names as in NeMo RL."""
SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""The file of a rank: nearly all bytes of a checkpoint are in these."""


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int
    folder: Path

    @property
    def weights(self) -> Path:
        """Folder of the policy in Megatron's layout, holding `iter_0000000`."""
        return self.weights_of("policy")

    def weights_of(self, model: ModelName) -> Path:
        """Folder of any trained model in Megatron's layout."""
        return self.folder / MODEL_FOLDERS[model] / "weights"

    def shards(self, num_ranks: int) -> list[dict[Path, str]]:
        """The shards that each of `num_ranks` ranks compares with their sha256: its own if as many ranks wrote them."""
        shares: list[dict[Path, str]] = [{} for _ in range(num_ranks)]
        for path, (_, sha256) in _listed(self.folder).items():
            if (match := SHARD.fullmatch(path.name)) is not None:
                shares[int(match[1]) % num_ranks][path] = sha256
        return shares

    @property
    def ledger(self) -> Path:
        """The ledger up to this step; checkpoints of older versions have none."""
        return self.folder / LEDGER

    @property
    def mark(self) -> Mark | None:
        """The run, step and save that it says it is of; None if its folder is not there."""
        return find_mark(self.folder)

    def state(self) -> RunState:
        return RunState(**json.loads(read_file(self.folder / STATE)))


class NoWholeCheckpoint(ValueError):
    """A run folder holds checkpoints, and none of them can be loaded; the message says why, and what to do."""


class CheckpointStore:
    """The `step_N` folders below one run folder."""

    def __init__(
        self, folder: Path, settings: CheckpointingConfig, *, check_owner: Callable[[], None] = unowned
    ) -> None:
        """`settings` say which checkpoints to keep. `check_owner` raises if another process owns the folder by now."""
        self.folder = folder
        self.run = ""
        """Id of the run, which its checkpoints are marked with."""
        self._check_owner = check_owner
        self.keep_top_k = settings.keep_top_k
        self.keep_latest_k = settings.ft_keep_latest_k or 1
        self.save_period = settings.save_period
        self.ranking = ranking_of(settings.metric_name, settings.higher_is_better)
        self._doubts = settings.enabled

    def begin(self, state: RunState, models: Iterable[ModelName] = ("policy",)) -> Checkpoint:
        """Makes a folder with `state`, into which models write their weights; `commit` turns it into a checkpoint."""
        if (name := self.ranking.name) and self.ranking.value(state.metrics) is None:
            value = state.metrics.get(name)
            found = f"has no metric {name}" if value is None else f"has {name} = {value}"
            level = logging.WARNING
            if name.startswith("val/") and not any(one.startswith("val/") for one in state.metrics):
                found, level = "was not validated", logging.INFO
            ranks = f"its checkpoint ranks last by {name} (checkpointing.metric_name)"
            logger.log(level, "step %d %s: %s", state.step, found, ranks)
        pending = Checkpoint(state.step, self.folder / f"tmp_step_{state.step}")
        text = json.dumps(dataclasses.asdict(state), indent=1)
        within(IO_TIMEOUT_S, f"begin of {pending.folder}", self._lay_out, pending, tuple(models), text)
        return pending

    def _lay_out(self, pending: Checkpoint, models: Iterable[ModelName], state: str) -> None:
        # Under another name first: a file server may keep a part of it for a while.
        if os.path.lexists(pending.folder):
            remove_marked(put_marked_aside(pending.folder, REMOVED))
        pending.folder.mkdir(parents=True)
        write_mark(pending.folder, Mark(self.run, pending.step, new_id()))
        for model in models:
            pending.weights_of(model).mkdir(parents=True)
        (pending.folder / STATE).write_text(state, encoding="utf-8")

    def commit(self, pending: Checkpoint, on_disk: Mapping[str, FileRecord]) -> Checkpoint:
        """Seals and publishes a folder: manifest, sync, marker, rename. Then removes checkpoints that `settings` drop.

        `on_disk` has the files of the weights that their writers have synced, by path below `pending.folder`.
        TimeoutError, an OSError: the file system does not answer.
        """
        return within(IO_TIMEOUT_S, f"commit of {pending.folder}", self._commit, pending, on_disk)

    def _commit(self, pending: Checkpoint, on_disk: Mapping[str, FileRecord]) -> Checkpoint:
        records = {Path(name): record for name, record in on_disk.items()}
        for name in sorted(
            {path.relative_to(pending.folder) for path in pending.folder.rglob("*") if path.is_file()} - records.keys()
        ):
            sync_file(pending.folder / name)
            records[name] = file_record(pending.folder / name)
        manifest = {
            str(name): {"bytes": record.size, "sha256": record.sha256} for name, record in sorted(records.items())
        }
        write_atomic(pending.folder / MANIFEST, json.dumps(manifest, indent=1))
        kill_point("commit")
        for path in pending.folder.rglob("*"):
            if path.is_dir():
                sync_file(path)
        write_atomic(pending.folder / MARKER, sha256_file(pending.folder / MANIFEST))
        kill_point("commit")
        self._check_owner()
        final = self.folder / f"step_{pending.step}"
        # What has this name already is damaged: no run resumes from before a whole checkpoint.
        replaced = put_marked_aside(final, REMOVED) if os.path.lexists(final) else None
        kill_point("commit")
        pending.folder.rename(final)
        sync_file(self.folder)
        kill_point("commit")
        if replaced is not None:
            remove_marked(replaced)
        try:
            self._prune(pending.step)
        except (OSError, ValueError) as error:
            logger.warning("%s is saved, but older checkpoints could not be removed: %s", final, error)
        return Checkpoint(pending.step, final)

    def newest(
        self, *, before: float = math.inf, with_shards: bool = False, sets_aside: bool = False
    ) -> Checkpoint | None:
        """The newest checkpoint before step `before` that agrees with its manifest; warns of newer ones that do not.

        Without `with_shards` only the sizes of shards are compared: hundreds of GB, which the ranks read faster than
        one process does. With `sets_aside`, which is for the run that owns the folder, renames those that are damaged.
        """
        for checkpoint in checkpoints_in(self.folder):
            if checkpoint.step >= before:
                continue
            damage = find_damage(checkpoint.folder, with_shards=with_shards)
            if damage is None:
                return checkpoint
            if sets_aside:
                self.set_aside(checkpoint, damage)
            else:
                logger.warning("passing over %s: %s", checkpoint.folder, damage)
        return None

    def set_aside(self, checkpoint: Checkpoint, damage: str) -> None:
        """Renames a damaged checkpoint, for good; warns. Only the run that owns the folder may call this."""
        kill_point("fallback")
        aside = put_marked_aside(checkpoint.folder, DAMAGED)
        logger.warning(
            "passing over %s: %s. It is set aside as %s; remove that if nobody needs it",
            checkpoint.folder,
            damage,
            aside.name,
        )
        kill_point("fallback")

    def remove_unfinished(self) -> None:
        """Removes folders of interrupted saves. Only the owning run may call this. TimeoutError: as `commit`."""
        within(IO_TIMEOUT_S, f"removal of interrupted saves in {self.folder}", self._remove_unfinished)

    def _remove_unfinished(self) -> None:
        for folder in left_by_kills(self.folder, self.run):
            logger.info("removing %s, left by an interrupted save", folder)
            remove_marked(folder)

    def check_measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns once if a validation, whose metrics these are, lacks the one that ranks checkpoints."""
        if self._doubts and (doubt := self.ranking.doubt(step, metrics)):
            self._doubts = False
            logger.warning("%s", doubt)

    def best_text(self) -> str:
        """Names the newest and the best checkpoint with the metric that ranks them; "" if it ranks none."""
        found = metrics_in(self.folder)
        texts = self.ranking.texts(found)
        steps = [step for step in found if texts and (step == max(found) or texts.get(step, "").endswith(BEST))]
        return ", ".join(f"step_{step} ({texts.get(step, 'unranked')})" for step in steps)

    def _prune(self, newest_step: float = math.inf) -> None:
        """Removes whole checkpoints that the settings do not keep, up to the one just published."""

        def rank(checkpoint: Checkpoint) -> tuple[float, int]:
            value = self.ranking.value(checkpoint.state().metrics)
            if value is None:
                return (float("inf"), -checkpoint.step)
            return (-value if self.ranking.higher_is_better else value, -checkpoint.step)

        whole: list[Checkpoint] = []
        for checkpoint in checkpoints_in(self.folder):
            if (
                (mark := checkpoint.mark) is None
                or mark.run not in ("", self.run)
                or mark.step not in (-1, checkpoint.step)
            ):
                continue  # put there while the run goes on
            if (
                checkpoint.step < newest_step
                and (damage := find_damage(checkpoint.folder, with_shards=False)) is not None
            ):
                self.set_aside(checkpoint, damage)
            elif checkpoint.step <= newest_step:
                whole.append(checkpoint)
        periodic = [checkpoint for checkpoint in whole if checkpoint.step % self.save_period == 0]
        kept = whole[: self.keep_latest_k] + sorted(periodic, key=rank)[: self.keep_top_k]
        for checkpoint in whole:
            if checkpoint not in kept:
                kill_point("prune")
                removed = put_marked_aside(checkpoint.folder, REMOVED)
                kill_point("prune")
                remove_marked(removed)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The folders of checkpoints in a run folder, whole or not, newest first."""
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return sorted((Checkpoint(int(match[1]), path) for match, path in matches if match), key=lambda found: -found.step)


def metrics_in(folder: Path) -> dict[int, Mapping[str, float]]:
    """The metrics of each checkpoint in a run folder by its step, newest first; of unreadable ones none."""
    found = {one.step: _object(one.folder / STATE).get("metrics") for one in checkpoints_in(folder)}
    return {step: metrics for step, metrics in found.items() if isinstance(metrics, dict)}


def is_run_folder(folder: Path) -> bool:
    """Tells a run folder, with its config, from a checkpoint: NeMo RL's hold their config too."""
    return (folder / RUN_CONFIG).is_file() and not (folder / MODEL_FOLDERS["policy"]).is_dir()


def checkpoints_text(folder: Path) -> str:
    """A line that names the checkpoints of a run folder, to choose from."""
    texts = read_ranking(folder / RUN_CONFIG).texts(metrics_in(folder))
    shown = {found.folder: texts.get(found.step) for found in checkpoints_in(folder)}
    names = ", ".join(f"{place} ({text})" if text else str(place) for place, text in shown.items())
    return f"give one of its checkpoints: {names}" if names else f"{folder} has no checkpoint yet"


def find_lost_run(folder: Path, *, before: float = math.inf) -> str:
    """The reason not to begin in a folder: it had checkpoints, none before `before` is whole; "" if all is well.

    Changes nothing: a file system that is mounted wrongly makes all of them look damaged.
    """
    places = [found.folder for found in checkpoints_in(folder) if found.step < before]
    if any(find_damage(place, with_shards=False) is None for place in places):
        return ""
    places += sorted(
        path for path in folder.glob(f"{DAMAGED}step_*") if STEP_FOLDER.match(path.name.removeprefix(DAMAGED))
    )
    by_shards = "an earlier start has found a shard damaged"
    lost = [
        f"{place.name}: {find_damage(place, with_shards=False) or by_shards}"
        for place in places
        if _was_complete(place)
    ]
    if not lost:
        return ""
    return (
        f"checkpointing.checkpoint_dir={folder}: none of its checkpoints is whole, and a start at step 0 would "
        f"train over the run that they are of. {'; '.join(lost)}. Restore one of them as step_N, or choose another "
        "checkpointing.checkpoint_dir; to begin this run anew, with its ledger and metrics, move these folders out "
        "of it, and set checkpointing.allow_changes=[checkpoints]"
    )


def find_gone(folder: Path, ledger: Ledger, *, allowed: Collection[str]) -> str:
    """The reason not to begin at step 0: the ledger names checkpoints, all gone; "" if none are, or it is allowed.

    If the ledger is damaged, lost, or of an older version, the metrics tell it: a step that saved has a time for it.
    """
    if "checkpoints" in allowed or any(_was_complete(found.folder) for found in checkpoints_in(folder)):
        return ""
    saved = sorted(ledger.state.saved)
    if (
        not saved
        and (ledger.damage or not (folder / MARK).exists() or not ledger.state.trained)
        and (folder / METRICS).is_file()
    ):
        saved = sorted(row["step"] for row in read_rows(folder / METRICS, {*METRIC_KEYS, SAVE_TIME})[0])
    if not saved:
        return ""
    return (
        f"checkpointing.checkpoint_dir={folder}: its checkpoints are gone, of step "
        f"{', '.join(map(str, saved[-3:]))} for instance, and a start at step 0 would train "
        f"{max(saved[-1], len(ledger.state.trained))} steps again. Put one of them back as step_N, or choose "
        "another checkpointing.checkpoint_dir; to begin this run anew, set "
        "checkpointing.allow_changes=[checkpoints], which keeps a copy of its metrics"
    )


def is_damaged(folder: Path) -> bool:
    """True if a checkpoint's folder, apart from its shards' content, differs from its manifest."""
    return find_damage(folder, with_shards=False) is not None


def _was_complete(folder: Path) -> bool:
    """True if a folder seems left of a complete checkpoint rather than of an interrupted save."""
    try:
        return not {MARKER, MANIFEST}.isdisjoint(os.listdir(folder))
    except OSError:
        return True


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint with a completion marker, its content unchecked, or 0."""
    return next((found.step for found in checkpoints_in(folder) if os.path.lexists(found.folder / MARKER)), 0)


def check_models(checkpoint: Checkpoint, config: RunConfig) -> None:
    """ValueError if a checkpoint cannot be resumed: it lacks a model, as another algorithm or form of it wrote it."""
    missing = [model for model in config.trained_models if not checkpoint.weights_of(model).is_dir()]
    if missing and find_damage(checkpoint.folder, with_shards=False) is None:
        raise ValueError(
            f"checkpointing.checkpoint_dir={config.checkpointing.checkpoint_dir}: {checkpoint.folder} holds no "
            f"{' and no '.join(missing)}, and a run of algorithm={config.algorithm} resumes with all models that "
            "it trains; choose another folder, or the algorithm that wrote this one (`python -m mrl.convert "
            "mcore-to-hf` makes a folder for policy.model_name of its policy)"
        )
    for model in config.trained_models:
        megatron = config.model(model).megatron_cfg
        path = next(checkpoint.weights_of(model).glob(f"iter_*/{RUN_CONFIG_FILE}"), Path())
        saved = _object(path)
        peft, optimizer = saved.get("peft"), saved.get("optimizer")
        was = {name: peft.get(name) for name in ("dim", "alpha")} if isinstance(peft, dict) else None
        now = {"dim": megatron.peft.dim, "alpha": megatron.peft.alpha} if megatron.peft.enabled else None
        changes = [f"peft was {was or 'not enabled'}, and is {now or 'not enabled'}"] if saved and was != now else []
        form = optimizer.get("use_distributed_optimizer") if isinstance(optimizer, dict) else None
        if form not in (None, megatron.optimizer.use_distributed_optimizer):
            changes.append(
                f"optimizer.use_distributed_optimizer was {form}, and is {megatron.optimizer.use_distributed_optimizer}"
            )
        name = megatron.optimizer.optimizer
        saved_name = optimizer.get("optimizer", "adam") if isinstance(optimizer, dict) and optimizer else name
        if saved_name != name:
            changes.append(f"optimizer.optimizer was {saved_name}, and is {name}")
        section = {"critic": "value"}.get(model, model)
        frozen = optimizer.get("frozen") if isinstance(optimizer, dict) else None
        if not changes and not megatron.peft.enabled and isinstance(frozen, dict):
            _check_thawed(f"{section}.megatron_cfg", path, frozen, config.frozen_settings(model))
        if changes:
            raise ValueError(
                f"{section}.megatron_cfg: {'; '.join(changes)}: weights and optimizer state in {checkpoint.folder} "
                "have another form; set it back, or begin in another checkpointing.checkpoint_dir, with what "
                "`python -m mrl.convert mcore-to-hf` makes of this checkpoint as policy.model_name"
            )


def _check_thawed(section: str, path: Path, was: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raises ValueError if a run would train weights without optimizer state, because they were frozen when `path` was
    written.
    """
    hf_config = _object(path.with_name(HF_CONFIG_FILE))
    has_experts = bool(family(hf_config).expert_layers(hf_config)) if hf_config else True
    before, after = (set(cast("list[str]", settings.get("freeze_config.modules") or [])) for settings in (was, now))
    thawed = {
        "freeze_moe_router": has_experts and was.get("freeze_moe_router") is True and now["freeze_moe_router"] is False,
        "freeze_config.modules": any(not any(fnmatchcase(old, new) for new in after) for old in before),
        "mtp_num_layers": was.get("mtp_num_layers") == 0 != now["mtp_num_layers"],
    }
    if names := [name for name, is_thawed in thawed.items() if is_thawed]:
        changes = "; ".join(f"{name} was {was[name]}, and is {now[name]}" for name in names)
        raise ValueError(
            f"{section}: {changes}: {path.parent} has no optimizer state of what was not trained when it was "
            "saved; set it back, or begin in another checkpointing.checkpoint_dir, with what `python -m "
            "mrl.convert mcore-to-hf` makes of this checkpoint as policy.model_name"
        )


def _object(path: Path) -> dict[str, object]:
    """JSON object in a file, or {} if it is missing or unreadable."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def find_damage(folder: Path, *, with_shards: bool = True) -> str | None:
    """The damage of a checkpoint folder: no marker, or the first file that differs from the manifest; None if whole.

    Of shards compares sizes, and the content only `with_shards`. What cannot be read is damaged, unless the file system
    gives no answer, or this user may not read it, a ValueError.
    """
    try:
        return _find_damage(folder, with_shards=with_shards)
    except TimeoutError:
        raise
    except PermissionError as error:
        raise unreadable(folder, error) from error
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"


def _find_damage(folder: Path, *, with_shards: bool) -> str | None:
    marker, manifest_path = folder / MARKER, folder / MANIFEST
    if not marker.exists() or not manifest_path.exists():
        return "it was never completed"
    if read_file(marker).decode(errors="replace") != sha256_file(manifest_path):
        return f"{MANIFEST} differs from the completion marker"
    try:
        files = _listed(folder)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, OverflowError) as error:
        return f"{MANIFEST} lists no files: {error!r}"
    for path, (size, _) in files.items():
        if not path.is_file():
            return f"{path.relative_to(folder)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(folder)} has {path.stat().st_size} bytes, the manifest says {size}"
        if not os.access(path, os.R_OK):  # shards, too, which only ranks read
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    read = {path: sha256 for path, (_, sha256) in files.items() if with_shards or not SHARD.fullmatch(path.name)}
    return find_difference(read) or None


def _listed(folder: Path) -> dict[Path, tuple[int, str]]:
    files = read_json(folder / MANIFEST)
    assert isinstance(files, dict)
    return {
        folder / name_inside(name, folder / MANIFEST): (int(file["bytes"]), str(file["sha256"]))
        for name, file in files.items()
    }
