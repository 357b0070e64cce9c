"""Which files hold a data set: one file, a folder as `datasets` saves it, a snapshot of the Hub, or a repository there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from conversion.files.reading import name_inside, read_json
from mrl.config.datasets import known_dataset

if TYPE_CHECKING:
    from mrl.config.schema.data import DatasetConfig

logger = logging.getLogger(__name__)

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".jsonl.gz", ".json.gz")
SPLITS = ("train", "validation", "valid", "val", "dev", "test")
_NOT_ROWS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
_SHARD = r"([-_.]\d+([-_]of[-_]\d+)?([-_][0-9a-f]+)?)?"


def find_data_files(dataset: DatasetConfig, *, setting: str) -> list[Path]:
    """The files with the rows of a data set, in order. `setting` is its config key, for messages.

    Raises:
        ValueError: there are none.
    """
    source = dataset.source
    path = Path(source)
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise ValueError(f"{setting}.data_path={path}: a file of an unknown kind; use one of {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        return _files_in(path, dataset, setting)
    if path.exists():
        raise ValueError(f"{setting}.data_path={path}: neither a file nor a folder; give one of them, or an id of the Hugging Face Hub")
    try:
        return _files_in(_snapshot(source, dataset, setting, is_local=True), dataset, setting)
    except (LocalEntryNotFoundError, ValueError):
        logger.info("%s is not in the local Hugging Face cache, or not the part that is asked for: downloading it", source)
    return _files_in(_snapshot(source, dataset, setting, is_local=False), dataset, setting)


def _files_in(folder: Path, dataset: DatasetConfig, setting: str) -> list[Path]:
    known = known_dataset(dataset.dataset_name)
    subset, split = dataset.subset or known.subset, dataset.split or known.split
    if subset is not None and (folder / subset).is_dir():
        folder = folder / subset
    elif dataset.subset is not None:
        raise ValueError(f"{setting}.subset={dataset.subset}: no such folder in {folder}; use one of {_names(folder)}")
    files = _saved_files(folder, split) or _files_of_split(folder, split)
    if not files:
        raise ValueError(
            f"{setting}: {folder} has no files of split {split}; set {setting}.split, or name a file with {setting}.data_path "
            f"(there are {_names(folder)})"
        )
    return files


def _saved_files(folder: Path, split: str) -> list[Path]:
    """The files of what `datasets` wrote with `save_to_disk`, a data set or a dictionary of splits; none if it is neither."""
    if (folder / "dataset_dict.json").is_file():
        folder = folder / split
    state = folder / "state.json"
    if not state.is_file():
        return []
    try:
        content = read_json(state)
        assert isinstance(content, dict)
        return [folder / name_inside(str(entry["filename"]), state) for entry in content["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{state} does not list the files of a data set ({error}); save it again with `save_to_disk`") from error


def _files_of_split(folder: Path, split: str) -> list[Path]:
    """Files whose name or folder is that of the split; for train, all files if no name has any split's."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.name.lower().endswith(SUFFIXES)
        and path.name not in _NOT_ROWS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    # Where a data set is there in several forms, all have the same rows.
    forms = [[path for path in files if path.name.lower().endswith(suffix)] for suffix in SUFFIXES]
    for of_form in forms:
        if found := [path for path in of_form if _is_of_split(path.relative_to(folder), (split,))]:
            return found
    if split == "train" and not any(_is_of_split(path.relative_to(folder), SPLITS) for path in files):
        return next((of_form for of_form in forms if of_form), [])
    return []


def _is_of_split(path: Path, splits: Iterable[str]) -> bool:
    stem = path.name.split(".")[0]
    return any(split in path.parts[:-1] or re.fullmatch(re.escape(split) + _SHARD, stem) for split in splits)


def _snapshot(hub_id: str, dataset: DatasetConfig, setting: str, *, is_local: bool) -> Path:
    """The folder of a data set of the Hub, as far as its split needs it.

    Raises:
        LocalEntryNotFoundError: `is_local`, and the cache has nothing of it.
        ValueError: it cannot be downloaded.
    """
    split = dataset.split or known_dataset(dataset.dataset_name).split
    # Files of the split train may have any name.
    names = [f"*{suffix}" for suffix in SUFFIXES] if split == "train" else [f"*{split}*"]
    if is_local:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=names, local_files_only=True))
    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=names))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{setting}: the data set {hub_id} is neither in the local Hugging Face cache nor to be downloaded: {error}; "
            f"download it on a host with a network, or set {setting}.data_path to a folder of its files"
        ) from error


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(names[:10]) or "none"
