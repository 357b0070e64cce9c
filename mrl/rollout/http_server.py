# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible server of an engine's process: routes, vLLM's own handlers behind them, and the engine these ask.

vLLM's protocol classes, chat templates and parsers do the work. The server runs in a thread of its own, behind
`http_gate`. Requests wait while the engine cannot sample, during a refit or while memory is lent to the trainer.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from vllm import CompletionOutput, RequestOutput
from vllm import SamplingParams as VllmSampling
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest, TokenizeResponse
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers import ToolParserManager

from mrl.config.schema.policy import PolicyConfig
from mrl.data.chat import served_template
from mrl.data.prompts import sampling_params
from mrl.rollout.agent_session import RECORD, ROUTES, write_routes
from mrl.rollout.callers import Answered, Question
from mrl.rollout.engine import Engine
from mrl.rollout.http_fields import Asked, described, find_mistake, naming
from mrl.rollout.http_gate import (
    CHAT_KEY,
    NEUTRAL,
    Limits,
    default_parameters,
    find_deviation,
    find_refusal,
    listen,
    max_body_bytes,
    openai_error,
    start,
)
from mrl.rollout.sessions import (
    PREFIX_MESSAGES,
    Message,
    Sessions,
    SessionTurn,
    continued,
    num_messages_to_answer,
    take_prefix,
)
from mrl.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SESSION_HEADER = "X-Session-ID"
"""Names the session that a request belongs to, as the field `session_id` does."""
Json = dict[str, object]
"""A JSON object as it comes and goes."""
Response = TypeVar("Response")
Parsed = TypeVar("Parsed", ChatCompletionRequest, CompletionRequest, TokenizeCompletionRequest, TokenizeChatRequest)


def start_server(engine: Engine, policy: PolicyConfig, *, host: str, api_key: str, wake: Callable[[], None]) -> str:
    """Starts the server in a thread that lives as long as the process, and returns its base URL, `http://HOST:PORT/v1`.

    `wake` is called from that thread whenever a request has come: it makes the owner step the engine.
    """
    # vLLM's is one of transformers'.
    sampling = sampling_params(policy, cast("PreTrainedTokenizerBase", engine.llm.get_tokenizer()))
    handlers = Handlers(HttpEngine(engine, sampling, wake=wake), policy, sampling)
    listener = listen(host, range(policy.generation.port_range_low, policy.generation.port_range_high))
    start(
        _make_app(engine, handlers), listener, api_key=api_key, max_body=max_body_bytes(handlers.limits.max_model_len)
    )
    return f"http://{host}:{listener.getsockname()[1]}/v1"


def _make_app(engine: Engine, handlers: Handlers) -> FastAPI:
    """The routes. `http_gate` has checked the key and read the body."""
    app = FastAPI(openapi_url=None)
    app.state.args = Namespace(log_error_stack=False)  # vLLM's handlers of errors look there
    init_exception_handler(app)

    @app.exception_handler(StarletteHTTPException)
    async def refuse(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return openai_error(error.status_code, str(error.detail))

    def session_of(body: Json, request: Request) -> str | None:
        named = body.get("session_id") or request.headers.get(SESSION_HEADER)
        return str(named) if named else None

    @app.post("/v1/chat/completions")
    @with_cancellation
    async def chat(body: Json, raw_request: Request) -> JSONResponse:
        return JSONResponse(await _naming(handlers.chat(body, session_of(body, raw_request)), body))

    @app.post("/v1/completions")
    @with_cancellation
    async def complete(body: Json, raw_request: Request) -> JSONResponse:
        return JSONResponse(await _naming(handlers.complete(body, session_of(body, raw_request)), body))

    @app.post("/tokenize")
    async def tokenize(body: Json) -> JSONResponse:
        return JSONResponse(await _naming(handlers.tokenize(body), body))

    @app.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse((await handlers.models.show_available_models()).model_dump())

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


def check_tool_parser(name: str, tokenizer: TokenizerLike) -> None:
    """Builds a parser once. RuntimeError if the tokenizer lacks what it needs, which would fail every request with
    tools.
    """
    try:
        ToolParserManager.get_tool_parser(name)(tokenizer)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"{CHAT_KEY}.tool_parser={name} does not work with this tokenizer: {error}; use a parser that reads "
            f"what the model writes, or {CHAT_KEY}.enable_auto_tools=false if nobody sends tools"
        ) from error


