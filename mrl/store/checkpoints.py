# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run folder: written aside, sealed by a manifest and a completion marker, then renamed.

A folder `step_N` without its marker, or with a file that differs from the manifest, does not exist for a resuming run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conversion.files.durable import sync_file, write_atomic
from conversion.files.manifest import FileRecord, file_record
from conversion.files.reading import find_difference, name_inside, read_file, read_json, sha256_file
from mrl.config.schema.run import CheckpointingConfig, RunConfig
from mrl.phases import ModelName
from mrl.store.ownership import unowned
from mrl.types import RunState

logger = logging.getLogger(__name__)

RUN_CONFIG = "config.yaml"
"""Beside the checkpoints: the config of the newest attempt."""
MANIFEST = "manifest.json"
MARKER = "COMPLETE"
STATE = "training_info.json"
MODEL_FOLDERS: Mapping[ModelName, str] = {"policy": "policy", "critic": "value"}
"""Of the models that runs train, in a checkpoint. Names as in NeMo RL."""
STEP_FOLDER = re.compile(r"step_(\d+)")
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
        """The same of any model that the run trains."""
        return self.folder / MODEL_FOLDERS[model] / "weights"

    def shards(self, num_ranks: int) -> list[dict[Path, str]]:
        """The shards that each of `num_ranks` ranks compares with their sha256: its own where as many ranks have written them."""
        shares: list[dict[Path, str]] = [{} for _ in range(num_ranks)]
        for path, (_, sha256) in _listed(self.folder).items():
            if (match := SHARD.fullmatch(path.name)) is not None:
                shares[int(match[1]) % num_ranks][path] = sha256
        return shares

    def state(self) -> RunState:
        return RunState(**json.loads(read_file(self.folder / STATE)))


