# SPDX-License-Identifier: Apache-2.0
"""The user's own reward functions, called by their parameters' names. Runs in `mrl.envs.child`."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import numbers
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import env
from mrl.config.own import find, reward_parameters
from mrl.envs.task import MASK_SAMPLE, Environment, Outcome, Score, Task

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

TOTALS = ("reward", "score")
"""Keys of a returned dict that hold the reward itself. `score` is verl's."""

VALUES: dict[str, Callable[[Task], object]] = {
    "prompt": lambda task: task.prompt,
    "response": lambda task: task.text,
    "reference_answer": lambda task: task.expected,
    "turns": lambda task: list(task.turns),
    "row": lambda task: task.fields,
    "data_source": lambda task: task.fields.get("data_source", ""),
    "solution_str": lambda task: task.text,
    "ground_truth": lambda task: _held(task.fields.get("reward_model"), "ground_truth", task.expected),
    "extra_info": lambda task: _held(task.fields, "extra_info", task.fields),
}
"""The value of a parameter, by its name: those of `REWARD_VALUES`."""


def environment(name: str, config: EnvConfig, endpoints: Path | None) -> Environment:
    """Declares one of `env.own.functions`, or a function that an installed package offers; `endpoints` as `build_environment` has it."""
    # Here, so that children import no config.
    from mrl.config.rules.data import ENTRY_POINT_GROUP

    own = config.own
    installed = {point.name: f"{point.module}:{point.attr}" for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return Environment(
        "mrl.envs.own:make",
        {"function": own.functions.get(name) or installed.get(name, name)},
        timeout_s=own.timeout_s,
        # Children find a user's module where Python finds it here: Ray gives its processes the driver's folders.
        search_path=tuple(os.path.abspath(path) for path in sys.path),
        variables={} if endpoints is None else {env.MRL_ENDPOINTS.name: str(endpoints)},
        allowances=tuple(own.allow),
    )


def make(function: str) -> Score:
    """The reward function `pkg.mod:fn`; a ValueError says that it is not there, or that its parameters are not known."""
    try:
        found = find(function)
        names, signature = reward_parameters(found), inspect.signature(found)
    except ValueError as error:
        raise ValueError(f"reward function {function!r} {error}") from error

    def score(task: Task) -> Outcome:
        try:
            bound = signature.bind_partial()
            bound.arguments.update({name: VALUES[value](task) for name, value in names.items()})
            return outcome(found(*bound.args, **bound.kwargs))
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, PermissionError | socket.gaierror):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise PermissionError(
                f"{error}; own functions get no network, process or file to write unless env.own.allow=[network,processes,files] names it"
            ) from error

    return score


def outcome(returned: object) -> Outcome:
    """The outcome of a returned value: a number; or a dict with `reward` or `score`, else with components that add up to the reward.

    Of a dict's other entries, numbers are components, `extracted` or verl's `pred` is text, `mask_sample` masks, and `observation` is what
    the environment answers: a text, which the user says, or messages. Beside a reward there may be anything else. The pool refuses what is
    no finite number.
    """
    if not isinstance(returned, Mapping):
        return Outcome(_number(returned, "the reward"))
    total = next((key for key in TOTALS if key in returned), None)
    if all(key in returned for key in TOTALS) and returned[TOTALS[0]] != returned[TOTALS[1]]:
        raise TypeError(f"the returned dict has two rewards, {' and '.join(f'{key}={returned[key]!r:.40}' for key in TOTALS)}")
    special = {*TOTALS, "extracted", "observation", MASK_SAMPLE}
    others = {str(key): value for key, value in returned.items() if key not in special}
    components = {
        key: _number(value, f"component {key!r}") for key, value in others.items() if total is None or _as_number(value) is not None
    }
    if total is None and not components:
        raise TypeError(f"the returned dict has no reward: {returned!r:.100}")
    return Outcome(
        reward=sum(components.values()) if total is None else _number(returned[total], f"{total!r}"),
        extracted=str(returned.get("extracted", returned.get("pred", ""))),
        components=components,
        flags=(MASK_SAMPLE,) if _number(returned.get(MASK_SAMPLE) or 0, MASK_SAMPLE) else (),
        observation=_messages(returned.get("observation")),
    )


def _number(value: object, what: str) -> float:
    if (number := _as_number(value)) is None:
        raise TypeError(f"{what} is {value!r:.100}, a {type(value).__name__}, not a number")
    return number


def _as_number(value: object) -> float | None:
    # numpy's booleans and torch's scalars are no Real; `item` makes them one. True and False are 1 and 0, as in verl.
    if callable(item := getattr(value, "item", None)):
        with suppress(ValueError, RuntimeError):  # of several numbers
            value = item()
    return float(value) if isinstance(value, numbers.Real) else None


def _held(fields: object, key: str, other: object) -> object:
    """verl's value under `key`, a dict or a list; `other` if there is none."""
    found = fields.get(key) if isinstance(fields, dict) else None
    return found if isinstance(found, dict | list) else other


def _messages(value: object) -> tuple[Mapping[str, str], ...]:
    if value is None:
        return ()
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise TypeError(f"the observation is {json.dumps(value, default=repr)[:100]}, not a text and not messages with role and content")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
