# SPDX-License-Identifier: Apache-2.0
"""Conversations of rollouts for readers, of bounded size. Nothing here is judged or trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mrl.config.texts import counted, safe_text

MAX_CHARACTERS = 20_000
"""Limit of all contents of a rollout."""
MAX_MESSAGES = 64
"""Limit of a conversation: its beginning and its end are kept."""
MAX_CONVERSATIONS = 8
MIN_CHARACTERS = 16
"""Limit of a content where there is room for none."""
MAX_ROLE_CHARACTERS = 40
LEFT_OUT = "left out"
"""Role of the message that counts those left out."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which messages of the assistant hold what it thinks."""

Said = Mapping[str, str]
"""A message: `role`, and `content` as text."""


def said_by(role: str, content: str) -> Said:
    """A message with its text made safe and cut."""
    return {"role": safe_text(role, MAX_ROLE_CHARACTERS), "content": safe_text(content, MAX_CHARACTERS)}


def read_message(message: Mapping[str, object]) -> Said:
    """A message of OpenAI's chat or Responses protocol: thoughts, text, then calls of tools as JSON."""
    content, role = message.get("content", message.get("output", message.get("summary"))), message.get("role")
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    kind = message.get("type")
    if kind == "function_call":
        functions = [{name: message.get(name) for name in ("name", "arguments")}]
    thoughts = next((str(message[key]) for key in THOUGHTS if message.get(key)), "")
    text = _text(content)
    if kind == "reasoning":
        thoughts, text = text, ""
    parts = [f"<think>{thoughts}</think>" if thoughts else "", text, json.dumps(functions) if functions else ""]
    return said_by(
        str(role or ("tool" if kind == "function_call_output" else "assistant")), "\n".join(filter(None, parts))
    )


def _text(content: object) -> str:
    """The text of a content; a part without one stands as its type in brackets."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return "" if content is None else content if isinstance(content, str) else json.dumps(content)
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
    return "".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


@dataclass
class _Growing:
    messages: list[Said] = field(default_factory=list)
    num_left_out: int = 0
    given: list[int] = field(default_factory=list)
    """Hashes of all messages that are not the assistant's."""

    def add(self, message: Said) -> None:
        self.messages.append(message)
        if len(self.messages) > MAX_MESSAGES:
            del self.messages[MAX_MESSAGES // 2]
            self.num_left_out += 1

    def whole(self) -> tuple[Said, ...]:
        left_out = [said_by(LEFT_OUT, counted(self.num_left_out, "message"))] if self.num_left_out else []
        middle = MAX_MESSAGES // 2
        return (*self.messages[:middle], *left_out, *self.messages[middle:])


@dataclass
class Heard:
    """Conversations of an agent with the model, each from its first message to its last answer."""

    _conversations: list[_Growing] = field(default_factory=list)
    _num_more: int = 0
    """Conversations beyond the limit."""

    def note(self, messages: Sequence[object]) -> None:
        """Adds a conversation, or the new messages of a known one: at least one not of the model.

        A client may send the model's answers back without their thoughts, so they are not compared. Another try at an
        answer, or another beginning, is a conversation of its own.
        """
        is_own = [isinstance(message, Mapping) and message.get("role") == "assistant" for message in messages]
        places = [place for place, is_models in enumerate(is_own) if not is_models]
        given = [hash(str(messages[place])) for place in places]
        known = [one for one in self._conversations if one.given == given[: len(one.given)] and one.given != given]
        start = 0
        if known:

            def place_and_fit(one: _Growing) -> tuple[int, bool]:
                answer = messages[places[len(one.given)] - 1]
                return len(one.given), isinstance(answer, Mapping) and read_message(answer) == one.messages[-1]

            # Of several tries at an answer, the one that the client goes on from; else the last one.
            growing = max(reversed(known), key=place_and_fit)
            start = places[len(growing.given)]
        elif len(self._conversations) < MAX_CONVERSATIONS:
            self._conversations.append(growing := _Growing())
        else:
            self._num_more += 1
            return
        growing.given = given
        for message in messages[start:]:
            growing.add(read_message(message) if isinstance(message, Mapping) else said_by("user", str(message)))

    def shown(self) -> tuple[tuple[Said, ...], ...]:
        """The conversations within the limit of characters."""
        more = [(said_by(LEFT_OUT, counted(self._num_more, "conversation")),)] if self._num_more else []
        return bounded([*(growing.whole() for growing in self._conversations), *more])


def read_conversations(value: object, max_characters: int) -> tuple[tuple[Said, ...], ...]:
    """The conversations in a file's JSON, in any known format."""
    lists = [one for one in value if isinstance(one, list)] if isinstance(value, list) else []
    found = [
        [said_by(str(said.get("role")), str(said.get("content"))) for said in messages if isinstance(said, Mapping)]
        for messages in (one[: MAX_MESSAGES + 1] for one in lists[: MAX_CONVERSATIONS + 1])
    ]
    return bounded(list(filter(None, found)), max_characters)


def bounded(
    conversations: Sequence[Sequence[Said]], max_characters: int = MAX_CHARACTERS
) -> tuple[tuple[Said, ...], ...]:
    """The conversations with the middle of the longest contents cut, so that all have `max_characters` at most."""
    lengths = sorted(len(said["content"]) for conversation in conversations for said in conversation)
    left, limit = max_characters, max_characters
    for place, length in enumerate(lengths):
        limit = left // (len(lengths) - place)
        if length > limit:
            break
        left -= length
    else:
        return tuple(map(tuple, conversations))
    return tuple(
        tuple({**said, "content": safe_text(said["content"], max(MIN_CHARACTERS, limit))} for said in conversation)
        for conversation in conversations
    )


def as_text(conversations: Sequence[Sequence[Said]], max_characters: int = MAX_CHARACTERS) -> str:
    """The conversations for a console: each message after a line with its role."""
    texts = [
        "\n".join(f"[{said['role']}]\n{said['content']}" for said in conversation)
        for conversation in bounded(conversations, max_characters)
    ]
    return "\n\n".join(texts)
