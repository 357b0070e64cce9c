# SPDX-License-Identifier: Apache-2.0
"""Tasks of reward functions, their outcomes, environment declarations. Standard library only: children import this."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from mrl.config.texts import safe_values
from mrl.envs.confine import Allowance

if TYPE_CHECKING:
    from mrl.config.schema.env import WorkersConfig

MASK_SAMPLE = "mask_sample"
"""Flag of an outcome that must not be trained on; NeMo RL's name."""

MAX_MESSAGE_BYTES = 64 << 20
"""A rollout of a million tokens takes 4 MiB of text; a longer message comes from a broken row or a hostile child."""
LENGTH_BYTES = 4
"""A message between parent and child is JSON after its length in bytes, big-endian."""

DEFAULT_TOOL_PARSER = "qwen3_coder"
"""Nemotron 3's and Qwen3-Coder's format of tool calls."""

T = TypeVar("T")


class RowFault(ValueError):
    """The row is at fault: no text of a model can be judged by it."""


@dataclass(frozen=True)
class Task:
    """A rollout to judge. Two equal tasks get one verdict."""

    turns: tuple[str, ...]
    """The model's turns, decoded without special tokens."""
    expected: str = ""
    prompt: str = ""
    row: str = "{}"
    """The row's other fields for its environment: a JSON object, as text."""
    has_parser: bool = False
    """True when NeMo Gym would grade the turns as the run's reasoning parser leaves them."""
    tool_parser: str = DEFAULT_TOOL_PARSER
    """vLLM's name of the format in which the model calls tools."""

    @property
    def text(self) -> str:
        """The model's last turn."""
        return self.turns[-1]

    @property
    def replies(self) -> tuple[str, ...]:
        """Turns without thoughts: what follows `</think>`. Without that, the whole turn; under a parser, nothing."""
        if self.has_parser:
            return tuple((turn.partition("<think>")[2] or turn).partition("</think>")[2] for turn in self.turns)
        return tuple(turn.rpartition("</think>")[2] for turn in self.turns)

    @property
    def reply(self) -> str:
        """The last turn without thoughts."""
        return self.replies[-1]

    @property
    def fields(self) -> dict[str, object]:
        """`row`, parsed, with its texts made safe as the model's are, so that a copy equals its original."""
        return cast(dict[str, object], safe_values(json.loads(self.row)))


@dataclass(frozen=True)
class Outcome:
    """A function's judgement of a task: the reward, what counts as the answer (for readers of samples), its parts."""

    reward: float
    extracted: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Names to count besides the reward; `mask_sample` keeps the rollout out of the loss."""
    observation: tuple[Mapping[str, str], ...] = ()
    """Messages (`role`, `content`) that continue the conversation if turns are left. `reward` stands if none are."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Further columns of the table of samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, which are no part of the reward."""


Score = Callable[[Task], Outcome]
"""A reward function. What it raises costs the rollout its verdict or its reward: see `Environment.blames_text`."""


@dataclass(frozen=True)
class Environment:
    """Declares how one environment judges: its reward function, its children and their limits."""

    factory: str
    """`MODULE:NAME` of the function that builds the `Score` in a child."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the factory, in JSON's types."""
    num_workers: int = 1
    timeout_s: float = 10.0
    row_fields: tuple[str, ...] = ()
    search_path: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    allowances: tuple[Allowance, ...] = ()
    """Rights of the children beyond computing and reading."""
    blames_text: bool = False
    """True when the function can judge any text at all, so that a text that makes it fail gets reward 0 and no mask. A
    user's own function may fail by its own mistake, or because a server that it asks does not answer."""
    is_repeatable: bool = True
    """True when equal tasks have equal verdicts, so that one is enough. A user's own function may draw, count, or ask a
    model."""
    name: str = ""
    """Name in rows."""

    def __str__(self) -> str:
        return str(self.options.get("function", self.factory))


def built_in(module: str, workers: WorkersConfig, *row_fields: str, **options: object) -> Environment:
    """Declares the environment of a module, whose `make` takes `options`."""
    return Environment(f"{module}:make", options, timeout_s=workers.timeout_s, row_fields=row_fields, blames_text=True)


def field_of(fields: Mapping[str, object], name: str, kind: type[T]) -> T:
    """A field that the row must have, of this type; else a `RowFault`."""
    value = fields.get(name)
    if not isinstance(value, kind):
        raise RowFault(f"the row's field {name!r} must be a {kind.__name__}, not {value!r:.80}")
    return value


def encode(message: object) -> bytes:
    """The bytes of one message between a reward child and its parent; a ValueError if it is too long."""
    body = json.dumps(message).encode("ascii")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES) + body
