# SPDX-License-Identifier: Apache-2.0
"""Conversations that go on from the tokens of their earlier turns, as they were sampled. Needs no vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

Message = Mapping[str, object]

PREFIX = "required_prefix_token_ids"
"""The field of a request that says with which tokens its prompt begins; NeMo RL's name."""
MESSAGE_IDS = ("prompt_token_ids", "generation_token_ids")
"""Fields of an assistant's message that say the same, as NeMo Gym writes them."""
MESSAGE_EXTRAS = (*MESSAGE_IDS, "generation_log_probs")

Said = tuple[str, str, tuple[tuple[str, str], ...]]
"""The parts of a message that are compared: role, text, and calls of tools by name and arguments."""


def said(message: Message) -> Said:
    """The compared parts of a message, however a client spells it: text in parts or whole, absent or empty."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    named = tuple((str(f.get("name")), _arguments(f.get("arguments"))) for f in functions if isinstance(f, Mapping))
    return str(message.get("role")), str(content or ""), named


def _arguments(value: object) -> str:
    """The arguments of a call: the same text however a client spaces, orders or escapes their JSON."""
    with suppress(ValueError, TypeError, RecursionError):
        return json.dumps(json.loads(value) if isinstance(value, str) else value, sort_keys=True)
    return str(value)


def without_ids(messages: Sequence[object]) -> list[object]:
    """The messages without the tokens in which they were sampled."""
    return [
        {name: value for name, value in message.items() if name not in MESSAGE_EXTRAS}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def take_prefix(body: Mapping[str, object]) -> tuple[dict[str, object], list[int] | None]:
    """Splits a request into its other fields and the tokens with which its prompt must begin, if it names them.

    Raises:
        ValueError: they are no token ids.
    """
    rest = {name: value for name, value in body.items() if name != PREFIX}
    given = body.get(PREFIX)
    messages = body.get("messages")
    if isinstance(messages, list):
        plain = [message for message in messages if isinstance(message, Mapping)]
        with_ids = next((message for message in reversed(plain) if MESSAGE_IDS[0] in message), None)
        if given is None and with_ids is not None:
            parts = [part for name in MESSAGE_IDS if isinstance(part := with_ids.get(name), list)]
            given = [token_id for part in parts for token_id in part] if len(parts) == len(MESSAGE_IDS) else []
        rest["messages"] = without_ids(messages)
    if given is None:
        return rest, None
    if (
        not isinstance(given, list)
        or not given
        or not all(type(token_id) is int and token_id >= 0 for token_id in given)
    ):
        raise ValueError(f"{PREFIX} (or {' and '.join(MESSAGE_IDS)} of a message): must be a list of token ids")
    return rest, given


def num_messages_to_answer(messages: Sequence[Message]) -> int:
    """Number of messages up to the last one of the assistant; 0 if there is none."""
    return max((index + 1 for index, message in enumerate(messages) if message.get("role") == "assistant"), default=0)


def continued(
    sampled_ids: Sequence[int], answered_ids: Sequence[int], whole_ids: Sequence[int], end_ids: Collection[int]
) -> list[int]:
    """The tokens of a conversation that goes on: the sampled ones, and the chat template's behind them.

    `sampled_ids` are the prompt and the answer of the last turn as they were, `answered_ids` the same messages as the
    template writes them, and `whole_ids` all messages. Template and model may differ in how they cut a text into
    tokens, and in whether thoughts of earlier turns stay: places are told by the number of end marks (`end_ids`) up to
    them.

    Raises:
        ValueError: the template ends no message with one of `end_ids`, or writes fewer messages than before.
    """
    num_ends = sum(token_id in end_ids for token_id in answered_ids)
    ends = [index for index, token_id in enumerate(whole_ids) if token_id in end_ids]
    if not 0 < num_ends <= len(ends):
        raise ValueError(
            f"the chat template writes {num_ends} end marks up to the last answer and {len(ends)} in the whole "
            f"conversation; without one of the tokens {sorted(end_ids)} behind each answer a conversation cannot "
            "go on from the tokens that were sampled"
        )
    end = ends[num_ends - 1]
    # An answer that was cut off at its longest has no end mark of its own; one that has another than the template's
    # gets no second.
    return [*sampled_ids, *whole_ids[end + (sampled_ids[-1] in end_ids) :]]


def droppable(
    messages: Sequence[Message], *, has_tools: bool, has_documents: bool
) -> Iterator[tuple[str, dict[str, object]]]:
    """Parts that a chat template may drop, each with changed fields that render as the same text only if it does.

    Not the assistant's own texts: templates leave thoughts of earlier turns out on purpose.
    """
    if has_tools:
        yield "tools", {"tools": None}
    if has_documents:
        yield "documents", {"documents": None}
    said = [message for message in messages if message.get("content")]
    for role in sorted({str(message.get("role")) for message in said} - {"assistant"}):
        twice = [
            {**message, "content": content * 2}
            if message.get("role") == role and isinstance(content := message.get("content"), str | list)
            else message
            for message in messages
        ]
        yield f"role_{role}", {"messages": twice}
    if any(message.get("tool_calls") for message in messages):
        without = [
            {key: value for key, value in message.items() if key != "tool_calls"}
            | {"content": message.get("content") or ""}
            for message in messages
        ]
        yield "tool_calls", {"messages": without}
