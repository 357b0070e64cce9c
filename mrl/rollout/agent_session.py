# SPDX-License-Identifier: Apache-2.0
"""One agent's session: turns its requests into an engine's and keeps answers token by token. Needs no vLLM, no HTTP.

A session takes any request of OpenAI's protocol. What would change the distribution that tokens are drawn from, which
the trainer compares with, is replaced by the run's own value, and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

from mrl.config.conversations import Heard
from mrl.rollout.http_gate import NEUTRAL
from mrl.rollout.turn_tree import SampledAnswer, TreeNode, TurnTree
from mrl.types import SamplingParams, hashed_seed

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
    """Number of messages up to the last one of the assistant, or 0."""
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


PASSED = (
    "messages", "prompt", "suffix", "echo", "tools", "tool_choice", "parallel_tool_calls", "response_format",
    "structured_outputs", "stop",
    "include_stop_str_in_output", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs",
    "chat_template_kwargs",
    "reasoning_effort", "include_reasoning", "documents", "skip_special_tokens", "spaces_between_special_tokens",
    "return_tokens_as_token_ids",
)  # fmt: skip
"""Fields that engines get as they are."""
OWN = (
    "model", "stream", "stream_options", "return_token_ids", "user", "metadata", "store", "service_tier",
    "safety_identifier",
    "prompt_cache_key", "session_id",
)  # fmt: skip
"""Fields that are for the gateway, or for nobody. All others are left out, and counted, unless they ask for what the
run does.
"""
CONTEXT = ("tools", "documents", "chat_template_kwargs", "reasoning_effort")
"""Parts that a chat template writes besides the messages: where they differ, a conversation does not go on from the
same tokens.
"""
MAX_TEXT_CHARACTERS = 20_000
"""Limit of a session's texts that are kept for readers."""
MAX_NAMED = 4096
"""Sessions that clients have named. One more makes the gateway forget the one that was used longest ago."""
MAX_NAMED_BYTES = 2**30
"""Memory of all of them; more makes it forget in the same order."""
BYTES_PER_TURN = 1000


@dataclass(frozen=True)
class SampledReply:
    """The answer to a request, and the tokens in it."""

    response: dict[str, object]
    prompt_ids: list[int]
    answers: list[SampledAnswer]
    """One for each choice, of a request with one prompt."""
    dropped: Sequence[str] = ()
    """Names of the request's parts that the chat template does not write."""


