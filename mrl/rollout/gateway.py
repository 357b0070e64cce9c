# SPDX-License-Identifier: Apache-2.0
"""The gateway of a run: one HTTP server for all who ask its engines, which come, die and move. Needs no vLLM.

`/sessions/ID/v1/...` answers OpenAI's protocol for one agent, with a key of its own, and keeps what was sampled.
`/gym/v1/...` answers NeMo Gym's servers, which have no sessions, and leaves receipts. `/v1/...`, with the run's key,
asks any engine, and `/engines/INDEX/v1/...` that one. `/judges/NAME/v1/...`, with the run's key or that of NeMo Gym's
servers, asks a judge. While no engine answers, requests wait. Everything here is in one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from mrl.config.schema.env import GYM_PATH
from mrl.rollout.agent_session import MESSAGE_IDS, AgentSession, NamedSessions, SampledReply
from mrl.rollout.callers import Answered, Ask, EngineLines, Params, Prompt
from mrl.rollout.http_fields import Asked, find_mistake
from mrl.rollout.http_gate import BODY_BYTES_PER_TOKEN, OPEN_PATH, SMALL_BODY_BYTES, openai_error
from mrl.rollout.receipts import Receipts
from mrl.rollout.turn_tree import TreeNode
from mrl.types import SamplingParams

logger = logging.getLogger(__name__)

MODEL = "policy"
"""The model's name for agents, who may use any."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENIZE = ("/tokenize", "/v1/tokenize")
GYM = GYM_PATH.removesuffix("/v1")
ONE_ENGINE = "/engines/{index:int}"
JUDGES = "/judges"
SESSION_HEADER = "X-Session-ID"
"""Names the session that a request belongs to, as the field `session_id` does."""
MAX_SESSION_ID = 256
"""Characters."""
# A client may send the tokens of every turn back, each with its whole prompt: bodies grow with the square of turns.
TURNS_IN_BODY, BYTES_PER_ID = 200, 8

Json = dict[str, object]
Endpoint = Callable[[Request], Coroutine[None, None, Response]]
FindPrefix = Callable[[Mapping[str, object]], tuple[list[int], int] | None]
"""See `AgentSession.find_prefix`."""


class RequestHandlers(Protocol):
    """OpenAI's protocol, as `mrl.rollout.serving` answers it with vLLM. Both raise HTTPException."""

    sampling: SamplingParams

    async def answer(
        self,
        body: Json,
        ask: Ask,
        *,
        is_chat: bool,
        prefix: tuple[Sequence[int], int] | None = None,
        in_session: bool = False,
    ) -> SampledReply: ...

    async def tokenize(self, body: Json) -> Json: ...


