# SPDX-License-Identifier: Apache-2.0
"""A gateway in a thread, and engines behind it that answer by rule, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mrl.rollout import http_gate
from mrl.rollout.agent_session import AgentSession, write_routes
from mrl.rollout.gateway import EngineServers, Gateway
from mrl.types import SamplingParams
from tests.waiting import HANG_S

ENGINE_KEY, RUN_KEY = "the-key-of-the-engines", "the-key-of-the-run"
SAMPLING = SamplingParams(temperature=0.9, top_p=1.0, top_k=None, max_new_tokens=64, stop_token_ids=(2,))
END = 2
CONTEXT = 400
T = TypeVar("T")


@dataclass
class FakeEngine:
    """Reads text as bytes, ends each message with `END`; answers `n` times with the number of its requests so far."""

    asked: list[dict] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    """Answers wait for it."""
    weight_version: int = 3
    keeps_routes: bool = False
    """True: a token's experts are its place, and the number of the request."""

    def __post_init__(self) -> None:
        self.released.set()
        listener = socket.create_server(("127.0.0.1", 0))
        routes = [
            Route(path, self.answer, methods=["POST"])
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize")
        ]
        http_gate.start(Starlette(routes=routes), listener, api_key=ENGINE_KEY, max_body=10**7)
        self.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append(body)
        number = len(self.asked)
        await asyncio.to_thread(self.released.wait, HANG_S)
        if "messages" not in body:
            prompt_ids = list(body["prompt"].encode())
        else:
            messages = body["messages"]
            known = body.get("required_prefix_messages", 0)
            prompt_ids = [*body.get("required_prefix_token_ids", ())]
            prompt_ids += [
                token for message in messages[known:] for token in (*str(message.get("content")).encode(), END)
            ]
        if len(prompt_ids) > CONTEXT:
            return http_gate.openai_error(400, f"This model's maximum context length is {CONTEXT} tokens.")
        # Tokens that no tokenizer would make of the text.
        reason = "length" if body.get("max_tokens") == 3 or len(prompt_ids) + 3 >= CONTEXT else "stop"
        drawn: dict[str, Any] = {"logprobs": [-0.25, -0.5, -0.75], "finish_reason": reason}
        answers = [drawn | {"token_ids": [900 + number, 800 + index, END]} for index in range(body.get("n", 1))]
        versions = {"weight_version": self.weight_version, "num_weight_versions": 1}
        record = {"prompt_token_ids": prompt_ids, "answers": answers} | versions
        record["is_forced"] = body.get("tool_choice") == "required"
        for answer in answers if self.keeps_routes else ():
            start = max(0, len(body.get("required_prefix_token_ids", ())) - 1)
            places = np.arange(start, len(prompt_ids) + 2, dtype=np.uint16)
            answer["routes"] = write_routes(np.stack([places, np.full_like(places, number)], axis=1)[:, None], start)
        choices = [self.choice(body, number, index) for index in range(len(answers))]
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": 3, "total_tokens": len(prompt_ids) + 3}
        kind = "chat.completion" if "messages" in body else "text_completion"
        return JSONResponse(
            {
                "id": f"x{number}",
                "object": kind,
                "created": 1,
                "model": "m",
                "choices": choices,
                "usage": usage,
                "record": record,
            }
            | versions
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


class Running:
    """A gateway in its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.gateway = Gateway(EngineServers(ENGINE_KEY), api_key=RUN_KEY, max_model_len=CONTEXT)
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
        if (client := self.gateway.engines._client) is not None:
            self.run(client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)

    def use(self, *engines: FakeEngine | str) -> None:
        addresses = [engine if isinstance(engine, str) else engine.base_url for engine in engines]
        self.call(lambda: self.gateway.engines.set_addresses(addresses))

    @contextmanager
    def session(self, sampling: SamplingParams = SAMPLING, seed: int = 7) -> Iterator[AgentSession]:
        session = self.call(lambda: self.gateway.open_session(sampling=sampling, seed=seed))
        try:
            yield session
        finally:
            self.call(lambda: self.gateway.close_session(session))

    def base_url(self, session: AgentSession) -> str:
        return f"{self.url}/sessions/{session.session_id}/v1"