class Handlers:
    """One method for each route, which returns the JSON of the answer. Lives in the server's event loop.

    All raise `HTTPException` or what vLLM raises, for which it has handlers: both become errors in OpenAI's shape.
    """

    def __init__(self, engine: HttpEngine, policy: PolicyConfig, sampling: SamplingParams) -> None:
        """`sampling` is that of training."""
        vllm_cfg, name = policy.generation.vllm_cfg, policy.model_name
        chosen = vllm_cfg.http_server_serving_chat_kwargs
        if vllm_cfg.tool_parser_plugin is not None:
            ToolParserManager.import_tool_parser(vllm_cfg.tool_parser_plugin)
        if vllm_cfg.reasoning_parser_plugin is not None:
            ReasoningParserManager.import_reasoning_parser(vllm_cfg.reasoning_parser_plugin)
        if chosen.enable_auto_tools and chosen.tool_parser is not None:
            check_tool_parser(chosen.tool_parser, engine.renderer.get_tokenizer())
        own_kwargs = chosen.default_chat_template_kwargs
        rendering: dict[str, Any] = {
            "request_logger": None,
            "chat_template": served_template(chosen.chat_template, policy.tokenizer),
            "chat_template_content_format": "auto",
            "default_chat_template_kwargs": policy.tokenizer.chat_template_kwargs if own_kwargs is None else own_kwargs,
        }
        parsing: dict[str, Any] = {
            "enable_auto_tools": chosen.enable_auto_tools,
            "tool_parser": chosen.tool_parser,
            "reasoning_parser": chosen.reasoning_parser,
        }
        client = cast(EngineClient, engine)
        self.models = OpenAIServingModels(client, [BaseModelPath(name=name, model_path=name)])
        self.renderer = OnlineRenderer(engine.model_config, engine.renderer, **rendering, **parsing)
        self.chats = OpenAIServingChat(
            client, self.models, "assistant", online_renderer=self.renderer, **rendering, **parsing
        )
        self.completions = OpenAIServingCompletion(
            client, self.models, online_renderer=self.renderer, request_logger=None
        )
        self.tokenization = ServingTokenization(self.models, self.renderer, **rendering)
        for handler in (self.chats, self.completions):
            handler.default_sampling_params = default_parameters(sampling)
        self.engine = engine
        self.limits = Limits(max_model_len=engine.model_config.max_model_len, num_slots=vllm_cfg.num_http_slots)
        self.sampling = sampling
        self.sessions = Sessions()

    async def chat(self, body: Json, session_id: str | None) -> Json:
        plain, prefix = take_prefix(self._checked(body, session_id, ChatCompletionRequest))
        is_recorded, answered_messages = plain.pop(RECORD, False), plain.pop(PREFIX_MESSAGES, None)
        request = _read(ChatCompletionRequest, plain)
        request.request_id = uuid.uuid4().hex
        messages = cast(list[Message], request.messages)
        num_answered = cast(int, answered_messages or num_messages_to_answer(messages))
        if prefix is None and session_id is not None:
            prefix, num_answered = (
                self.sessions.sampled_ids(session_id, messages),
                self.sessions.num_answered(session_id),
            )
        if prefix is not None:
            # vLLM's way to hand over a prompt that has been rendered elsewhere.
            request.kv_transfer_params = {"prompt_token_ids": await self._continued(request, prefix, num_answered)}
        try:
            response = _successful(await self.chats.create_chat_completion(request), ChatCompletionResponse)
        finally:
            answers = self.engine.take_answers(request.request_id)
        if session_id is not None:
            self._keep(session_id, answers[0], [*messages, response.choices[0].message.model_dump()])
        # A client that sends the first tokens knows their routes, but not the last one's.
        known = 0 if prefix is None else len(prefix) - 1
        return response.model_dump() | _versions(answers) | (_record(answers[0], known) if is_recorded else {})

    async def complete(self, body: Json, session_id: str | None) -> Json:
        plain = self._checked(body, session_id, CompletionRequest)
        is_recorded = plain.pop(RECORD, False)
        request = _read(CompletionRequest, plain)
        request.request_id = uuid.uuid4().hex
        try:
            response = _successful(await self.completions.create_completion(request), CompletionResponse)
        finally:
            answers = self.engine.take_answers(request.request_id)
        if session_id is not None:
            self._keep(session_id, answers[0], [])
        return response.model_dump() | _versions(answers) | (_record(answers[0], 0) if is_recorded else {})

    async def tokenize(self, body: Json) -> Json:
        """`POST /tokenize`: of a text or a conversation; token ids that it is to begin with are kept, as in a chat."""
        is_chat = "messages" in body
        kind = TokenizeChatRequest if is_chat else TokenizeCompletionRequest
        plain, prefix = take_prefix(self._checked(body, None, kind))
        if not is_chat:
            asked = _read(TokenizeCompletionRequest, plain)
            return _successful(
                await self.tokenization.create_tokenize(asked, cast(Any, None)), TokenizeResponse
            ).model_dump()
        chat = _read(TokenizeChatRequest, plain)
        response = _successful(await self.tokenization.create_tokenize(chat, cast(Any, None)), TokenizeResponse)
        if prefix is not None:
            request = _read(ChatCompletionRequest, plain)
            num_answered = num_messages_to_answer(cast(list[Message], request.messages))
            response.tokens = await self._continued(request, prefix, num_answered)
            response.count, response.token_strs = len(response.tokens), None
        return response.model_dump()

    def _checked(self, body: Json, session_id: str | None, kind: type[BaseModel]) -> Json:
        if refusal := find_refusal(body, self.limits, session_id=session_id) or find_mistake(body, Asked, kind):
            raise HTTPException(400, refusal)
        given = ({"stop": list(self.sampling.stop_strings)} if self.sampling.stop_strings else {}) | body
        # Which session it is we know; the handlers tell the engine only what is set here.
        return {**given, "session_id": session_id} if session_id is not None else given

    async def _continued(self, request: ChatCompletionRequest, prefix: Sequence[int], num_answered: int) -> list[int]:
        if num_answered == 0:
            raise HTTPException(400, "the prompt is to begin with given token ids, but no message is the assistant's")
        answered_ids = await self._template_ids(request, num_answered, is_whole=False)
        whole_ids = await self._template_ids(request, len(request.messages), is_whole=True)
        return continued(prefix, answered_ids, whole_ids, frozenset(self.sampling.stop_token_ids))

    async def _template_ids(self, request: ChatCompletionRequest, num_messages: int, *, is_whole: bool) -> list[int]:
        changes: dict[str, object] = {"messages": copy.deepcopy(request.messages[:num_messages])}
        if not is_whole:
            changes |= {"add_generation_prompt": False, "continue_final_message": False}
        rendered = await self.renderer.render_chat(request.model_copy(update=changes))
        if isinstance(rendered, ErrorResponse):
            raise HTTPException(rendered.error.code, rendered.error.message)
        (prompt,) = rendered[1]
        return list(cast(dict[str, list[int]], prompt)["prompt_token_ids"])

    def _keep(self, session_id: str, answered: Answered, messages: Sequence[Message]) -> None:
        prompt_token_ids = list(answered.output.prompt_token_ids or ())
        (completion,) = answered.output.outputs
        turn = SessionTurn(
            prompt_token_ids=prompt_token_ids,
            token_ids=list(completion.token_ids),
            logprobs=_logprobs(completion),
            finish_reason=str(completion.finish_reason),
            weight_version=answered.weight_version,
            num_weight_versions=answered.num_weight_versions,
            is_continuation=self.sessions.is_continuation(session_id, prompt_token_ids),
        )
        self.sessions.add(session_id, turn, messages)


