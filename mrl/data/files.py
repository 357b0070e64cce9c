# SPDX-License-Identifier: Apache-2.0
"""Files of a data set: one file, a folder that `datasets` saved, a folder of files, or a Hugging Face Hub data set."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from conversion.files.reading import name_inside, read_file, read_json
from mrl.config.files import read_yaml
from mrl.config.model import is_hub_id
from mrl.config.schema.data import known_dataset
from mrl.config.schema.env import FROM_VERIFIERS
from mrl.data.records import SUFFIXES
from mrl.data.verifiers import find_rows

if TYPE_CHECKING:
    from datasets.utils.metadata import MetadataConfigs

    from mrl.config.schema.data import DatasetConfig
    from mrl.config.schema.env import EnvConfig

logger = logging.getLogger(__name__)

HEADER, STANDALONE_HEADER = "README.md", ".huggingface.yaml"
"""Files that may say which configs a data set has, and where their files are:
https://huggingface.co/docs/hub/datasets-manual-configuration."""

FORMS = (".parquet", ".arrow", ".jsonl", ".json")
"""Forms in order of preference: a folder that has several holds the same rows in each."""


def find_data_files(dataset: DatasetConfig, *, setting: str, section: EnvConfig | None = None) -> list[Path]:
    """The files with the rows of a data set, in order. `setting` is its config key, for messages.

    `section` has the environments of verifiers whose rows a data set may be.
    """
    source = dataset.source
    if section is not None and source.startswith(FROM_VERIFIERS):
        return [find_rows(source, section, split=split_of(dataset, setting))]
    path = Path(source)
    try:
        if os.path.lexists(path):
            return _local_files(path, dataset, setting)
    except OSError as error:
        raise ValueError(
            f"{setting}.data_path={path} cannot be read: {error.strerror or error}; give one that you may read"
        ) from error
    known = list[Path]()
    try:
        folder = _snapshot(source, dataset, setting, is_local=True)
        known = _files_in(folder, dataset, setting)
        if (folder / HEADER).exists():
            return known
        logger.info("Downloading %s of %s: the local Hugging Face cache lacks it", HEADER, source)
    except (LocalEntryNotFoundError, ValueError):
        logger.info("Downloading %s: the local Hugging Face cache lacks it, or its split or subset", source)
    try:
        folder = _snapshot(source, dataset, setting, is_local=False)
    except ValueError:
        if not known:
            raise
        logger.warning(
            "%s: %s of %s cannot be downloaded; its files are chosen by their names", setting, HEADER, source
        )
        return known
    return _files_in(folder, dataset, setting)


def split_of(dataset: DatasetConfig, setting: str) -> str:
    """The split of a verifiers environment's data that a data set reads: its own, or that of its place."""
    return dataset.split or ("validation" if setting.startswith("data.validation") else "train")


