# SPDX-License-Identifier: Apache-2.0
"""Files of a data set: one file, a folder that `datasets` saved, a folder of files, or a data set of the Hugging Face Hub."""

from __future__ import annotations

import glob
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from conversion.files.reading import name_inside, read_json
from mrl.config.model import is_hub_id
from mrl.config.schema.data import known_dataset
from mrl.data.records import SUFFIXES

if TYPE_CHECKING:
    from mrl.config.schema.data import DatasetConfig

logger = logging.getLogger(__name__)

FORMS = (".parquet", ".arrow", ".jsonl", ".json")
"""Forms in order of preference: a folder that has several holds the same rows in each."""


def find_data_files(dataset: DatasetConfig, *, setting: str) -> list[Path]:
    """The files with the rows of a data set, in order. `setting` is its config key, for messages."""
    source = dataset.source
    path = Path(source)
    try:
        if os.path.lexists(path):
            return _local_files(path, dataset, setting)
    except OSError as error:
        raise ValueError(f"{setting}.data_path={path} cannot be read: {error.strerror or error}; give one that you may read") from error
    try:
        return _files_in(_snapshot(source, dataset, setting, is_local=True), dataset, setting)
    except (LocalEntryNotFoundError, ValueError):
        logger.info("Downloading %s: the local Hugging Face cache lacks it, or its split or subset", source)
    return _files_in(_snapshot(source, dataset, setting, is_local=False), dataset, setting)


def _local_files(path: Path, dataset: DatasetConfig, setting: str) -> list[Path]:
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise ValueError(f"{setting}.data_path={path}: a file of an unknown kind; use one of {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        return _files_in(path, dataset, setting)
    raise ValueError(f"{setting}.data_path={path}: neither a file nor a folder; give one of them, or an id of the Hugging Face Hub")


def is_here(dataset: DatasetConfig, *, setting: str) -> bool:
    """True when `find_data_files` finds a data set without a download."""
    if os.path.exists(dataset.source):
        return True
    try:
        return is_hub_id(dataset.source) and bool(_files_in(_snapshot(dataset.source, dataset, setting, is_local=True), dataset, setting))
    except (LocalEntryNotFoundError, ValueError):
        return False


def _files_in(folder: Path, dataset: DatasetConfig, setting: str) -> list[Path]:
    known = known_dataset(dataset.dataset_name)
    subset, split = dataset.subset or known.subset, dataset.split or known.split
    if subset is not None and (folder / subset).is_dir():
        folder = folder / subset
    elif dataset.subset is not None:
        raise ValueError(f"{setting}.subset={dataset.subset}: no such folder in {folder}; use one of {_names(folder)}")
    saved = folder / split if (folder / "dataset_dict.json").is_file() else folder
    files = []
    # `save_to_disk` of `datasets` wrote it. `datasets.load_from_disk` would follow the names in it out of the folder.
    if (state := saved / "state.json").is_file():
        try:
            content = read_json(state)
            assert isinstance(content, dict)
            files = [saved / name_inside(str(entry["filename"]), state) for entry in content["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(f"{state} does not list the files of a data set ({error}); save it again with `save_to_disk`") from error
    files = files or ([] if saved != folder else _files_of_split(folder, split, setting))
    if not files:
        raise ValueError(
            f"{setting}: {folder} has no files of split {split}; set {setting}.split, or name a file with {setting}.data_path "
            f"(there are {_names(folder)})"
        )
    return files


def _files_of_split(folder: Path, split: str, setting: str) -> list[Path]:
    """The files that `datasets` takes for a split, by the names of files and folders; hidden ones do not count.

    The split `train` is all files if no name contains a split's. A README.md with patterns of its own, which may lead out of the folder, is
    not read.
    """
    from datasets.data_files import SPLIT_KEYWORDS, DataFilesList, EmptyDatasetError, get_data_patterns  # takes a second

    if glob.has_magic(str(folder)):
        raise ValueError(
            f"{setting}: `datasets` takes the brackets or stars in {folder} for a pattern; rename the folder, or name its files"
        )
    base = os.path.abspath(folder)
    try:
        patterns = get_data_patterns(base)
    except EmptyDatasetError:
        return []
    name = next((str(name) for name, keywords in SPLIT_KEYWORDS.items() if split in keywords), split)
    for form in FORMS:
        found = DataFilesList.from_patterns(patterns.get(name, []), base, allowed_extensions=[form])
        if files := sorted(folder / os.path.relpath(path, base) for path in found if path.lower().endswith(SUFFIXES)):
            return files
    return []


def _snapshot(hub_id: str, dataset: DatasetConfig, setting: str, *, is_local: bool) -> Path:
    split = dataset.split or known_dataset(dataset.dataset_name).split
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
