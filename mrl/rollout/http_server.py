"""The OpenAI-compatible server of an engine's process: addresses and routes, behind `http_gate`. `http_handlers` says what the routes do.

It runs in a thread of its own. Requests wait while the engine cannot sample, during a refit or while memory is lent to the trainer.
"""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from mrl.config.schema.policy import PolicyConfig
from mrl.data.prompts import sampling_params
from mrl.rollout.engine import Engine
from mrl.rollout.http_engine import HttpEngine
from mrl.rollout.http_gate import max_body_bytes, start
from mrl.rollout.http_handlers import Handlers, Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SESSION_HEADER = "X-Session-ID"
"""Names the session that a request belongs to, as the field `session_id` does."""


def start_server(engine: Engine, policy: PolicyConfig, *, host: str, api_key: str, wake: Callable[[], None]) -> str:
    """Starts the server in a thread that lives as long as the process; its base URL, `http://HOST:PORT/v1`.

    `wake` is called from that thread whenever a request has come: it sees to it that the engine is stepped.

    Raises:
        RuntimeError: no port of the range is free.
        TypeError: a parser cannot work with the tokenizer.
    """
    # vLLM's is one of transformers'.
    sampling = sampling_params(policy, cast("PreTrainedTokenizerBase", engine.llm.get_tokenizer()))
    handlers = Handlers(HttpEngine(engine, sampling, wake=wake), policy, sampling)
    listener = listen(host, range(policy.generation.port_range_low, policy.generation.port_range_high))
    start(make_app(engine, handlers), listener, api_key=api_key, max_body=max_body_bytes(handlers.limits.max_model_len))
    return f"http://{host}:{listener.getsockname()[1]}/v1"


def listen(host: str, ports: range) -> socket.socket:
    """A socket that listens at a free port of the range.

    Raises:
        RuntimeError: all of them are taken.
    """
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind((host, port))
            listener.listen(1024)
            return listener
        listener.close()
    raise RuntimeError(
        f"no free port from {ports.start} to {ports.stop - 1} on {host} (policy.generation.port_range_low and _high); widen the range"
    )


def make_app(engine: Engine, handlers: Handlers) -> FastAPI:
    """The routes. `http_gate` has checked the key and read the body."""
    app = FastAPI(openapi_url=None)
    app.state.args = Namespace(log_error_stack=False)  # vLLM's handlers of errors look there
    init_exception_handler(app)

    @app.post("/v1/chat/completions")
    @with_cancellation
    async def chat(body: Json, raw_request: Request) -> JSONResponse:
        return JSONResponse(await handlers.chat(body, session_of(body, raw_request)))

    @app.post("/v1/completions")
    @with_cancellation
    async def complete(body: Json, raw_request: Request) -> JSONResponse:
        return JSONResponse(await handlers.complete(body, session_of(body, raw_request)))

    @app.post("/tokenize")
    async def tokenize(body: Json) -> JSONResponse:
        return JSONResponse(await handlers.tokenize(body))

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse(await handlers.list_models())

    @app.get("/v1/sessions/{session_id}")
    async def session(session_id: str) -> JSONResponse:
        if (turns := handlers.sessions.describe(session_id)) is None:
            raise HTTPException(404, f"no session {session_id} on this engine: it has none of that name, or forgot it")
        return JSONResponse({"id": session_id, "turns": turns})

    @app.delete("/v1/sessions/{session_id}")
    async def forget(session_id: str) -> JSONResponse:
        handlers.sessions.forget(session_id)
        return JSONResponse({"id": session_id, "deleted": True})

    @app.get("/health")
    async def health() -> JSONResponse:
        status = "sampling" if engine.can_sample else "waiting"
        return JSONResponse({"status": status, "weight_version": engine.weight_version})

    return app


def session_of(body: Json, request: Request) -> str | None:
    """The session that a request names, if it does."""
    named = body.get("session_id") or request.headers.get(SESSION_HEADER)
    return str(named) if named else None
