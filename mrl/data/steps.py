# SPDX-License-Identifier: Apache-2.0
"""How many steps the rows of a run are enough for."""

from __future__ import annotations

import math
import os
from itertools import islice

from mrl.config.errors import NotKnown
from mrl.config.schema.data import DatasetConfig, TrainDatasetConfig
from mrl.config.schema.run import RunConfig
from mrl.data.records import records


def num_steps_of(config: RunConfig, num_rows: int) -> int:
    """Steps that all epochs over so many training rows have. ValueError: they do not fill one."""
    training, algorithm = config.training, config.algorithm
    key = f"{algorithm}.num_prompts_per_step" if config.has_engines else "policy.train_global_batch_size"
    size = config.rollouts.num_prompts_per_step if config.has_engines else config.policy.train_global_batch_size
    num_steps = training.max_num_epochs * num_rows // size
    if num_steps == 0:
        raise ValueError(
            f"{key}={size}: {training.max_num_epochs} epochs of {num_rows} rows do not fill one step, and the run would train nothing; "
            f"lower it, raise {algorithm}.max_num_epochs or give more rows"
        )
    return num_steps


def find_few_rows(config: RunConfig) -> list[str]:
    """Says that the data sets that are here have fewer rows than one step takes. Reads no more rows than that takes.

    Rows are counted, not checked. A data set that is not here is another rule's to report.
    """
    try:
        size = config.rollouts.num_prompts_per_step if config.has_engines else config.policy.train_global_batch_size
        sets = config.data.train_sets
        if not all(os.path.exists(dataset.source) for dataset in sets.values()):
            return []
        num_rows = sum(_num_kept(key, dataset, size) for key, dataset in sets.items())
        num_steps_of(config, num_rows)
    except NotKnown:
        return []
    except ValueError as error:
        return [str(error)]
    return []


def _num_kept(key: str, dataset: TrainDatasetConfig, enough: int) -> int:
    """Rows of a data set that are not held out; where it has more than `enough`, perhaps fewer than it has."""
    held_out = dataset.held_out
    most = enough + held_out if held_out >= 1 else enough / (1 - held_out) + 1
    num_rows = min(_num_rows(key, dataset, math.ceil(most)) * dataset.repeat, dataset.max_samples or 2**62)
    return max(0, num_rows - (int(held_out) if held_out >= 1 else math.ceil(held_out * num_rows)))


def _num_rows(key: str, dataset: DatasetConfig, most: int) -> int:
    from mrl.data.files import find_data_files  # imports the client of the Hub, which checks of other files do without

    files = find_data_files(dataset, setting=key)
    return sum(1 for _ in islice((record for path in files for record in records(path)), most))