class CheckpointStore:
    """The `step_N` folders below one run folder."""

    def __init__(self, folder: Path, settings: CheckpointingConfig, *, check_owner: Callable[[], None] = unowned) -> None:
        """`settings` say which checkpoints to keep. `check_owner` raises if another process owns the folder by now."""
        self.folder = folder
        self._check_owner = check_owner
        self.keep_top_k = settings.keep_top_k
        self.keep_latest_k = settings.ft_keep_latest_k or 1
        self.save_period = settings.save_period
        self.metric_name = None if settings.metric_name is None else settings.metric_name.replace(":", "/", 1)
        self.higher_is_better = settings.higher_is_better

    def begin(self, state: RunState, models: Iterable[ModelName] = ("policy",)) -> Checkpoint:
        """Makes a folder with `state`, into which the models write their weights; `commit` turns it into a checkpoint."""
        if self.metric_name is not None and self.metric_name not in state.metrics:
            logger.warning("step %d has no metric %s (checkpointing.metric_name): its checkpoint ranks last", state.step, self.metric_name)
        aside = self.folder / f"tmp_step_{state.step}"
        shutil.rmtree(aside, ignore_errors=True)
        pending = Checkpoint(state.step, aside)
        for model in models:
            pending.weights_of(model).mkdir(parents=True)
        (aside / STATE).write_text(json.dumps(dataclasses.asdict(state), indent=1), encoding="utf-8")
        return pending

    def commit(self, pending: Checkpoint, on_disk: Mapping[str, FileRecord]) -> Checkpoint:
        """Seals and publishes a written folder: manifest, sync, marker, rename. Then removes checkpoints that `settings` do not keep.

        `on_disk` has the files of the weights that their writers have synced, by path below `pending.folder`.
        """
        records = {Path(name): record for name, record in on_disk.items()}
        for name in sorted({path.relative_to(pending.folder) for path in pending.folder.rglob("*") if path.is_file()} - records.keys()):
            sync_file(pending.folder / name)
            records[name] = file_record(pending.folder / name)
        manifest = {str(name): {"bytes": record.size, "sha256": record.sha256} for name, record in sorted(records.items())}
        write_atomic(pending.folder / MANIFEST, json.dumps(manifest, indent=1))
        for path in pending.folder.rglob("*"):
            if path.is_dir():
                sync_file(path)
        write_atomic(pending.folder / MARKER, sha256_file(pending.folder / MANIFEST))
        self._check_owner()
        final = self.folder / f"step_{pending.step}"
        replaced = self.folder / f"tmp_old_step_{pending.step}"
        if final.exists():
            final.rename(replaced)
        pending.folder.rename(final)
        sync_file(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()
        return Checkpoint(pending.step, final)

    def newest(self, *, before: float = math.inf, with_shards: bool = False) -> Checkpoint | None:
        """The newest checkpoint before step `before` that agrees with its manifest; warns of each newer one that does not.

        Without `with_shards` only the sizes of shards are compared: hundreds of GB, which the ranks read faster than one process does.
        """
        for checkpoint in self._newest_first():
            if checkpoint.step >= before:
                continue
            problem = find_damage(checkpoint.folder, with_shards=with_shards)
            if problem is None:
                return checkpoint
            logger.warning("passing over %s: %s", checkpoint.folder, problem)
        return None

    def remove_unfinished(self) -> None:
        """Removes folders of interrupted saves. Only the run that owns the folder may call this."""
        for pattern in ("tmp_step_*", "tmp_old_step_*"):
            for folder in self.folder.glob(pattern):
                logger.info("removing %s, left by an interrupted save", folder)
                shutil.rmtree(folder, ignore_errors=True)

    def _newest_first(self) -> list[Checkpoint]:
        matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in self.folder.glob("step_*")]
        return sorted((Checkpoint(int(match[1]), path) for match, path in matches if match), key=lambda found: -found.step)

    def _prune(self) -> None:
        def rank(checkpoint: Checkpoint) -> tuple[float, int]:
            # Best first: by the metric, if there is one (absent counts as worst), then newest first.
            value = None if self.metric_name is None else checkpoint.state().metrics.get(self.metric_name)
            if value is None:
                return (float("inf"), -checkpoint.step)
            return (-value if self.higher_is_better else value, -checkpoint.step)

        newest_first = self._newest_first()
        periodic = [checkpoint for checkpoint in newest_first if checkpoint.step % self.save_period == 0]
        kept = newest_first[: self.keep_latest_k] + sorted(periodic, key=rank)[: self.keep_top_k]
        for checkpoint in newest_first:
            if checkpoint not in kept:
                # The marker goes first, so that an interrupted removal leaves nothing that looks complete.
                (checkpoint.folder / MARKER).unlink(missing_ok=True)
                shutil.rmtree(checkpoint.folder, ignore_errors=True)


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint with a completion marker, whose bytes nobody looks at; 0 if there is none."""
    found = (STEP_FOLDER.fullmatch(marker.parent.name) for marker in folder.glob(f"step_*/{MARKER}"))
    return max((int(match[1]) for match in found if match), default=0)


def check_models(checkpoint: Checkpoint, config: RunConfig) -> None:
    """ValueError if a checkpoint from which a run would resume lacks a model that the run trains, because another algorithm wrote it.

    One that is damaged is passed over later.
    """
    missing = [model for model in config.trained_models if not checkpoint.weights_of(model).is_dir()]
    if missing and find_damage(checkpoint.folder, with_shards=False) is None:
        raise ValueError(
            f"checkpointing.checkpoint_dir={config.checkpointing.checkpoint_dir}: {checkpoint.folder} holds no {' and no '.join(missing)}, "
            f"and a run of algorithm={config.algorithm} resumes with all models that it trains; choose another folder, or the algorithm "
            "that wrote this one (`python -m mrl.convert mcore-to-hf` makes a folder for policy.model_name of its policy)"
        )


def find_damage(folder: Path, *, with_shards: bool = True) -> str | None:
    """The damage of a checkpoint folder: no marker, or the first file that differs from the manifest; None if it is whole.

    Of shards compares sizes, and the content only `with_shards`.
    """
    marker, manifest_path = folder / MARKER, folder / MANIFEST
    if not marker.exists() or not manifest_path.exists():
        return "it was never completed"
    if read_file(marker).decode(errors="replace") != sha256_file(manifest_path):
        return f"{MANIFEST} differs from the completion marker"
    try:
        files = _listed(folder)
    # Its checksum is right, so its writer made it so.
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        return f"{MANIFEST} lists no files: {error!r}"
    for path, (size, _) in files.items():
        if not path.is_file():
            return f"{path.relative_to(folder)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(folder)} has {path.stat().st_size} bytes, the manifest says {size}"
    read = {path: sha256 for path, (_, sha256) in files.items() if with_shards or not SHARD.fullmatch(path.name)}
    return find_difference(read) or None


def _listed(folder: Path) -> dict[Path, tuple[int, str]]:
    """Size and sha256 of every file that the manifest lists."""
    files = read_json(folder / MANIFEST)
    assert isinstance(files, dict)
    return {folder / name_inside(name, folder / MANIFEST): (int(file["bytes"]), str(file["sha256"])) for name, file in files.items()}
