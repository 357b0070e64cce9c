"""Requests in OpenAI's terms, answered by vLLM's own protocol classes, chat templates and parsers on top of an engine that is stepped here.

Lives in the server's event loop.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from fastapi import HTTPException
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest, TokenizeResponse
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from mrl.config.schema.policy import PolicyConfig
from mrl.data.chat import OWN_TEMPLATE, template_text
from mrl.rollout.callers import Answered
from mrl.rollout.http_engine import HttpEngine, logprobs_of
from mrl.rollout.http_rules import Limits, continued, default_parameters, find_excess, find_refusal, num_messages_to_answer, take_prefix
from mrl.rollout.sessions import Sessions, SessionTurn
from mrl.types import SamplingParams

Json = dict[str, object]
"""A JSON object as it comes and goes."""
Response = TypeVar("Response")
Request = TypeVar("Request", ChatCompletionRequest, CompletionRequest, TokenizeCompletionRequest, TokenizeChatRequest)


class Handlers:
    """One method for each route. What it gives back is the JSON of the answer.

    All raise `HTTPException` or what vLLM raises, for which it has handlers: both become errors in OpenAI's shape.
    """

    def __init__(self, engine: HttpEngine, policy: PolicyConfig, sampling: SamplingParams) -> None:
        """`sampling` is that of training.

        Raises:
            TypeError: a parser cannot work with the tokenizer.
        """
        vllm_cfg = policy.generation.vllm_cfg
        chosen = vllm_cfg.http_server_serving_chat_kwargs
        if vllm_cfg.tool_parser_plugin is not None:
            ToolParserManager.import_tool_parser(vllm_cfg.tool_parser_plugin)
        if vllm_cfg.reasoning_parser_plugin is not None:
            ReasoningParserManager.import_reasoning_parser(vllm_cfg.reasoning_parser_plugin)
        template = None if chosen.chat_template == OWN_TEMPLATE else template_text(chosen.chat_template)
        own_kwargs = chosen.default_chat_template_kwargs
        rendering: dict[str, Any] = {
            "request_logger": None,
            "chat_template": template,
            "chat_template_content_format": "auto",
            "default_chat_template_kwargs": policy.tokenizer.chat_template_kwargs if own_kwargs is None else own_kwargs,
        }
        parsing: dict[str, Any] = {
            "enable_auto_tools": chosen.enable_auto_tools,
            "tool_parser": chosen.tool_parser,
            "reasoning_parser": chosen.reasoning_parser,
        }
        client = cast(EngineClient, engine)
        name = policy.model_name
        self.models = OpenAIServingModels(client, [BaseModelPath(name=name, model_path=name)])
        self.renderer = OnlineRenderer(engine.model_config, engine.renderer, **rendering, **parsing)
        self.chats = OpenAIServingChat(client, self.models, "assistant", online_renderer=self.renderer, **rendering, **parsing)
        self.completions = OpenAIServingCompletion(client, self.models, online_renderer=self.renderer, request_logger=None)
        self.tokenization = ServingTokenization(self.models, self.renderer, **rendering)
        for handler in (self.chats, self.completions):
            handler.default_sampling_params = default_parameters(sampling)
        self.engine = engine
        self.limits = Limits(max_model_len=engine.model_config.max_model_len, num_slots=vllm_cfg.num_http_slots)
        self.sampling = sampling
        self.sessions = Sessions()

    async def chat(self, body: Json, session_id: str | None) -> Json:
        """`POST /v1/chat/completions`."""
        plain, prefix = take_prefix(self._checked(body, session_id))
        request = _read(ChatCompletionRequest, plain)
        request.request_id = uuid.uuid4().hex
        messages = cast(list[Mapping[str, object]], request.messages)
        num_answered = num_messages_to_answer(messages)
        if prefix is None and session_id is not None:
            prefix, num_answered = self.sessions.sampled_ids(session_id, messages), self.sessions.num_answered(session_id)
        if prefix is not None:
            # vLLM's way to hand over a prompt that has been rendered elsewhere.
            request.kv_transfer_params = {"prompt_token_ids": await self._continued(request, prefix, num_answered)}
        try:
            response = _successful(await self.chats.create_chat_completion(request), ChatCompletionResponse)
        finally:
            answers = self.engine.take_answers(request.request_id)
        if session_id is not None:
            self._keep(session_id, answers[0], [*messages, response.choices[0].message.model_dump()])
        return response.model_dump() | versions(answers)

    async def complete(self, body: Json, session_id: str | None) -> Json:
        """`POST /v1/completions`."""
        request = _read(CompletionRequest, self._checked(body, session_id))
        request.request_id = uuid.uuid4().hex
        try:
            response = _successful(await self.completions.create_completion(request), CompletionResponse)
        finally:
            answers = self.engine.take_answers(request.request_id)
        if session_id is not None:
            self._keep(session_id, answers[0], [])
        return response.model_dump() | versions(answers)

    async def tokenize(self, body: Json) -> Json:
        """`POST /tokenize`: of a text or a conversation; token ids that it is to begin with are kept, as in a chat."""
        if excess := find_excess(body, self.limits):
            raise HTTPException(400, excess)
        plain, prefix = take_prefix(body)
        if "messages" not in plain:
            asked = _read(TokenizeCompletionRequest, plain)
            return _successful(await self.tokenization.create_tokenize(asked, cast(Any, None)), TokenizeResponse).model_dump()
        chat = _read(TokenizeChatRequest, plain)
        response = _successful(await self.tokenization.create_tokenize(chat, cast(Any, None)), TokenizeResponse)
        if prefix is not None:
            request = _read(ChatCompletionRequest, plain)
            num_answered = num_messages_to_answer(cast(list[Mapping[str, object]], request.messages))
            response.tokens = await self._continued(request, prefix, num_answered)
            response.count, response.token_strs = len(response.tokens), None
        return response.model_dump()

    async def list_models(self) -> Json:
        """`GET /v1/models`."""
        return (await self.models.show_available_models()).model_dump()

    def _checked(self, body: Json, session_id: str | None) -> Json:
        if refusal := find_refusal(body, self.limits, session_id=session_id):
            raise HTTPException(400, refusal)
        given = {"stop": list(self.sampling.stop_strings)} | body if self.sampling.stop_strings else body
        # Which session it is we know; the handlers tell the engine only what is set here.
        return {**given, "session_id": session_id} if session_id is not None else given

    async def _continued(self, request: ChatCompletionRequest, prefix: Sequence[int], num_answered: int) -> list[int]:
        if num_answered == 0:
            raise HTTPException(400, "the prompt is to begin with given token ids, but no message is the assistant's")
        answered_ids = await self._template_ids(request, num_answered, is_whole=False)
        whole_ids = await self._template_ids(request, len(request.messages), is_whole=True)
        return continued(prefix, answered_ids, whole_ids, self._end_ids)

    @property
    def _end_ids(self) -> frozenset[int]:
        return frozenset(self.sampling.stop_token_ids)

    async def _template_ids(self, request: ChatCompletionRequest, num_messages: int, *, is_whole: bool) -> list[int]:
        changes: dict[str, object] = {"messages": copy.deepcopy(request.messages[:num_messages])}
        if not is_whole:
            changes |= {"add_generation_prompt": False, "continue_final_message": False}
        rendered = await self.renderer.render_chat(request.model_copy(update=changes))
        if isinstance(rendered, ErrorResponse):
            raise HTTPException(rendered.error.code, rendered.error.message)
        (prompt,) = rendered[1]
        return list(cast(dict[str, list[int]], prompt)["prompt_token_ids"])

    def _keep(self, session_id: str, answered: Answered, messages: Sequence[Mapping[str, object]]) -> None:
        prompt_token_ids = list(answered.output.prompt_token_ids or ())
        (completion,) = answered.output.outputs
        turn = SessionTurn(
            prompt_token_ids=prompt_token_ids,
            token_ids=list(completion.token_ids),
            logprobs=logprobs_of(answered.output),
            finish_reason=str(completion.finish_reason),
            weight_version=answered.weight_version,
            num_weight_versions=answered.num_weight_versions,
            is_continuation=self.sessions.is_continuation(session_id, prompt_token_ids),
        )
        self.sessions.add(session_id, turn, messages)


def versions(answers: Sequence[Answered]) -> Json:
    """What an answer says of the weights that it was drawn from."""
    return {
        "weight_version": min(answered.weight_version for answered in answers),
        "num_weight_versions": max(answered.num_weight_versions for answered in answers),
    }


def _read(kind: type[Request], body: Json) -> Request:
    """The request as vLLM reads it; its validators take a field for a mapping before they look whether it is one."""
    try:
        return kind.model_validate(body)
    except (AttributeError, KeyError, RecursionError) as error:
        raise HTTPException(400, f"the request cannot be read: {error}") from error


def _successful(response: object, kind: type[Response]) -> Response:
    if isinstance(response, ErrorResponse):
        raise HTTPException(response.error.code, response.error.message)
    assert isinstance(response, kind), "answers are not streamed"
    return response
