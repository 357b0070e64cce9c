"""What agents have sampled over HTTP, turn by turn: token ids, logprobs and weight versions, as a trainer needs them. Needs no vLLM."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_SESSIONS = 4096
"""Sessions that an engine remembers; the one that was used longest ago makes room."""

Said = tuple[str, str, tuple[tuple[str, str], ...]]
"""A message as far as it is compared: role, text, and calls of tools by name and arguments."""


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session and its answer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """The answer, its stop token included."""
    logprobs: list[float]
    """Of each token of the answer, under the distribution that it was drawn from."""
    finish_reason: str
    weight_version: int
    """Of the engine when the request came: no token is older."""
    num_weight_versions: int
    """How many versions the engine has had until the answer was complete."""
    is_continuation: bool
    """Whether the prompt begins with all tokens of the turn before."""


class Sessions:
    """Sessions by id. For one thread."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._turns: OrderedDict[str, list[SessionTurn]] = OrderedDict()
        self._said: dict[str, list[Said]] = {}

    def add(self, session_id: str, turn: SessionTurn, messages: Sequence[Mapping[str, object]]) -> None:
        """Keeps a turn. `messages` are the conversation with the answer; empty for a prompt without messages."""
        self._turns.setdefault(session_id, []).append(turn)
        self._said[session_id] = [said(message) for message in messages]
        self._turns.move_to_end(session_id)
        if len(self._turns) > self._max_sessions:
            oldest, _ = self._turns.popitem(last=False)
            del self._said[oldest]

    def sampled_ids(self, session_id: str, messages: Sequence[Mapping[str, object]]) -> list[int] | None:
        """Prompt and answer of the session's last turn, if a conversation goes on from it; else None: there is none, or it was rewritten.

        Thoughts are not compared: clients do not send them back.
        """
        earlier = self._said.get(session_id)
        if not earlier or [said(message) for message in messages[: len(earlier)]] != earlier or len(messages) == len(earlier):
            return None
        last = self._turns[session_id][-1]
        return [*last.prompt_token_ids, *last.token_ids]

    def num_answered(self, session_id: str) -> int:
        """Messages of the conversation as far as the session has answered it."""
        return len(self._said.get(session_id, ()))

    def is_continuation(self, session_id: str, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt begins with all tokens of the session's last turn."""
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


def said(message: Mapping[str, object]) -> Said:
    """What a message says, however a client spells it: text in parts or whole, absent or empty."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    functions = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    named = tuple((str(f.get("name")), str(f.get("arguments"))) for f in functions if isinstance(f, Mapping))
    return str(message.get("role")), str(content or ""), named