def _local_files(path: Path, dataset: DatasetConfig, setting: str) -> list[Path]:
    if path.is_file():
        if not path.name.lower().endswith(SUFFIXES):
            raise ValueError(f"{setting}.data_path={path}: a file of an unknown kind; use one of {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        return _files_in(path, dataset, setting)
    raise ValueError(
        f"{setting}.data_path={path}: neither a file nor a folder; give one of them, or an id of the Hugging Face Hub"
    )


def is_here(dataset: DatasetConfig, *, setting: str) -> bool:
    """True if `find_data_files` finds a data set without a download."""
    if os.path.exists(dataset.source) or dataset.source.startswith(FROM_VERIFIERS):
        return True
    try:
        return is_hub_id(dataset.source) and bool(
            _files_in(_snapshot(dataset.source, dataset, setting, is_local=True), dataset, setting)
        )
    except (LocalEntryNotFoundError, ValueError):
        return False


def _files_in(folder: Path, dataset: DatasetConfig, setting: str) -> list[Path]:
    known = known_dataset(dataset.dataset_name)
    subset, split = dataset.subset or known.subset, dataset.split or known.split
    if configs := _configs(folder):
        if subset in configs or not (dataset.subset is not None and (folder / dataset.subset).is_dir()):
            return _files_of_config(folder, _chosen(configs, dataset, folder, setting), split, setting)
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
            raise ValueError(
                f"{state} does not list the files of a data set ({error}); save it again with `save_to_disk`"
            ) from error
    files = files or ([] if saved != folder else _files_of_split(folder, split, setting))
    if not files:
        raise ValueError(
            f"{setting}: {folder} has no files of split {split}; set {setting}.split, or name a file with "
            f"{setting}.data_path (there are {_names(folder)})"
        )
    return files


def _files_of_split(folder: Path, split: str, setting: str) -> list[Path]:
    """The files that `datasets` takes for a split, by the names of files and folders; hidden ones do not count.

    The split `train` is all files if no name contains a split's.
    """
    from datasets.data_files import SPLIT_KEYWORDS, EmptyDatasetError, get_data_patterns  # takes a second

    if glob.has_magic(str(folder)):
        raise ValueError(
            f"{setting}: `datasets` takes the brackets or stars in {folder} for a pattern; rename the folder, or "
            "name its files"
        )
    try:
        patterns = get_data_patterns(os.path.abspath(folder))
    except EmptyDatasetError:
        return []
    name = next((str(name) for name, keywords in SPLIT_KEYWORDS.items() if split in keywords), split)
    return sorted(_matching(folder, patterns.get(name, [])))


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first of `FORMS` that match, in the order of `datasets`."""
    from datasets.data_files import DataFilesList  # takes a second

    base = os.path.abspath(folder)
    for form in FORMS:
        try:
            found = DataFilesList.from_patterns(list(patterns), base, allowed_extensions=[form])
        except FileNotFoundError:
            continue
        if files := [folder / os.path.relpath(path, base) for path in found if path.lower().endswith(SUFFIXES)]:
            return files
    return []


def _configs(folder: Path) -> MetadataConfigs | None:
    """The configs that the header of a data set names, as `datasets` reads it; None: no header, or it names none."""
    if not any((folder / name).is_file() for name in (HEADER, STANDALONE_HEADER)):
        return None
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        text = _text(folder / HEADER) if (folder / HEADER).is_file() else ""
        if block := REGEX_YAML_BLOCK.search(text):
            read_yaml(block[2])
        data = DatasetCard(text).data if text else DatasetCardData()
        if (folder / STANDALONE_HEADER).is_file():
            more = cast(dict[str, Any], read_yaml(_text(folder / STANDALONE_HEADER)) or {})
            data = DatasetCardData(**data.to_dict() | more)
        return MetadataConfigs.from_dataset_card_data(data) or None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the header of {folder / HEADER} is not one that `datasets` reads ({error}); correct it"
        ) from error


def _text(path: Path) -> str:
    return read_file(path).decode()


def _chosen(configs: MetadataConfigs, dataset: DatasetConfig, folder: Path, setting: str) -> tuple[str, dict[str, Any]]:
    subset, names = dataset.subset or known_dataset(dataset.dataset_name).subset, ", ".join(configs)
    if subset is not None and subset in configs:
        return subset, configs[subset]
    if dataset.subset is not None:
        raise ValueError(f"{setting}.subset={dataset.subset}: {folder / HEADER} has no such config; use one of {names}")
    default = configs.get_default_config_name()
    if default is None:
        raise ValueError(
            f"{setting}: {folder / HEADER} names several configs, and none as default; set {setting}.subset to one "
            f"of {names}"
        )
    return default, configs[default]


def _files_of_config(folder: Path, config: tuple[str, dict[str, Any]], split: str, setting: str) -> list[Path]:
    """The files of a split in one config of a header. ValueError: it has none, or leads out of the folder."""
    from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns  # takes a second

    name, content = config
    for pattern in _patterns_of(content):
        if "://" in pattern or os.path.isabs(pattern) or ".." in Path(pattern).parts:
            raise ValueError(
                f"{setting}: config {name} in {folder / HEADER} leads out of the folder ({pattern}); correct it, "
                "or name files"
            )
    inside = folder / (content.get("data_dir") or "")
    try:
        data_files = content.get("data_files")
        patterns = get_data_patterns(os.path.abspath(inside)) if data_files is None else sanitize_patterns(data_files)
    except EmptyDatasetError:
        patterns = {}
    files = _matching(inside, patterns.get(split, []))
    if not files:
        splits = ", ".join(map(str, patterns)) or "none"
        kinds = ", ".join(SUFFIXES)
        raise ValueError(
            f"{setting}: config {name} of {folder / HEADER} has no files ({kinds}) of split {split}; set "
            f"{setting}.split (it has {splits}), "
            f"or name a file with {setting}.data_path"
        )
    return files


def _patterns_of(content: Mapping[str, Any]) -> list[str]:
    given = content.get("data_files") or []
    entries = given if isinstance(given, list) else [given]
    paths = [entry["path"] if isinstance(entry, dict) else entry for entry in entries]
    folder = str(content.get("data_dir") or "")
    return [folder] * bool(folder) + [
        str(part) for path in paths for part in (path if isinstance(path, list) else [path])
    ]


def _snapshot(hub_id: str, dataset: DatasetConfig, setting: str, *, is_local: bool) -> Path:
    split = dataset.split or known_dataset(dataset.dataset_name).split
    names = [f"*{suffix}" for suffix in SUFFIXES] if split == "train" else [f"*{split}*"]
    headers = [HEADER, STANDALONE_HEADER]
    if is_local:
        return Path(
            snapshot_download(hub_id, repo_type="dataset", allow_patterns=[*names, *headers], local_files_only=True)
        )
    try:
        folder = Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=headers))
        if configs := _configs(folder):
            content = _chosen(configs, dataset, folder, setting)[1]
            inside = f"{content['data_dir'].rstrip('/')}/" if content.get("data_dir") else ""
            listed = [f"{inside}{pattern}" for pattern in _patterns_of({"data_files": content.get("data_files")})] or [
                f"{inside}*"
            ]
            names = [form for pattern in listed for form in (pattern, pattern.replace("**/", ""))]
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=[*names, *headers]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{setting}: the data set {hub_id} is neither in the local Hugging Face cache nor to be downloaded: "
            f"{error}; download it on a host with a network, or set {setting}.data_path to a folder of its files"
        ) from error


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return ", ".join(names[:10]) or "none"
