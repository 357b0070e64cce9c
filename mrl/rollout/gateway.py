# SPDX-License-Identifier: Apache-2.0
"""The gateway of a run: one address for all agents, in front of engines that come, die and move. Needs no vLLM.

`/sessions/ID/v1/...` answers OpenAI's protocol for one agent, with a key of its own, and keeps what was sampled.
`/gym/v1/...` answers NeMo Gym's servers, which have no sessions, and leaves receipts. `/v1/...`, with the run's key,
passes on to an engine and keeps nothing. While no engine answers, requests wait. Everything here is in one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import cast

import aiohttp
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mrl.config.rules.gym_servers import GYM_PATH
from mrl.rollout.agent_session import RECORD, AgentSession
from mrl.rollout.http_fields import Asked, find_mistake
from mrl.rollout.http_gate import BODY_BYTES_PER_TOKEN, OPEN_PATH, SMALL_BODY_BYTES, openai_error
from mrl.rollout.receipts import Receipts
from mrl.rollout.sessions import MESSAGE_IDS, PREFIX, PREFIX_MESSAGES
from mrl.rollout.turn_tree import TreeNode
from mrl.types import SamplingParams

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The model's name; requests may use any."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GYM = GYM_PATH.removesuffix("/v1")
PASSED_ON = (CHAT, COMPLETIONS, "/tokenize")
# A client may send the tokens of every turn back, each with its whole prompt: bodies grow with the square of turns.
TURNS_IN_BODY, BYTES_PER_ID = 200, 8
# After no engine has answered; an engine that dies is started again within minutes.
RETRY_S = 0.5
WARN_S = 60.0
CONNECT_S = 10.0

Json = dict[str, object]
Reply = tuple[int, Json]
"""Status and body."""
FindPrefix = Callable[[Mapping[str, object]], tuple[list[int], int] | None]
"""See `AgentSession.find_prefix`."""


class EngineServers:
    """The engines' own servers. One that cannot be reached is left out of a request, and reported."""

    def __init__(self, api_key: str) -> None:
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._addresses: list[str] = []
        self._loads: dict[int, int] = {}
        self._client: aiohttp.ClientSession | None = None
        self._posting: dict[int, set[asyncio.Future[Reply]]] = {}
        """Requests under way, by engine."""
        self.unreachable: set[int] = set()
        """Engines that have broken a connection since the owner looked last."""

    @property
    def num_asked(self) -> int:
        """Requests under way at engines."""
        return sum(map(len, self._posting.values()))

    def set_addresses(self, base_urls: Sequence[str]) -> None:
        """Sets where engines are, by index: `http://HOST:PORT/v1`. Requests to one that has moved are asked again."""
        before, self._addresses = self._addresses, [base_url.removesuffix("/v1") for base_url in base_urls]
        for index, posting in self._posting.items():
            if self._addresses[index : index + 1] != before[index : index + 1]:
                for one in list(posting):
                    one.cancel()  # its node may have gone without a word

    async def ask(self, path: str, body: Json, *, session: AgentSession | None = None) -> Reply:
        """The session engine's answer, or another's if it dies. Waits while there is none, as long as who asks does."""
        warned_at = time.monotonic()
        while True:
            for index in self._in_order(session):
                if session is not None and session.asks != index:
                    self.join(session, index)  # at once, so that sessions that begin together ask different engines
                reply = await self._try(index, path, body)
                if reply is not None:
                    if session is not None and session.engines[-1:] != [index]:
                        session.engines.append(index)
                    return reply
            if time.monotonic() > warned_at + WARN_S:
                warned_at = time.monotonic()
                logger.warning("No engine has answered for %g s; requests wait for one", WARN_S)
            await asyncio.sleep(RETRY_S)

    def join(self, session: AgentSession, index: int) -> None:
        """Assigns the session to this engine."""
        self.leave(session)
        session.asks, self._loads[index] = index, self._loads.get(index, 0) + 1

    def leave(self, session: AgentSession) -> None:
        """Takes the session from its engine."""
        if session.asks is not None:
            self._loads[session.asks] -= 1
            session.asks = None

    def _in_order(self, session: AgentSession | None) -> list[int]:
        """Orders engines: the session's first, whose cache has the conversation, then those with fewest sessions."""
        first = session.asks if session is not None else None
        return sorted(range(len(self._addresses)), key=lambda index: (index != first, self._loads.get(index, 0)))

    async def _try(self, index: int, path: str, body: Json) -> Reply | None:
        if self._client is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._client = aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(limit=0), trust_env=False
            )
        asked = asyncio.ensure_future(self._post(self._client, self._addresses[index] + path, body))
        posting = self._posting.setdefault(index, set())
        posting.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ServerTimeoutError) as error:
            self.unreachable.add(index)
            logger.warning("Engine %d cannot be reached: %s", index, error or type(error).__name__)
            return None
        finally:
            posting.discard(asked)

    async def _post(self, client: aiohttp.ClientSession, url: str, body: Json) -> Reply:
        async with client.post(url, json=body, headers=self._headers) as response:
            text = await response.text(errors="replace")
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else {"error": {"message": text}}


