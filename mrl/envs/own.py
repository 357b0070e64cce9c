# SPDX-License-Identifier: Apache-2.0
"""The user's own reward functions, called by their parameters' names. Runs in `mrl.envs.child`."""

from __future__ import annotations

import json
import numbers
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import env
from mrl.config.own import ANSWERS, BATCHED, QUESTIONS, REWARD, Hook, find_reward
from mrl.envs.task import MASK_SAMPLE, Environment, Outcome, Score, Task

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

MAX_COLUMN_CHARACTERS = 1000
TOTALS = ("reward", "score")
"""Keys of a returned dict that hold the reward itself. `score` is verl's."""

COLUMN_FIRST = (*QUESTIONS, *ANSWERS, "ground_truth")
"""Names of which a row's column of that name is meant, if it has one beside question and answer."""
SHARED = ("log_extra", "log_metric")
"""Values that TRL does not put into lists."""


def values_of(task: Task, log: Log) -> dict[str, object]:
    """The values of `REWARD`, by name, and by their names in other libraries; then the columns of the row."""
    fields = task.fields
    values: dict[str, object] = {
        "prompt": task.prompt,
        "response": task.text,
        "reference_answer": task.expected,
        "turns": list(task.turns),
        "row": fields,
        "data_source": fields.get("data_source", ""),
        "solution_str": task.text,
        "ground_truth": _held(fields.get("reward_model"), "ground_truth", task.expected),
        "extra_info": _held(fields, "extra_info", fields),
        "log_extra": log.extra,
        "log_metric": log.metric,
    }
    values |= {name: values[value] for name, value in REWARD.synonyms.items()}
    return values | {name: value for name, value in fields.items() if name in COLUMN_FIRST or name not in values}


@dataclass
class Log:
    """Columns and metrics that a reward function logs beside its reward."""

    columns: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def extra(self, column: str, values: object) -> None:
        """Adds a column to the table of samples: a value, or as in TRL a list of one."""
        self.columns[column] = str(_only(values))[:MAX_COLUMN_CHARACTERS]

    def metric(self, name: str, value: object) -> None:
        """Adds a number that is no part of the reward."""
        self.metrics[name] = _number(value, f"metric {name!r}")


def environment(name: str, config: EnvConfig, endpoints: Path | None) -> Environment:
    """Declares one of `env.own.functions` or an installed package's function; `endpoints` as in `build_environment`."""
    # Here, so that children import no config.
    from mrl.config.rules.data import own_function

    own = config.own
    return Environment(
        "mrl.envs.own:make",
        {"function": own_function(name, config) or name},
        timeout_s=own.timeout_s,
        # Children find a user's module where Python finds it here: Ray gives its processes the driver's folders.
        search_path=tuple(os.path.abspath(path) for path in sys.path),
        variables={} if endpoints is None else {env.MRL_ENDPOINTS.name: str(endpoints)},
        allowances=tuple(own.allow),
        is_repeatable=False,
    )


def make(function: str) -> Score:
    """The reward function `pkg.mod:fn`; ValueError says that it is not there, or that its parameters are not known."""
    try:
        hook = find_reward(function)
    except ValueError as error:
        raise ValueError(f"reward function {function!r} {error}") from error

    def score(task: Task) -> Outcome:
        try:
            log = Log()
            found = outcome(judged(hook, task, log))
            return replace(found, columns={**found.columns, **log.columns}, metrics=log.metrics)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, PermissionError | socket.gaierror):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise PermissionError(
                f"{error}; own functions get no network, process or file to write unless "
                "env.own.allow=[network,processes,files] names it"
            ) from error

    return score


def judged(hook: Hook, task: Task, log: Log) -> object:
    """Calls a reward function with values by name, in TRL's lists if it takes them. TypeError: a column is missing."""
    values, columns = values_of(task, log), task.fields
    is_batched = any(name in BATCHED for name in hook.names)
    if is_batched:
        values = {name: value if name in SHARED else [value] for name, value in values.items()}
    if missing := [name for name in hook.columns if name not in columns]:
        raise TypeError(f"the function takes {', '.join(missing)}, which is no column of the row")
    taken = {*hook.names, *hook.columns, *(name for name in hook.optional if name in columns)}
    returned = hook.call({name: values[name] for name in taken}, values)
    return _only(returned) if is_batched else returned


def outcome(returned: object) -> Outcome:
    """A returned value's outcome: a number; or a dict with `reward` or `score`, else components that sum to the reward.

    Of a dict's other entries, numbers are components, `extracted` or verl's `pred` is the answer found, other texts are
    columns of the table of samples, `mask_sample` masks, and `observation` is what the environment answers: a text,
    which the user says, or messages. Other kinds are ignored beside a reward. The pool refuses what is no finite
    number.
    """
    if not isinstance(returned, Mapping):
        return Outcome(_number(returned, "the reward"))
    total = next((key for key in TOTALS if key in returned), None)
    if all(key in returned for key in TOTALS) and returned[TOTALS[0]] != returned[TOTALS[1]]:
        raise TypeError(
            f"the returned dict has two rewards, {' and '.join(f'{key}={returned[key]!r:.40}' for key in TOTALS)}"
        )
    special = {*TOTALS, "extracted", "observation", MASK_SAMPLE}
    others = {str(key): value for key, value in returned.items() if key not in special}
    columns = {key: str(others.pop(key))[:MAX_COLUMN_CHARACTERS] for key in [*others] if isinstance(others[key], str)}
    components = {
        key: _number(value, f"component {key!r}")
        for key, value in others.items()
        if total is None or _as_number(value) is not None
    }
    if total is None and not components:
        raise TypeError(f"the returned dict has no reward: {returned!r:.100}")
    return Outcome(
        reward=sum(components.values()) if total is None else _number(returned[total], f"{total!r}"),
        extracted=str(returned.get("extracted", returned.get("pred", ""))),
        components=components,
        columns={key: text for key, text in columns.items() if key != "pred"},
        flags=(MASK_SAMPLE,) if _number(returned.get(MASK_SAMPLE) or 0, MASK_SAMPLE) else (),
        observation=_messages(returned.get("observation")),
    )


def _only(value: object) -> object:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        return value[0]
    return value


def _number(value: object, what: str) -> float:
    if (number := _as_number(value)) is None:
        raise TypeError(f"{what} is {value!r:.100}, a {type(value).__name__}, not a number")
    return number


def _as_number(value: object) -> float | None:
    # numpy's booleans and torch's scalars are no Real; `item` makes them one. True and False are 1 and 0, as in verl.
    if callable(item := getattr(value, "item", None)):
        with suppress(ValueError, RuntimeError):  # of several numbers
            value = item()
    return float(value) + 0.0 if isinstance(value, numbers.Real) else None  # -0.0 is 0.0


def _held(fields: object, key: str, other: object) -> object:
    found = fields.get(key) if isinstance(fields, dict) else None
    return found if isinstance(found, dict | list) else other


def _messages(value: object) -> tuple[Mapping[str, str], ...]:
    if value is None:
        return ()
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise TypeError(
            f"the observation is {json.dumps(value, default=repr)[:100]}, not a text and not messages with role "
            "and content"
        )
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
