"""Rows of two answers to one prompt, of which one is preferred, to two conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mrl.data.conversations import Conversation, Message, messages_of
from mrl.data.jsonl import RowError, text_field


def preference_of(fields: Mapping[str, object]) -> tuple[Conversation, Conversation]:
    """The conversations with the preferred answer and with the other one.

    The row has `context` (messages) and `completions` (two of {"rank", "completion": messages}, the lower rank is preferred), or
    `prompt` (text or messages), `chosen` and `rejected` (texts).

    Raises:
        RowError: it has neither.
    """
    if fields.get("completions") is not None:
        context, (chosen, rejected) = messages_of(fields, "context"), _ranked(fields["completions"])
    else:
        prompt = fields.get("prompt")
        context = messages_of(fields, "prompt") if isinstance(prompt, list) else _said("user", text_field(fields, ("prompt",)))
        chosen, rejected = (_said("assistant", text_field(fields, (key,))) for key in ("chosen", "rejected"))
    return Conversation((*context, *chosen)), Conversation((*context, *rejected))


def _said(role: str, content: str) -> tuple[Message, ...]:
    return ({"role": role, "content": content},)


def _ranked(completions: object) -> Sequence[tuple[Message, ...]]:
    if not isinstance(completions, list) or len(completions) != 2 or not all(isinstance(entry, dict) for entry in completions):
        raise RowError("completions must be a list of two objects")
    ranks = [entry.get("rank") for entry in completions]
    if not all(isinstance(rank, int | float) for rank in ranks) or ranks[0] == ranks[1]:
        raise RowError(f"completions have the ranks {ranks[0]!r} and {ranks[1]!r}; they must be two different numbers, the lower preferred")
    return [messages_of(entry, "completion") for entry in sorted(completions, key=lambda entry: entry["rank"])]