class Gateway:
    """Sessions by id, and the routes."""

    def __init__(
        self,
        engines: EngineServers,
        *,
        api_key: str,
        max_model_len: int,
        gym_key: str | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """`gym_key` is that of NeMo Gym's servers; None = the run's. A rollout takes at most `timeout_s` seconds."""
        self.engines = engines
        self.api_key = api_key
        """The run's."""
        self.gym_key = gym_key or api_key
        self.receipts = Receipts(timeout_s)
        """Receipts of answers to NeMo Gym's servers."""
        self.max_model_len = max_model_len
        self.max_body = SMALL_BODY_BYTES + (BODY_BYTES_PER_TOKEN + TURNS_IN_BODY * BYTES_PER_ID) * max_model_len
        self.num_answered = 0
        """Requests of sessions, since the start."""
        self._sessions: dict[str, AgentSession] = {}
        self._waiting: dict[str, set[asyncio.Task[Reply]]] = {}

    def open_session(self, *, sampling: SamplingParams, seed: int) -> AgentSession:
        session = AgentSession(secrets.token_urlsafe(12), secrets.token_urlsafe(32), sampling, seed, self.max_model_len)
        self._sessions[session.session_id] = session
        self._waiting[session.session_id] = set()
        return session

    def close_session(self, session: AgentSession) -> None:
        """Ends a session; its pending requests get no answer and are not kept."""
        del self._sessions[session.session_id]
        self.engines.leave(session)
        for task in self._waiting.pop(session.session_id):
            task.cancel()

    def has_key(self, path: str, authorization: bytes) -> bool:
        """True when a request shows the key of its session, or of the run."""
        session = self._sessions.get(path.split("/")[2]) if path.startswith("/sessions/") else None
        keys = [
            self.gym_key if path.startswith(f"{GYM}/") else self.api_key,
            *([session.key] if session is not None else []),
        ]
        return any([secrets.compare_digest(authorization, b"Bearer " + key.encode()) for key in keys])

    def app(self) -> Starlette:
        """The routes. `http_gate` has checked the key and read the body."""
        inside = "/sessions/{session_id}"
        routes = [Route(path, self._passing_on(path), methods=["POST"]) for path in PASSED_ON]
        routes += [Route(inside + path, self._answering(path), methods=["POST"]) for path in (CHAT, COMPLETIONS)]
        routes += [
            Route(inside + path, self._passing_on("/tokenize"), methods=["POST"])
            for path in ("/tokenize", "/v1/tokenize")
        ]
        routes += [Route(GYM + path, self._answering_gym(path), methods=["POST"]) for path in (CHAT, COMPLETIONS)]
        routes += [
            Route(GYM + path, self._passing_on("/tokenize"), methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")
        ]
        routes += [Route(prefix + "/v1/models", _models) for prefix in ("", inside, GYM)]
        routes += [Route(inside, self._describe), Route(OPEN_PATH, self._health)]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refuse, Exception: _fail})

    def _passing_on(self, path: str) -> Callable[[Request], Coroutine[None, None, Response]]:
        async def pass_on(request: Request) -> Response:
            body = {name: value for name, value in (await _body(request)).items() if name not in ("model", RECORD)}
            reply = await _while_connected(request, self.engines.ask(path, body), set())
            return Response(status_code=499) if reply is None else _response(*reply)

        return pass_on

    def _answering(self, path: str) -> Callable[[Request], Coroutine[None, None, Response]]:
        async def answer(request: Request) -> Response:
            session = self._session(request)
            body = await _body(request)
            if (
                path == COMPLETIONS
                and isinstance(one := body.get("prompt"), list)
                and len(one) == 1
                and isinstance(one[0], str | list)
            ):
                body = {**body, "prompt": one[0]}
            if (
                path == COMPLETIONS
                and isinstance(prompt := body.get("prompt"), list)
                and not all(isinstance(one, int) for one in prompt)
            ):
                raise HTTPException(400, "prompt: a session goes on with one prompt; send one request for each")
            # A session that has ended meanwhile waits for nothing any more.
            waiting = self._waiting.get(session.session_id, set())
            reply = await _while_connected(request, self._ask(path, session, body, session.find_prefix), waiting)
            if session.session_id not in self._sessions:
                raise HTTPException(
                    410, f"session {session.session_id} is over: its rollout has ended, or has taken too long"
                )
            if reply is None:
                return Response(status_code=499)
            status, response = reply
            return _streamed(response, body) if body.get("stream") and status == 200 else _response(status, response)

        return answer

    def _answering_gym(self, path: str) -> Callable[[Request], Coroutine[None, None, Response]]:
        async def answer(request: Request) -> Response:
            body = await _body(request)
            if (sampling := self.receipts.sampling_of(body)) is None:
                raise HTTPException(410, "no rollout is under way; the one that asks has ended, or has taken too long")
            # Of one request, as nobody knows which others its rollout has made.
            session = AgentSession("", "", sampling, secrets.randbits(63), self.max_model_len)
            known = self.receipts.find_prefix(body.get("messages"))
            if known is not None:
                self.engines.join(session, known[2])
            try:
                asking = self._ask(
                    path, session, body | {"return_token_ids": True}, lambda _: None if known is None else known[:2]
                )
                reply = await _while_connected(request, asking, set())
            finally:
                self.engines.leave(session)
            for node in session.tree.nodes:
                self.receipts.keep(node, session)
            if reply is None:
                return Response(status_code=499)
            status, response = reply
            if status >= 400:  # of which NeMo Gym's servers make an error 500 without a reason
                logger.warning("Refused to NeMo Gym's servers: %s", response.get("error"))
            return _streamed(response, body) if body.get("stream") and status == 200 else _response(status, response)

        return answer

    async def _ask(self, path: str, session: AgentSession, body: Json, find_prefix: FindPrefix) -> Reply:
        """An engine's answer, which the session keeps. Whoever hangs up before it ends gets none, and none is kept."""
        request = session.asked(body)
        prefix = find_prefix(request)
        known: Json = {} if prefix is None else {PREFIX: prefix[0], PREFIX_MESSAGES: prefix[1]}
        status, response = await self.engines.ask(path, request | known, session=session)
        if status == 400 and known:
            # The template may end no message, or the tokens may not fit where the text does.
            status, response = await self.engines.ask(path, request, session=session)
        if status == 200:
            self.num_answered += 1
            nodes = session.keep(request, response)
            _shape(
                response,
                nodes,
                wants_ids=body.get("return_token_ids") is True,
                wants_logprobs=bool(body.get("logprobs")),
            )
        return status, response

    def _session(self, request: Request) -> AgentSession:
        session_id = request.path_params["session_id"]
        if (session := self._sessions.get(session_id)) is None:
            raise HTTPException(404, f"no session {session_id}: its rollout has ended")
        return session

    async def _describe(self, request: Request) -> Response:
        tree = self._session(request).tree
        turns = [
            {
                "prompt_token_ids": node.token_ids[: node.length - len(node.answer.token_ids)].tolist(),
                "token_ids": node.answer.token_ids.tolist(),
                "logprobs": node.answer.logprobs.tolist(),
                "finish_reason": node.answer.finish_reason,
                "weight_version": node.answer.weight_version,
                "num_weight_versions": node.answer.num_weight_versions,
                "untrained": node.untrained,
            }
            for node in tree.nodes
            if node.answer is not None
        ]
        return JSONResponse({"id": request.path_params["session_id"], "turns": turns})

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "num_sessions": len(self._sessions)})


