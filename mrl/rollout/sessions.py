# SPDX-License-Identifier: Apache-2.0
"""Agents' HTTP sessions: turns with token ids, logprobs and weight versions, and how a conversation goes on from them.

Later turns go on from the very tokens of earlier ones, so that what was sampled can be trained on. Needs no vLLM.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

MAX_SESSIONS = 4096
"""Sessions that an engine remembers. One more makes it forget the one that was used longest ago."""
MAX_BYTES = 2**30
"""Memory of all sessions; more makes the engine forget in the same order."""
BYTES_PER_NUMBER = 40
"""Size of a number in Python's lists."""

Message = Mapping[str, object]

PREFIX = "required_prefix_token_ids"
"""The field of a request that says with which tokens its prompt begins; NeMo RL's name."""
PREFIX_MESSAGES = "required_prefix_messages"
"""Number of messages that those tokens are; without it, all up to the assistant's last."""
MESSAGE_IDS = ("prompt_token_ids", "generation_token_ids")
"""Fields of an assistant's message that say the same, as NeMo Gym writes them."""
MESSAGE_EXTRAS = (*MESSAGE_IDS, "generation_log_probs")

Said = tuple[str, str, tuple[tuple[str, str], ...]]
"""The parts of a message that are compared: role, text, and calls of tools by name and arguments."""


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session and its answer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """The answer, its stop token included."""
    logprobs: list[float]
    """Logprob of each token of the answer, under the distribution that it was drawn from."""
    finish_reason: str
    weight_version: int
    """Version of the engine when the request came: no token is older."""
    num_weight_versions: int
    """Number of versions of the engine until the answer was complete."""
    is_continuation: bool
    """True when the prompt begins with all tokens of the turn before."""


class Sessions:
    """Sessions by id. For one thread."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_sessions, self._max_bytes = max_sessions, max_bytes
        self._bytes: dict[str, int] = {}
        self._turns: OrderedDict[str, list[SessionTurn]] = OrderedDict()
        self._said: dict[str, list[Said]] = {}

    def add(self, session_id: str, turn: SessionTurn, messages: Sequence[Message]) -> None:
        """Adds a turn. `messages` are the conversation with the answer; empty for a prompt without messages."""
        self._turns.setdefault(session_id, []).append(turn)
        self._said[session_id] = [said(message) for message in messages]
        self._turns.move_to_end(session_id)
        self._bytes[session_id] = _num_bytes(session_id, self._turns[session_id], self._said[session_id])
        while len(self._turns) > self._max_sessions or sum(self._bytes.values()) > self._max_bytes:
            self.forget(next(iter(self._turns)))

    def sampled_ids(self, session_id: str, messages: Sequence[Message]) -> list[int] | None:
        """Tokens of the session's last turn, if a conversation goes on from it; None if none, or it was rewritten.

        Thoughts are not compared: clients do not send them back.
        """
        earlier = self._said.get(session_id)
        if (
            not earlier
            or [said(message) for message in messages[: len(earlier)]] != earlier
            or len(messages) == len(earlier)
        ):
            return None
        last = self._turns[session_id][-1]
        return [*last.prompt_token_ids, *last.token_ids]

    def num_answered(self, session_id: str) -> int:
        """Number of messages that the session has answered."""
        return len(self._said.get(session_id, ()))

    def is_continuation(self, session_id: str, prompt_token_ids: Sequence[int]) -> bool:
        """True when a prompt begins with all tokens of the session's last turn."""
        turns = self._turns.get(session_id)
        if not turns:
            return False
        before = [*turns[-1].prompt_token_ids, *turns[-1].token_ids]
        return list(prompt_token_ids[: len(before)]) == before

    def describe(self, session_id: str) -> list[dict[str, object]] | None:
        """The turns of a session as plain data, in order; None if there is no such session."""
        turns = self._turns.get(session_id)
        return None if turns is None else [dataclasses.asdict(turn) for turn in turns]

    def forget(self, session_id: str) -> None:
        """Drops a session, if there is one."""
        self._turns.pop(session_id, None)
        self._said.pop(session_id, None)
        self._bytes.pop(session_id, None)


def _num_bytes(session_id: str, turns: Sequence[SessionTurn], messages: Sequence[Said]) -> int:
    """Approximate bytes of a session in memory."""
    texts = [session_id, *(text for role, content, calls in messages for text in (role, content, *sum(calls, ())))]
    num_numbers = sum(len(turn.prompt_token_ids) + len(turn.token_ids) + len(turn.logprobs) for turn in turns)
    # An object has some hundred bytes besides its numbers or characters, of which each takes up to 4.
    return 4 * sum(map(len, texts)) + 200 * len(texts) + BYTES_PER_NUMBER * num_numbers + 600 * len(turns)


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
    """The tokens of a conversation that goes on: those sampled, and what the chat template writes behind them.

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