class Gateway:
    """Sessions by id, and the routes."""

    def __init__(
        self,
        engines: EngineLines,
        handlers: RequestHandlers,
        *,
        api_key: str,
        max_model_len: int,
        model: str = MODEL,
        alias: str = MODEL,
        gym_key: str | None = None,
        timeout_s: float = math.inf,
        judges: Mapping[str, Gateway] = MappingProxyType({}),
    ) -> None:
        """`model` is the name for those who ask one engine, `alias` for others; `gym_key` that of NeMo Gym's servers.

        Without it they have the run's. A rollout takes at most `timeout_s` seconds.
        """
        self.engines, self.handlers = engines, handlers
        self.api_key = api_key
        """The run's."""
        self.model, self.alias, self.judges = model, alias, judges
        self.gym_key = gym_key or api_key
        self.receipts = Receipts(timeout_s)
        """Receipts of answers to NeMo Gym's servers."""
        self.max_model_len = max_model_len
        longest = max([max_model_len, *(judge.max_model_len for judge in judges.values())])
        self.max_body = SMALL_BODY_BYTES + (BODY_BYTES_PER_TOKEN + TURNS_IN_BODY * BYTES_PER_ID) * longest
        self.num_answered = 0
        """Requests of sessions, since the start."""
        self._sessions: dict[str, AgentSession] = {}
        self._waiting: dict[str, set[asyncio.Task[SampledReply]]] = {}
        self._named = NamedSessions(
            lambda name: AgentSession(name, "", handlers.sampling, 0, max_model_len, is_named=True)
        )

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
        """True if a request shows the key of its session, or of the run."""
        session = self._sessions.get(path.split("/")[2]) if path.startswith("/sessions/") else None
        is_gym, is_judge = path.startswith(f"{GYM}/"), path.startswith(f"{JUDGES}/")
        keys = [self.gym_key] * (is_gym or is_judge) + [self.api_key] * (not is_gym)
        keys += [session.key] if session is not None else []
        return any([secrets.compare_digest(authorization, b"Bearer " + key.encode()) for key in keys])

    def app(self) -> Starlette:
        """The routes. `http_gate` has checked the key and read the body."""
        inside, routes = "/sessions/{session_id}", list[Route]()
        for prefix, answer in (
            ("", self._answer_any),
            (ONE_ENGINE, self._answer_any),
            (inside, self._answer_session),
            (GYM, self._answer_gym),
        ):
            routes += [Route(prefix + path, answer, methods=["POST"]) for path in (CHAT, COMPLETIONS)]
            routes += [Route(prefix + path, self._tokenize, methods=["POST"]) for path in TOKENIZE]
            routes.append(Route(f"{prefix}/v1/models", self._models))
        for prefix in ("", ONE_ENGINE):
            named = f"{prefix}/v1/sessions/{{name}}"
            routes += [Route(named, self._describe_named), Route(named, self._forget_named, methods=["DELETE"])]
        routes += [Route(ONE_ENGINE + OPEN_PATH, self._engine_health)]
        routes += [Route(inside, self._describe), Route(OPEN_PATH, self._health)]
        routes += [Mount(f"{JUDGES}/{name}", judge.app()) for name, judge in self.judges.items()]
        return Starlette(routes=routes, exception_handlers={HTTPException: _refuse, Exception: _fail})

    async def _answer_any(self, request: Request) -> Response:
        body = await _body(request)
        first = request.path_params.get("index")
        if first is None:
            body.pop("model", None)
        name = body.pop("session_id", None) or request.headers.get(SESSION_HEADER)

        async def ask(prompt: Prompt, params: Params) -> Answered:
            return await self.engines.ask(prompt, params, first=first)

        if name is None:
            answer = self.handlers.answer(body, ask, is_chat=_is_chat(request))
        else:
            if len(name := str(name)) > MAX_SESSION_ID:
                raise HTTPException(400, f"session_id: {len(name)} characters; it may have {MAX_SESSION_ID}")
            answer = self._answer_named(body, ask, self._named.opened(name), is_chat=_is_chat(request))
        return _response(await _while_connected(request, answer, set()))

    async def _answer_named(self, body: Json, ask: Ask, session: AgentSession, *, is_chat: bool) -> SampledReply:
        body = _with_one_prompt(body, is_chat=is_chat)
        prefix = session.find_prefix(body) if is_chat else None
        reply = await self._going_on(body, ask, prefix, is_chat=is_chat, in_session=True)
        session.keep(body, reply)
        self._named.keep(session)
        return reply

    async def _going_on(
        self,
        body: Json,
        ask: Ask,
        prefix: tuple[list[int], int] | None,
        *,
        is_chat: bool,
        in_session: bool = False,
    ) -> SampledReply:
        if prefix is not None:
            try:
                return await self.handlers.answer(body, ask, is_chat=is_chat, prefix=prefix, in_session=in_session)
            except HTTPException as error:
                # The template may end no message, or the tokens may not fit where the text does.
                if error.status_code != 400:
                    raise
        return await self.handlers.answer(body, ask, is_chat=is_chat, in_session=in_session)

    async def _tokenize(self, request: Request) -> Response:
        body = await _body(request)
        if "index" not in request.path_params:
            body.pop("model", None)
        return JSONResponse(await self.handlers.tokenize(body))

    async def _models(self, request: Request) -> Response:
        name = self.model if "index" in request.path_params else self.alias
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "mrl"}]}
        )

    async def _describe_named(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (session := self._named.get(name)) is None:
            raise HTTPException(404, f"no session {name}: no request had that name, or the gateway forgot it")
        return JSONResponse({"id": name, "turns": session.turns()})

    async def _forget_named(self, request: Request) -> Response:
        self._named.forget(request.path_params["name"])
        return JSONResponse({"id": request.path_params["name"], "deleted": True})

    async def _engine_health(self, request: Request) -> Response:
        can_sample, version = await self.engines.health(request.path_params["index"])
        return JSONResponse({"status": "sampling" if can_sample else "waiting", "weight_version": version})

    async def _answer_session(self, request: Request) -> Response:
        session = self._session(request)
        body = _with_one_prompt(await _body(request), is_chat=_is_chat(request))
        # A session that has ended meanwhile waits for nothing any more.
        waiting = self._waiting.get(session.session_id, set())
        reply = await _while_connected(request, self._ask(request, session, body, session.find_prefix), waiting)
        if session.session_id not in self._sessions:
            raise HTTPException(
                410, f"session {session.session_id} is over: its rollout has ended, or has taken too long"
            )
        return _response(reply, body)

    async def _answer_gym(self, request: Request) -> Response:
        body = _with_one_prompt(await _body(request), is_chat=_is_chat(request))
        if (sampling := self.receipts.sampling_of(body)) is None:
            raise HTTPException(410, "no rollout is under way; the one that asks has ended, or has taken too long")
        # Of one request, as nobody knows which others its rollout has made.
        session = AgentSession("", "", sampling, secrets.randbits(63), self.max_model_len)
        known = self.receipts.find_prefix(body.get("messages"))
        if known is not None:
            self.engines.join(session, known[2])
        try:
            prefix = None if known is None else known[:2]
            asking = self._ask(request, session, body | {"return_token_ids": True}, lambda _: prefix)
            reply = await _while_connected(request, asking, set())
        except HTTPException as error:  # NeMo Gym's servers make it an error 500 without a reason
            logger.warning("Refused to NeMo Gym's servers: %s", error.detail)
            raise
        finally:
            self.engines.leave(session)
            for node in session.tree.nodes:
                self.receipts.keep(node, session)
        return _response(reply, body)

    async def _ask(self, asked: Request, session: AgentSession, body: Json, find_prefix: FindPrefix) -> SampledReply:
        """An engine's answer, which the session keeps; drops it if the client disconnects."""
        request, is_chat = session.asked(body), _is_chat(asked)
        prefix = find_prefix(request) if is_chat else None
        reply = await self._going_on(request, self.engines.asked_by(session), prefix, is_chat=is_chat)
        self.num_answered += 1
        nodes = session.keep(request, reply)
        _shape(
            reply.response,
            nodes,
            wants_ids=body.get("return_token_ids") is True,
            wants_logprobs=bool(body.get("logprobs")),
        )
        return reply

    def _session(self, request: Request) -> AgentSession:
        session_id = request.path_params["session_id"]
        if (session := self._sessions.get(session_id)) is None:
            raise HTTPException(404, f"no session {session_id}: its rollout has ended")
        return session

    async def _describe(self, request: Request) -> Response:
        session = self._session(request)
        return JSONResponse({"id": session.session_id, "turns": session.turns()})

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "num_sessions": len(self._sessions)})


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:  # as Starlette says it
        detail = f"there is no {request.url.path.rpartition('/v1/')[2]} here: ask by chat/completions or completions"
    return openai_error(error.status_code, detail)


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
    request: Request, answer: Coroutine[None, None, SampledReply], waiting: set[asyncio.Task[SampledReply]]
) -> SampledReply | None:
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


def _response(reply: SampledReply | None, body: Mapping[str, object] | None = None) -> Response:
    """The answer, as a stream if `body` asks for one; an empty one if nobody waits for it any more."""
    if reply is None:
        return Response(status_code=499)
    if body is not None and body.get("stream"):
        return _streamed(reply.response, body)
    return JSONResponse(reply.response)


def _is_chat(request: Request) -> bool:
    return request.url.path.endswith(CHAT)


def _with_one_prompt(body: Json, *, is_chat: bool) -> Json:
    """The request of a session: of a completion without messages, its prompt in no list.

    HTTPException: there are several.
    """
    if is_chat:
        return body
    body = {name: value for name, value in body.items() if name != "messages"}
    if not isinstance(prompt := body.get("prompt"), list):
        return body
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return body | {"prompt": prompt[0]}
    if not all(isinstance(one, int) for one in prompt):
        raise HTTPException(400, "prompt: a session goes on with one prompt; send one request for each")
    return body


def _shape(response: Json, nodes: Sequence[TreeNode], *, wants_ids: bool, wants_logprobs: bool) -> None:
    """Turns an engine's answer into the agent's: drops token ids that it did not ask for."""
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


def _streamed(response: Json, body: Mapping[str, object]) -> Response:
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