async def _models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "mrl"}]})


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return openai_error(error.status_code, error.detail)


async def _fail(_: Request, error: Exception) -> Response:
    return openai_error(500, f"the gateway failed with {type(error).__name__}: {error}")


async def _body(request: Request) -> Json:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, f"the body is a {type(body).__name__}; send an object")
    if mistake := find_mistake(body, Asked):
        raise HTTPException(400, mistake)
    return body


async def _while_connected(
    request: Request, answer: Coroutine[None, None, Reply], waiting: set[asyncio.Task[Reply]]
) -> Reply | None:
    """Waits for the answer; None if the client leaves first, or the owner of `waiting` cancels the request."""
    task = asyncio.ensure_future(answer)
    waiting.add(task)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():
            return None
        return await task
    finally:
        gone.cancel()
        task.cancel()
        waiting.discard(task)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(status: int, body: Json) -> Response:
    error = body.get("error")
    if status == 200 or not isinstance(error, Mapping):
        return JSONResponse(body, status_code=status)
    return openai_error(status, str(error.get("message")), cast("str | int | None", error.get("code")))


def _shape(response: Json, nodes: Sequence[TreeNode], *, wants_ids: bool, wants_logprobs: bool) -> None:
    """Turns an engine's answer into the client's: drops the record, and token ids that it did not ask for."""
    response.pop(RECORD, None)
    response["model"] = MODEL
    for name in ("prompt_token_ids", "prompt_logprobs", "kv_transfer_params"):
        response.pop(name, None)
    for choice, node in zip(cast("list[Json]", response["choices"]), nodes, strict=True):
        choice.pop("token_ids", None)
        if not wants_logprobs:
            choice["logprobs"] = None
        if not wants_ids or node.answer is None:
            continue
        ids = node.answer.token_ids.tolist()
        prompt_ids = node.token_ids[: node.length - len(ids)].tolist()
        response["prompt_token_ids"], choice["token_ids"] = prompt_ids, ids
        if isinstance(message := choice.get("message"), dict):
            message |= dict(zip(MESSAGE_IDS, (prompt_ids, ids), strict=True))
            message["generation_log_probs"] = node.answer.logprobs.tolist()


def _streamed(response: Json, body: Json) -> Response:
    """A complete answer as a stream: a chunk for all choices, one for the usage if asked for, and the end mark."""
    is_chat = "messages" in body
    head = {name: response.get(name) for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    choices = list[Json]()
    for choice in cast("list[Json]", response["choices"]):
        chunk = dict(choice)
        if is_chat:
            delta = {name: value for name, value in cast(Json, chunk.pop("message")).items() if value is not None}
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [call | {"index": index} for index, call in enumerate(cast("list[Json]", calls))]
            chunk["delta"] = delta
        choices.append(chunk)
    options = body.get("stream_options")
    wants_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))

    def lines() -> Iterator[str]:
        yield f"data: {json.dumps(head | {'choices': choices})}\n\n"
        if wants_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': response.get('usage')})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")
