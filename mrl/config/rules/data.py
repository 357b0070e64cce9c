"""Rules of section `data`: data sets that are known and can be found, processors, prompt files, environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.config.datasets import DATASETS, GYM_PROCESSOR, PROCESSORS, known_dataset
from mrl.config.errors import Problems, Unprovided
from mrl.config.model import is_hub_id, is_prepared
from mrl.config.rules.environments import NEMO_GYM, environment_names
from mrl.config.schema.data import DataConfig, DataDefaultConfig, DatasetConfig, TrainDatasetConfig
from mrl.config.schema.run import RunConfig


def train_datasets(data: DataConfig) -> Iterator[tuple[str, TrainDatasetConfig]]:
    """Every training set with the key that it stands under: `data.train`, or `data.train.datasets[0]` and so on."""
    if data.train.datasets is None:
        yield "data.train", data.train
    for index, dataset in enumerate(data.train.datasets or ()):
        yield f"data.train.datasets[{index}]", dataset


def validation_datasets(data: DataConfig) -> Iterator[tuple[str, DatasetConfig]]:
    """Every data set of `data.validation` with the key that it stands under."""
    section = data.validation
    if section is None:
        return
    if section.datasets is None:
        yield "data.validation", section
    for index, dataset in enumerate(section.datasets or ()):
        yield f"data.validation.datasets[{index}]", dataset


def key_of(name: str, default: DataDefaultConfig, dataset: DatasetConfig, key: str) -> str:
    """The key that gave a data set at `key` its value of `name`: its own, or that of `data.default`."""
    return f"data.default.{name}" if vars(default)[name] == vars(dataset)[name] else f"{key}.{name}"


def check_data(config: RunConfig, problems: Problems) -> None:
    """Adds the problems of section `data`."""
    data = config.data
    for key, dataset in (*train_datasets(data), *validation_datasets(data)):
        _check_source(key, dataset, data.default, problems)
        _check_processing(key, dataset, data.default, problems)
        names = (*environment_names(config.env), NEMO_GYM)
        # The rules of environments check data.default.env_name.
        if config.has_engines and dataset.env_name not in (*names, data.default.env_name):
            problems.add(f"{key}.env_name", "no such environment", f"use one of {', '.join(names)}")
    for key, section in (("data.train", data.train), ("data.validation", data.validation)):
        if section is not None and section.datasets == []:
            problems.extend([f"{key}=[]: a list of data sets has one at least; give a data set"])


def _check_source(key: str, dataset: DatasetConfig, default: DataDefaultConfig, problems: Problems) -> None:
    name, path = dataset.dataset_name, dataset.data_path
    if name is not None and name not in DATASETS:
        name_key = key_of("dataset_name", default, dataset, key)
        problems.add(name_key, "no such data set is known", f"leave it out, or use one of {', '.join(DATASETS)}")
    elif path is None and known_dataset(name).hub_id is None:
        problems.extend([f"{key}.data_path is required and has no default; set it in the config file or as {key}.data_path=VALUE"])
    elif path is not None and not os.path.exists(path) and not is_hub_id(path):
        way_out = (
            "correct the path: it names a .jsonl, .json, .parquet or .arrow file, a folder of them, "
            "or a data set's id on the Hugging Face Hub"
        )
        if is_prepared(path):
            way_out = "correct the path (`python -m mrl.prepare tiny` makes prepared/tiny/data)"
        problems.add(f"{key}.data_path", f"no such file or folder in {Path.cwd()}", way_out, Unprovided)


def _check_processing(key: str, dataset: DatasetConfig, default: DataDefaultConfig, problems: Problems) -> None:
    for name, path in (("prompt_file", dataset.prompt_file), ("system_prompt_file", dataset.system_prompt_file)):
        file_key = key_of(name, default, dataset, key)
        if path is not None and dataset.processor == GYM_PROCESSOR:
            rule = f"processor={GYM_PROCESSOR} leaves conversations as the rows give them"
            problems.add(file_key, rule, "set it to null, or use another processor")
        elif path is not None and not os.path.isfile(path):
            problems.add(file_key, f"no such file in {Path.cwd()}", "correct the path", Unprovided)
    if dataset.processor not in PROCESSORS:
        processor_key = key_of("processor", default, dataset, key)
        problems.add(processor_key, "no such processor", f"use one of {', '.join(PROCESSORS)}")
