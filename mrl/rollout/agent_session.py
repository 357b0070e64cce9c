# SPDX-License-Identifier: Apache-2.0
"""One agent's session: turns its requests into an engine's and keeps answers token by token. Needs no vLLM, no HTTP.

A session takes any request of OpenAI's protocol. What would change the distribution that tokens are drawn from, which
the trainer compares with, is replaced by the run's own value, and counted.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from mrl.config.conversations import Heard
from mrl.rollout.http_gate import NEUTRAL
from mrl.rollout.sessions import Message, said, without_ids
from mrl.rollout.turn_tree import NO_ROUTES, SampledAnswer, TreeNode, TurnTree
from mrl.types import SamplingParams, hashed_seed

RECORD = "record"
"""Field of requests to engines that asks for the tokens of answers, and of the answers that has them."""
ROUTES = "routes"
"""Field of each answer in a record where engines keep routes: as `write_routes` makes it, or null if nobody
knows them.
"""
FORCED = "forced"
"""Reason not to train an answer: a schema or grammar chose among its tokens, and their logprobs are not those of the
model alone.
"""

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


@dataclass
class AgentSession:
    """The requests of one agent's attempt at a rollout."""

    session_id: str
    key: str
    """Key of this session alone."""
    sampling: SamplingParams
    seed: int
    max_model_len: int
    tree: TurnTree = field(default_factory=TurnTree)
    engines: list[int] = field(default_factory=list)
    """Indices of the engines that have answered, in order."""
    asks: int | None = None
    """The engine that is asked first, which counts the session among its own."""
    overridden: Counter[str] = field(default_factory=Counter)
    """Number of requests, by parameter, that asked for another value than the run's."""
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
                self.overridden[name] += 1
        request = {name: body[name] for name in PASSED if body.get(name) is not None}
        if isinstance(messages := request.get("messages"), list):
            # Which tokens an answer was sampled in, the tree says.
            request["messages"] = without_ids(messages)
        return request | own | {RECORD: True}

    def find_prefix(self, request: Mapping[str, object]) -> tuple[list[int], int] | None:
        """Sampled tokens of a conversation's longest known beginning, and its number of messages; None: none."""
        digests = _digests(request)
        # With no message behind the answer, it is to be written anew.
        for num_messages in range(len(digests) - 1, 0, -1):
            if (node := self._spoken.get(digests[num_messages - 1])) is not None:
                return node.token_ids.tolist(), num_messages
        return None

    def keep(self, request: Mapping[str, object], response: Mapping[str, object]) -> list[TreeNode]:
        """Adds an engine's answers to the tree, each as a turn; in the order of its choices."""
        record = response.get(RECORD)
        choices = cast("Sequence[Mapping[str, object]]", response.get("choices") or ())
        nodes = list[TreeNode]()
        for index, choice in enumerate(choices):
            message = choice.get("message")
            text = choice.get("text") if message is None else cast(Message, message).get("content")
            self.note_text(text, message)
            messages = request.get("messages")
            asked = messages if isinstance(messages, list) else [request.get("prompt")]
            self.heard.note([*asked, message or {"role": "assistant", "content": text}])
            if not isinstance(record, Mapping):
                continue
            node = self._add(record, index)
            nodes.append(node)
            if isinstance(message, Mapping) and isinstance(messages, list):
                self._spoken[_digests({**request, "messages": [*messages, message]})[-1]] = node
        return nodes

    def _add(self, record: Mapping[str, object], index: int) -> TreeNode:
        prompt_ids = cast("list[int]", record["prompt_token_ids"])
        answer = cast("Sequence[Mapping[str, list]]", record["answers"])[index]
        length, untrained, start, routes = len(answer["token_ids"]), FORCED if record["is_forced"] else "", 0, None
        # Otherwise the agent itself has asked for so few tokens.
        is_cut = length >= self.sampling.max_new_tokens or len(prompt_ids) + length >= self.max_model_len
        if ROUTES in answer:
            written = cast("Mapping[str, object] | None", answer[ROUTES])
            untrained = untrained if written is not None else NO_ROUTES  # of turns behind a forced one, too
            start, routes = read_routes(written) if written is not None else (0, None)
        sampled = SampledAnswer(
            np.asarray(answer["token_ids"], dtype=np.int32),
            np.asarray(answer["logprobs"], dtype=np.float32),
            "length" if answer["finish_reason"] == "length" and is_cut else "stop",
            cast(int, record["weight_version"]),
            cast(int, record["num_weight_versions"]),
            untrained,
            routes,
            start,
        )
        return self.tree.add(prompt_ids, sampled)

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


def write_routes(routes: np.ndarray, start: int) -> dict[str, object]:
    """Routes of the tokens from `start` on, as JSON."""
    data = base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode("ascii")
    return {"start": start, "shape": list(routes.shape), "dtype": str(routes.dtype), "data": data}


def read_routes(written: Mapping[str, object]) -> tuple[int, np.ndarray]:
    """The first token and the routes that `write_routes` has written."""
    flat = np.frombuffer(base64.b64decode(cast(str, written["data"])), dtype=np.dtype(cast(str, written["dtype"])))
    return cast(int, written["start"]), flat.reshape(cast("list[int]", written["shape"]))