@dataclass
class AgentSession:
    """The requests of one agent's attempt at a rollout."""

    session_id: str
    key: str
    """Key of this session alone."""
    sampling: SamplingParams
    seed: int
    max_model_len: int
    is_named: bool = False
    """True for a session that a client has named, and of which it asks for no rollout."""
    tree: TurnTree = field(default_factory=TurnTree)
    engines: list[int] = field(default_factory=list)
    """Indices of the engines that have answered, in order."""
    asks: int | None = None
    """The engine that is asked first, which counts the session among its own."""
    altered: Counter[str] = field(default_factory=Counter)
    """Number of requests with `overridden_NAME`, a parameter at another value than the run's, and with `dropped_PART`,
    a part that the chat template does not write.
    """
    num_asked: int = 0
    texts: list[str] = field(default_factory=list)
    heard: Heard = field(default_factory=Heard)
    """Conversations, for readers."""
    _spoken: dict[bytes, TreeNode] = field(default_factory=dict)
    """The turn with which each conversation ends, by the digest of its messages."""

    def asked(self, body: Mapping[str, object]) -> dict[str, object]:
        """The request for an engine."""
        sampling = self.sampling
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}
        stop = body.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        # A seed is a value like others: rollouts of a group with one seed would be one rollout.
        own |= {"seed": hashed_seed(f"{self.seed}/{self.num_asked}"), "stop_token_ids": list(sampling.stop_token_ids)}
        if isinstance(stops, list):  # vLLM refuses all else
            own["stop"] = [*sampling.stop_strings, *stops]
        self.num_asked += 1
        for name, value in body.items():
            is_same = value is None or value == own.get(name) or value in NEUTRAL.get(name, ())
            if name not in (*PASSED, *OWN) and not is_same:
                self.altered[f"overridden_{name}"] += 1
        request = {name: body[name] for name in PASSED if body.get(name) is not None}
        if isinstance(messages := request.get("messages"), list):
            # Which tokens an answer was sampled in, the tree says.
            request["messages"] = without_ids(messages)
        return request | own

    def find_prefix(self, request: Mapping[str, object]) -> tuple[list[int], int] | None:
        """Sampled tokens of a conversation's longest known beginning, and its number of messages; None: none."""
        digests = _digests(request)
        # With no message behind the answer, it is to be written anew.
        for num_messages in range(len(digests) - 1, 0, -1):
            if (node := self._spoken.get(digests[num_messages - 1])) is not None:
                return node.token_ids.tolist(), num_messages
        return None

    def keep(self, request: Mapping[str, object], reply: SampledReply) -> list[TreeNode]:
        """Adds an engine's answers to the tree, each as a turn; in the order of its choices."""
        choices = cast("Sequence[Mapping[str, object]]", reply.response.get("choices") or ())
        nodes = list[TreeNode]()
        self.altered.update(f"dropped_{name}" for name in reply.dropped)
        for choice, answer in zip(choices, reply.answers, strict=True):
            message = choice.get("message")
            text = choice.get("text") if message is None else cast(Message, message).get("content")
            messages = request.get("messages")
            if not self.is_named:
                self.note_text(text, message)
                asked = messages if isinstance(messages, list) else [request.get("prompt")]
                self.heard.note([*asked, message or {"role": "assistant", "content": text}])
            length = len(answer.token_ids)
            # Otherwise the agent itself has asked for so few tokens.
            is_cut = length >= self.sampling.max_new_tokens or len(reply.prompt_ids) + length >= self.max_model_len
            if not (is_cut or self.is_named):
                answer = replace(answer, finish_reason="stop")
            node = self.tree.add(reply.prompt_ids, replace(answer, routes=None) if self.is_named else answer)
            nodes.append(node)
            if isinstance(message, Mapping) and isinstance(messages, list):
                self._spoken[_digests({**request, "messages": [*messages, message]})[-1]] = node
        return nodes

    def turns(self) -> list[dict[str, object]]:
        """The turns as plain data, in order."""
        return [
            {
                "prompt_token_ids": node.token_ids[: node.length - len(node.answer.token_ids)].tolist(),
                "token_ids": node.answer.token_ids.tolist(),
                "logprobs": node.answer.logprobs.tolist(),
                "finish_reason": node.answer.finish_reason,
                "weight_version": node.answer.weight_version,
                "num_weight_versions": node.answer.num_weight_versions,
                "is_continuation": node.length > len(node.given) + len(node.answer.token_ids),
                "untrained": node.untrained,
            }
            for node in self.tree.nodes
            if node.answer is not None
        ]

    @property
    def num_bytes(self) -> int:
        """Approximate bytes of its turns in memory."""
        arrays = sum(node.given.nbytes + 2 * node.answer.token_ids.nbytes for node in self.tree.nodes if node.answer)
        return arrays + BYTES_PER_TURN * (1 + len(self.tree.nodes))

    @property
    def text(self) -> str:
        """Text of the model, for readers."""
        return "\n\n".join(self.texts)

    def note_text(self, text: object, message: object) -> None:
        """Keeps a text of the model, and the calls of its message, for readers."""
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        parts = [str(text or ""), *([json.dumps([call.get("function") for call in calls])] if calls else [])]
        room = MAX_TEXT_CHARACTERS - sum(map(len, self.texts))
        if room > 0:
            self.texts.append("\n".join(filter(None, parts))[:room])


class NamedSessions:
    """Sessions that clients have named, the one used last behind the others."""

    def __init__(self, open_session: Callable[[str], AgentSession], max_bytes: int = MAX_NAMED_BYTES) -> None:
        self._open, self._max_bytes = open_session, max_bytes
        self._sessions: OrderedDict[str, AgentSession] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def get(self, name: str) -> AgentSession | None:
        return self._sessions.get(name)

    def opened(self, name: str) -> AgentSession:
        """The session of this name, a new one if there is none."""
        return self._sessions.get(name) or self._open(name)

    def keep(self, session: AgentSession) -> None:
        """Keeps a session that has got a turn, and forgets others if that is too much."""
        name = session.session_id
        self._sessions[name], self._sizes[name] = session, session.num_bytes
        self._sessions.move_to_end(name)
        while len(self._sessions) > MAX_NAMED or sum(self._sizes.values()) > self._max_bytes:
            self.forget(next(iter(self._sessions)))

    def forget(self, name: str) -> None:
        """Drops a session, if any."""
        self._sessions.pop(name, None)
        self._sizes.pop(name, None)


def _digests(request: Mapping[str, object]) -> list[bytes]:
    """A digest of the first message, of the first two, and so on; empty where there are none that can be read."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return []
    digest, found = hashlib.sha256(_bytes([request.get(name) for name in CONTEXT])).digest(), list[bytes]()
    for message in messages:
        digest = hashlib.sha256(digest + _bytes(said(message))).digest()
        found.append(digest)
    return found


def _bytes(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode("ascii")
