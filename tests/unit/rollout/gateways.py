# SPDX-License-Identifier: Apache-2.0
"""A gateway in a thread, over real sockets, and engines behind it that answer by rule."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from starlette.exceptions import HTTPException

from mrl.rollout import http_gate
from mrl.rollout.agent_session import AgentSession, SampledReply
from mrl.rollout.callers import EngineLines, EngineLost
from mrl.rollout.gateway import Gateway
from mrl.rollout.turn_tree import FORCED, SampledAnswer
from mrl.types import SamplingParams
from tests.waiting import HANG_S

RUN_KEY = "the-key-of-the-run"
SAMPLING = SamplingParams(temperature=0.9, top_p=1.0, top_k=None, max_new_tokens=64, stop_token_ids=(2,))
END = 2
CONTEXT = 400
T = TypeVar("T")


@dataclass
class FakeEngine:
    """Reads text as bytes, ends each message with `END`; answers `n` times with the number of its requests so far."""

    asked: list[dict] = field(default_factory=list)
    """Bodies, with `prefix`, the tokens that a prompt begins with and their number of messages."""
    released: threading.Event = field(default_factory=threading.Event)
    """Answers wait for it."""
    weight_version: int = 3
    keeps_routes: bool = False
    """True: a token's experts are its place, and the number of the request."""
    is_dead: bool = False

    def __post_init__(self) -> None:
        self.released.set()

    async def health(self) -> tuple[bool, int | None]:
        if self.is_dead:
            raise EngineLost("it died")
        return self.released.is_set(), self.weight_version

    async def ask(self, prompt: Any, params: Any) -> Any:
        """Answers a request of `FakeHandlers`, whose prompts are bodies."""
        body: dict = prompt
        if self.is_dead:
            raise EngineLost("it died")
        self.asked.append(body)
        number = len(self.asked)
        while not self.released.is_set():
            await asyncio.sleep(0.01)
            if self.is_dead:
                raise EngineLost("it died")
        known_ids, known = body.get("prefix") or ((), 0)
        if "messages" not in body:
            prompt_ids = list(body["prompt"].encode())
        else:
            prompt_ids = [*known_ids]
            prompt_ids += [
                token for message in body["messages"][known:] for token in (*str(message.get("content")).encode(), END)
            ]
        if len(prompt_ids) > CONTEXT:
            raise HTTPException(400, f"This model's maximum context length is {CONTEXT} tokens.")
        # Tokens that no tokenizer would make of the text.
        is_cut = body.get("max_tokens") == 3 or len(prompt_ids) + 3 >= CONTEXT
        answers = [self.answer(body, number, index, len(prompt_ids), is_cut) for index in range(body.get("n", 1))]
        choices = [self.choice(body, number, index) for index in range(len(answers))]
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": 3, "total_tokens": len(prompt_ids) + 3}
        response = {
            "id": f"x{number}",
            "object": "chat.completion" if "messages" in body else "text_completion",
            "created": 1,
            "model": "m",
            "choices": choices,
            "usage": usage,
            "weight_version": self.weight_version,
            "num_weight_versions": 1,
        }
        return SampledReply(response, prompt_ids, answers, ["tools"] if body.get("tools") else [])

    def answer(self, body: dict, number: int, index: int, num_prompt: int, is_cut: bool) -> SampledAnswer:
        start, routes = 0, None
        if self.keeps_routes:
            known_ids, _ = body.get("prefix") or ((), 0)
            start = max(0, len(known_ids) - 1)
            places = np.arange(start, num_prompt + 2, dtype=np.uint16)
            routes = np.stack([places, np.full_like(places, number)], axis=1)[:, None]
        return SampledAnswer(
            np.array([900 + number, 800 + index, END], dtype=np.int32),
            np.array([-0.25, -0.5, -0.75], dtype=np.float32),
            "length" if is_cut else "stop",
            self.weight_version,
            1,
            FORCED if body.get("tool_choice") == "required" else "",
            routes,
            start,
        )

    def choice(self, body: dict, number: int, index: int) -> dict:
        text = f"answer {number}.{index}"
        if "messages" not in body:
            return {"index": index, "text": text, "finish_reason": "stop", "logprobs": None}
        calls = []
        if body.get("tools"):
            calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
        message = {"role": "assistant", "content": text, "tool_calls": calls, "reasoning": None}
        return {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else "stop",
            "logprobs": {"content": []},
        }


class FakeHandlers:
    """Hands bodies to engines as they are."""

    sampling = SAMPLING

    async def answer(
        self, body: dict, ask: Any, *, is_chat: bool, prefix: Any = None, in_session: bool = False
    ) -> SampledReply:
        return await ask(body | ({} if prefix is None else {"prefix": prefix}), None)

    async def tokenize(self, body: dict) -> dict:
        return {"tokens": list(str(body.get("prompt")).encode())}


class Running:
    """A gateway in its thread."""

    def __init__(self, handlers: Any = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.gateway = Gateway(EngineLines(), handlers or FakeHandlers(), api_key=RUN_KEY, max_model_len=CONTEXT)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = http_gate.make_server(
            self.gateway.app(), has_key=self.gateway.has_key, max_body=self.gateway.max_body
        )
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve(sockets=[listener]), self.loop)

    def call(self, function: Callable[[], T]) -> T:
        async def called() -> T:
            return function()

        return self.run(called())

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(HANG_S)

    def stop(self) -> None:
        self._server.should_exit = True
        self._serving.result(HANG_S)
        self.loop.call_soon_threadsafe(self.loop.stop)

    def use(self, *engines: Any) -> None:
        self.call(lambda: self.gateway.engines.set(engines))

    @contextmanager
    def session(self, sampling: SamplingParams = SAMPLING, seed: int = 7) -> Iterator[AgentSession]:
        session = self.call(lambda: self.gateway.open_session(sampling=sampling, seed=seed))
        try:
            yield session
        finally:
            self.call(lambda: self.gateway.close_session(session))

    def base_url(self, session: AgentSession) -> str:
        return f"{self.url}/sessions/{session.session_id}/v1"
