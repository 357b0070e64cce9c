"""What a reward function is asked, and what it answers. Standard library only: reward children import this."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

MASK_SAMPLE = "mask_sample"
"""Flag of an outcome that must not be trained on; NeMo RL's name."""


class RowFault(ValueError):
    """The row is at fault: no text of a model could be judged by it."""


@dataclass(frozen=True)
class Task:
    """A rollout to be judged. Two equal tasks get one verdict."""

    turns: tuple[str, ...]
    """What the model said, turn by turn, decoded without special tokens."""
    expected: str = ""
    prompt: str = ""
    """The question as the row gives it."""
    row: str = "{}"
    """What else the row holds for its environment: a JSON object, as text."""

    @property
    def text(self) -> str:
        """What the model said last."""
        return self.turns[-1]

    @property
    def fields(self) -> dict[str, object]:
        """`row`, parsed."""
        return json.loads(self.row)


@dataclass(frozen=True)
class Outcome:
    """What a reward function says of a task."""

    reward: float
    extracted: str = ""
    """What was taken for the answer, for people who read samples."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What the reward consists of, by name."""
    flags: tuple[str, ...] = ()
    """What is to be counted beside the reward; `mask_sample` keeps the rollout out of the loss."""
    observation: tuple[Mapping[str, str], ...] = ()
    """Messages (`role`, `content`) with which the conversation goes on, if turns are left. `reward` stands if it does not."""

    def as_message(self) -> dict[str, object]:
        """For the pipe to the pool."""
        return asdict(self)


Score = Callable[[Task], Outcome]
"""A reward function. What it raises costs the rollout its verdict or its reward: see `RewardFunction.blames_text`."""


def text_after_thinking(text: str) -> str:
    """What follows the last `</think>`, without white space around it; all of a text that has none."""
    return text.rpartition("</think>")[2].strip()


def field_of(fields: Mapping[str, object], name: str, kind: type) -> object:
    """A field that the row must have.

    Raises:
        RowFault: it is missing, or not of this type.
    """
    value = fields.get(name)
    if not isinstance(value, kind):
        raise RowFault(f"the row's field {name!r} must be a {kind.__name__}, not {value!r:.80}")
    return value
