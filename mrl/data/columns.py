# SPDX-License-Identifier: Apache-2.0
"""Parameters of the user's reward functions that name no column of the rows: one problem of the function each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from mrl.config.errors import Problem
from mrl.config.own import REWARD
from mrl.data.fields import RowError, json_object
from mrl.data.records import records

if TYPE_CHECKING:
    from mrl.data.reading import Reader
    from mrl.types import Prompt

NUM_ROWS = 20
"""Rows of a data set that are looked at: rows of one data set have mostly the same columns."""


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
        for record in islice((record for path in reader.files[:1] for record in records(path)), NUM_ROWS):
            try:
                if not record.fault:
                    _, prompt = reader.parse(json_object(record.line)).value
                    note(functions.get(prompt.env_name, ""), ())
            except LacksColumns as error:
                note(error.path, error.missing)
                columns |= dict.fromkeys(error.columns)
            except RowError:
                continue  # a bad row, which is told with all of them
    values = (*REWARD.parameters, *REWARD.synonyms)
    known = list(dict.fromkeys((*values, *columns)))
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
        for parameter in sorted(lacking.get(path, set()) - set(values))
    ]
