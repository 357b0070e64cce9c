"""Rules of section `data`: data sets that are known and can be found, processors, prompt files, environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mrl.config.datasets import DATASETS, GYM_PROCESSOR, PROCESSORS, known_dataset
from mrl.config.errors import Unprovided
from mrl.config.hub import is_hub_id, is_prepared
from mrl.config.rules.environments import NEMO_GYM, environment_names
from mrl.config.rules.ranges import spell
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


def find_data_problems(config: RunConfig) -> list[str]:
    """Every problem of section `data`, one text each."""
    data, problems = config.data, []
    for key, dataset in (*train_datasets(data), *validation_datasets(data)):
        problems += _source(key, dataset, data.default) + _processing(key, dataset, data.default)
        problems += _environment(key, dataset, config) if config.has_engines else []
    for index, dataset in enumerate(data.train.datasets or ()):
        if dataset.held_out < 0:
            key = f"data.train.datasets[{index}].split_validation_size"
            problems.append(_problem(key, dataset.split_validation_size, "out of range", "use a number that is at least 0"))
    for key, section in (("data.train", data.train), ("data.validation", data.validation)):
        if section is not None and section.datasets == []:
            problems.append(f"{key}=[]: a list of data sets has one at least; give a data set")
    # Data sets that follow data.default repeat its problems.
    return list(dict.fromkeys(problems))


def _problem(key: str, value: object, rule: str, way_out: str) -> str:
    return f"{key}={spell(value)}: {rule}; {way_out}"


def _source(key: str, dataset: DatasetConfig, default: DataDefaultConfig) -> list[str]:
    name, path = dataset.dataset_name, dataset.data_path
    if name is not None and name not in DATASETS:
        name_key = key_of("dataset_name", default, dataset, key)
        return [_problem(name_key, name, "no such data set is known", f"leave it out, or use one of {', '.join(DATASETS)}")]
    if path is None and known_dataset(name).hub_id is None:
        return [f"{key}.data_path is required and has no default; set it in the config file or as {key}.data_path=VALUE"]
    if path is not None and not os.path.exists(path) and not is_hub_id(path):
        way_out = "correct the path"
        if is_prepared(path):
            way_out += " (`python -m mrl.prepare tiny` makes prepared/tiny/data)"
        else:
            way_out += ": it names a .jsonl, .json, .parquet or .arrow file, a folder of them, or a data set's id on the Hugging Face Hub"
        return [Unprovided(_problem(f"{key}.data_path", path, f"no such file or folder in {Path.cwd()}", way_out))]
    return []


def _processing(key: str, dataset: DatasetConfig, default: DataDefaultConfig) -> list[str]:
    problems = []
    if dataset.repeat < 1:
        problems.append(_problem(f"{key}.repeat", dataset.repeat, "out of range", "use a number that is at least 1"))
    for name, path in (("prompt_file", dataset.prompt_file), ("system_prompt_file", dataset.system_prompt_file)):
        file_key = key_of(name, default, dataset, key)
        if path is not None and dataset.processor == GYM_PROCESSOR:
            rule = f"processor={GYM_PROCESSOR} leaves conversations as the rows give them"
            problems.append(_problem(file_key, path, rule, "set it to null, or use another processor"))
        elif path is not None and not os.path.isfile(path):
            problems.append(Unprovided(_problem(file_key, path, f"no such file in {Path.cwd()}", "correct the path")))
    if dataset.processor not in PROCESSORS:
        processor_key = key_of("processor", default, dataset, key)
        problems.append(_problem(processor_key, dataset.processor, "no such processor", f"use one of {', '.join(PROCESSORS)}"))
    return problems


def _environment(key: str, dataset: DatasetConfig, config: RunConfig) -> list[str]:
    names = (*environment_names(config.env), NEMO_GYM)
    # What data.default says is checked with the environments.
    if dataset.env_name in (*names, config.data.default.env_name):
        return []
    return [_problem(f"{key}.env_name", dataset.env_name, "no such environment", f"use one of {', '.join(names)}")]