def _versions(answers: Sequence[Answered]) -> Json:
    """The fields of an answer that say which weights it was drawn from."""
    return {
        "weight_version": min(answered.weight_version for answered in answers),
        "num_weight_versions": max(answered.num_weight_versions for answered in answers),
    }


def _logprobs(completion: CompletionOutput) -> list[float]:
    drawn = zip(completion.token_ids, cast(list, completion.logprobs), strict=True)
    return [float(step[token_id].logprob) for token_id, step in drawn]


def _record(answered: Answered, routes_start: int) -> Json:
    """The answer's field with its tokens, and their routes from one token on, for the gateway."""
    answers = [
        {
            "token_ids": list(completion.token_ids),
            "logprobs": _logprobs(completion),
            "finish_reason": completion.finish_reason,
        }
        for completion in answered.output.outputs
    ]
    for answer, routes in zip(answers, answered.routes or (), strict=answered.routes is not None):
        answer[ROUTES] = None if routes is None else write_routes(routes[routes_start:], routes_start)
    prompt_token_ids = list(answered.output.prompt_token_ids or ())
    return {
        RECORD: {"prompt_token_ids": prompt_token_ids, "answers": answers, "is_forced": answered.is_forced}
        | _versions([answered])
    }


def _read(kind: type[Parsed], body: Json) -> Parsed:
    """Reads a request whose fields have their types as vLLM does."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise HTTPException(400, described(error, body)) from error
    except (AttributeError, KeyError, RecursionError) as error:
        raise HTTPException(400, f"the request cannot be read: {error}") from error


async def _naming(answer: Awaitable[Json], body: Json) -> Json:
    """The answer to a request; a refusal of it names a field."""
    try:
        return await answer
    except HTTPException as error:
        status, words = error.status_code, str(error.detail)
        raise HTTPException(status, naming(words, body) if status == 400 else words) from error
    except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
        info = create_error_response(error).error
        raise HTTPException(info.code, naming(info.message, body) if info.code == 400 else info.message) from error


def _successful(response: object, kind: type[Response]) -> Response:
    if isinstance(response, ErrorResponse):
        raise HTTPException(response.error.code, response.error.message)
    assert isinstance(response, kind), "answers are not streamed"
    return response


class HttpEngine:
    """The part of vLLM's `EngineClient` that its handlers use; passes each request to this process's engine."""

    errored = False

    def __init__(self, engine: Engine, sampling: SamplingParams, *, wake: Callable[[], None]) -> None:
        """`wake` is called after every question: it makes the owner step the engine. `sampling` is that of training."""
        self.vllm_config = engine.llm.vllm_config
        self.model_config = engine.llm.model_config
        self.renderer = engine.llm.renderer
        self.input_processor = engine.llm.input_processor
        self._callers = engine.callers
        self._sampling = sampling
        self._wake = wake
        self._answers: dict[str, Answered] = {}

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admits every request, as requests wait in the engine's queue."""

    async def generate(
        self,
        prompt: EngineInput,
        sampling_params: VllmSampling,
        request_id: str,
        *,
        session_id: str | None = None,
        **_: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the complete answer, which `take_answers` gives with its weight version. Waits while the client does.

        Raises:
            ValueError: vLLM refuses the request, or it is part of a session and would be sampled unlike rollouts.
        """
        if session_id is not None:
            values = {name: getattr(sampling_params, name) for name in (*NEUTRAL, "temperature", "top_p", "top_k")}
            if deviation := find_deviation(values, self._sampling):
                raise ValueError(deviation)
        if sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # of the drawn token alone
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answered] = loop.create_future()

        def settle(answered: Answered | Exception) -> None:
            if future.done():  # the client has gone
                return
            if isinstance(answered, Answered):
                future.set_result(answered)
            else:
                future.set_exception(answered)

        def answer(answered: Answered | Exception) -> None:
            loop.call_soon_threadsafe(settle, answered)

        question = Question(uuid.uuid4().hex, prompt, sampling_params, answer)
        self._callers.ask(question)
        self._wake()
        try:
            answered = await future
        except asyncio.CancelledError:
            self._callers.withdraw(question.question_id)
            self._wake()
            raise
        if sampling_params.structured_outputs is not None and any(
            one.finish_reason == "error" for one in answered.output.outputs
        ):
            raise ValueError(
                "structured_outputs: vLLM cannot compile or follow this schema, pattern or grammar; correct it"
            )
        self._answers[request_id] = answered
        yield answered.output

    def take_answers(self, request_id: str) -> list[Answered]:
        """Samples for a request of vLLM's handlers, by prompt; they put a kind before its id and a number behind."""
        names = [name for name in self._answers if request_id in name]
        return [self._answers.pop(name) for name in names]
