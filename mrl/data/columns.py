# SPDX-License-Identifier: Apache-2.0
"""Parameters of the user's reward functions that name no column of the rows: one problem of the function each."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from mrl.config.errors import Problem
from mrl.config.own import MISSPELT, REWARD, find_reward, is_path
from mrl.config.rules.data import route_of
from mrl.config.schema.env import FROM_VERIFIERS
from mrl.data.fields import REQUEST, RowError, agent_of, json_object
from mrl.data.records import records

if TYPE_CHECKING:
    from mrl.config.schema.data import DatasetConfig
    from mrl.config.schema.env import EnvConfig
    from mrl.data.reading import Reader
    from mrl.types import Prompt

_VALUES = (*REWARD.parameters, *REWARD.synonyms)
NUM_ROWS, NUM_NAMED = 20, 1000
"""Rows of a data set that are looked at for columns, which are mostly the same, and for names of environments."""


class LacksColumns(RowError):
    """A reward function has parameters that are neither values of mrl nor columns of the row."""

    def __init__(self, path: str, missing: list[str], columns: Iterable[str], *, has_answer: bool) -> None:
        self.path, self.missing, self.columns = path, missing, list(columns)
        elsewhere = "" if has_answer else ", name the column of the answers in data.train.output_key"
        super().__init__(
            f"{path} takes {', '.join(missing)}, and the row has no such "
            f"column{'' if has_answer else ', and no answer'}; beside its question{' and answer' * has_answer} it has "
            f"{', '.join(self.columns) or 'none'}; complete the row{elsewhere}, rename the parameter, or give it "
            "a default"
        )


def find_lacking(readers: Iterable[Reader[tuple[str, Prompt]]], functions: Mapping[str, str]) -> list[Problem]:
    """Problems of the `functions` (environment -> path) with a parameter that the first rows of no data set have.

    If a row has the column, those that lack it are bad rows.
    """
    lacking, columns, settings = dict[str, set[str]](), dict[str, None](), list[str]()

    def note(path: str, missing: Iterable[str]) -> None:
        lacking.setdefault(path, set(missing)).intersection_update(missing)

    for reader in readers:
        settings.append(reader.setting)
        for found in _first_rows(reader):
            if isinstance(found, LacksColumns):
                note(found.path, found.missing)
                columns |= dict.fromkeys(found.columns)
            else:
                note(functions.get(found.env_name, ""), ())
    known = list(dict.fromkeys((*_VALUES, *columns)))
    return [
        Problem(
            "environments/own",
            f"env.own.functions.{name}",
            path,
            f"it takes {parameter}, which is no value of mrl and no column of {' and '.join(settings)}; the nearest is "
            f"{difflib.get_close_matches(parameter, known, n=1, cutoff=0.0)[0]}",
            f"rename the parameter, or give it a default; there are {', '.join(known)}",
        )
        for name, path in functions.items()
        for parameter in sorted(lacking.get(path, set()) - set(_VALUES))
    ]


def find_idle(
    readers: Iterable[Reader[tuple[str, Prompt]]], functions: Mapping[str, str], *, only_misspelt: bool = False
) -> list[str]:
    """Says which parameters of the `functions` keep their defaults, as no first row has such a column.

    With `only_misspelt` those whose names are much like another: constants have defaults, too.
    """
    columns = dict[str, set[str]]()
    for prompt in (found for reader in readers for found in _first_rows(reader)):
        if not isinstance(prompt, LacksColumns):
            columns.setdefault(prompt.env_name, set()).update(json.loads(prompt.row))
    said = []
    for name, path in functions.items():
        found = columns.get(name)
        for parameter in find_reward(path).optional if found is not None else ():
            if found is not None and parameter not in found:
                near = difflib.get_close_matches(parameter, (*_VALUES, *found), n=1, cutoff=MISSPELT)
                if only_misspelt and not near:
                    continue
                nearest = f"; the nearest of them is {near[0]}" if near else ""
                said.append(
                    f"env.own.functions.{name}={path}: {parameter} keeps its default, as it is neither a column of the "
                    f"rows nor a name of mrl's{nearest}"
                )
    return said


def find_unasked(readers: Iterable[Reader[tuple[str, Prompt]]], named: Mapping[str, str]) -> list[str]:
    """Says which of the user's environments (`key.name` -> path, URL or Python) no first row has as its own."""
    asked = {_environment(found, named) for reader in readers for found in _first_rows(reader)}
    if not asked:
        return []
    return [
        f"{key}={path}: none of the first rows has the environment {name}, but {', '.join(sorted(asked))}; "
        + (
            f"data.train.data_path={FROM_VERIFIERS}{name} asks its rows"
            if key.startswith("env.verifiers.")
            else f"data.default.env_name={name} gives it all rows that name none"
        )
        for key, path in named.items()
        if (name := key.rpartition(".")[2]) not in asked
    ]


def environments_asked(sets: Mapping[str, DatasetConfig], section: EnvConfig) -> list[str]:
    """The environments of data sets' first rows; of a set whose rows are not on this machine, its own."""
    found = dict[str, None]()
    for key, dataset in sets.items():
        if dataset.source.startswith(FROM_VERIFIERS):
            found[dataset.source.removeprefix(FROM_VERIFIERS)] = None
        elif not os.path.exists(dataset.source) or is_path(dataset.processor):  # which may name any
            found[dataset.env_name] = None
        else:
            found |= dict.fromkeys(_named_by_rows(key, dataset, section))
    return list(found)


def _named_by_rows(key: str, dataset: DatasetConfig, section: EnvConfig) -> Iterator[str]:
    from mrl.data.files import find_data_files  # imports the client of the Hub, which checks of other files do without

    for record in islice((one for path in find_data_files(dataset, setting=key) for one in records(path)), NUM_NAMED):
        with suppress(RowError):  # a bad row, which the look at rows tells
            fields = {} if record.fault else json_object(record.line)
            named, agent = fields.get("env_name"), agent_of(fields) if REQUEST in fields else None
            if isinstance(named, str):
                yield named
            else:
                yield (route_of(agent, section) or agent) if agent is not None else dataset.env_name


def _environment(found: Prompt | LacksColumns, named: Mapping[str, str]) -> str:
    if isinstance(found, LacksColumns):
        return next((key.rpartition(".")[2] for key, path in named.items() if path == found.path), "")
    return found.env_name


def _first_rows(reader: Reader[tuple[str, Prompt]]) -> Iterator[Prompt | LacksColumns]:
    for record in islice((record for path in reader.files[:1] for record in records(path)), NUM_ROWS):
        try:
            if not record.fault:
                yield reader.parse(json_object(record.line)).value[1]
        except LacksColumns as error:
            yield error
        except RowError:
            continue  # a bad row, which is told with all of them
