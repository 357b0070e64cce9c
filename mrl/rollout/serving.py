# SPDX-License-Identifier: Apache-2.0
"""OpenAI's protocol by vLLM's own handlers: chat templates, parsers of tools and thoughts, and errors.

They run in the gateway, without an engine: a prompt goes out in token ids, and the tokens that come back are read.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import jinja2
import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase
from vllm import CompletionOutput, RequestOutput
from vllm import SamplingParams as VllmSampling
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest, TokenizeResponse
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput
from vllm.logprobs import FlatLogprobs
from vllm.reasoning import ReasoningParserManager
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers import ToolParserManager

from mrl.config.schema.policy import PolicyConfig
from mrl.data.chat import served_template
from mrl.data.prompts import sampling_params
from mrl.rollout.agent_session import Message, SampledReply, continued, droppable, num_messages_to_answer, take_prefix
from mrl.rollout.callers import Answered, Ask
from mrl.rollout.engine_arguments import engine_arguments
from mrl.rollout.http_fields import Asked, described, find_mistake, naming
from mrl.rollout.http_gate import CHAT_KEY, NEUTRAL, Limits, default_parameters, find_deviation, find_refusal
from mrl.rollout.turn_tree import FORCED, NO_ROUTES, SampledAnswer
from mrl.types import SamplingParams

Json = dict[str, object]
"""A JSON object as it comes and goes."""
Response = TypeVar("Response")
T = TypeVar("T")
Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass
class _Asking:
    """A request under way: its questions to engines, and the answers so far."""

    ask: Ask
    in_session: bool
    answers: list[Answered] = field(default_factory=list)


_asking: ContextVar[_Asking] = ContextVar("asking")
"""The request that a task of the event loop answers: vLLM's handlers hand nothing of ours on to the engine."""


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
    """One method for each kind of request, for the gateway's event loop.

    All raise `HTTPException`, which becomes an error in OpenAI's shape.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        """Reads the tokenizer. RuntimeError: a parser does not work with it."""
        vllm_cfg, name = policy.generation.vllm_cfg, policy.model_name
        chosen = vllm_cfg.http_server_serving_chat_kwargs
        if vllm_cfg.tool_parser_plugin is not None:
            ToolParserManager.import_tool_parser(vllm_cfg.tool_parser_plugin)
        if vllm_cfg.reasoning_parser_plugin is not None:
            ReasoningParserManager.import_reasoning_parser(vllm_cfg.reasoning_parser_plugin)
        client = _Client(policy)
        tokenizer = client.renderer.get_tokenizer()
        if chosen.enable_auto_tools and chosen.tool_parser is not None:
            check_tool_parser(chosen.tool_parser, tokenizer)
        # vLLM's is one of transformers'.
        self.sampling = sampling_params(policy, cast(PreTrainedTokenizerBase, tokenizer))
        """Sampling parameters of training."""
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
        served = cast(EngineClient, client)
        models = OpenAIServingModels(served, [BaseModelPath(name=name, model_path=name)])
        self.renderer = OnlineRenderer(client.model_config, client.renderer, **rendering, **parsing)
        self.chats = OpenAIServingChat(
            served, models, "assistant", online_renderer=self.renderer, **rendering, **parsing
        )
        self.completions = OpenAIServingCompletion(served, models, online_renderer=self.renderer, request_logger=None)
        self.tokenization = ServingTokenization(models, self.renderer, **rendering)
        for handler in (self.chats, self.completions):
            handler.default_sampling_params = default_parameters(self.sampling)
        client.sampling = self.sampling
        self._dropped: dict[frozenset[str], list[str]] = {}
        """Parts of requests that the chat template drops, by the parts that requests have."""
        self.limits = Limits(max_model_len=vllm_cfg.max_model_len, num_slots=vllm_cfg.num_http_slots)

    async def answer(
        self,
        body: Json,
        ask: Ask,
        *,
        is_chat: bool,
        prefix: tuple[Sequence[int], int] | None = None,
        in_session: bool = False,
    ) -> SampledReply:
        """The answer to a chat, or to a completion.

        `ask` asks an engine. The prompt of a chat begins with the tokens of `prefix`, which are that many messages.
        With `in_session` it is refused if it would be sampled unlike rollouts.
        """
        return await _naming(self._answer(body, _Asking(ask, in_session), prefix, is_chat=is_chat), body)

    async def _answer(
        self, body: Json, asking: _Asking, prefix: tuple[Sequence[int], int] | None, *, is_chat: bool
    ) -> SampledReply:
        kind = ChatCompletionRequest if is_chat else CompletionRequest
        plain, given = take_prefix(self._checked(body, kind))
        request = _read(kind, plain)
        request.request_id = uuid.uuid4().hex
        _asking.set(asking)
        dropped = list[str]()
        if isinstance(request, CompletionRequest):
            response = _successful(await self.completions.create_completion(request), CompletionResponse)
        else:
            if given is not None:
                prefix = given, num_messages_to_answer(cast(list[Message], request.messages))
            if prefix is not None:
                # vLLM's way to hand over a prompt that has been rendered elsewhere.
                request.kv_transfer_params = {"prompt_token_ids": await self._continued(request, *prefix)}
            dropped = await self._find_dropped(request)
            response = _successful(await self.chats.create_chat_completion(request), ChatCompletionResponse)
        answers = asking.answers
        versions: Json = {
            "weight_version": min(answered.weight_version for answered in answers),
            "num_weight_versions": max(answered.num_weight_versions for answered in answers),
        }
        prompt_ids: list[int] = list(answers[0].output.prompt_token_ids or ())
        # A client that sends the first tokens knows their routes, but not the last one's.
        known = len(prefix[0]) - 1 if is_chat and prefix is not None else 0
        sampled = list(_sampled(answers[0], known))
        return SampledReply(response.model_dump() | versions, prompt_ids, sampled, dropped)

    async def tokenize(self, body: Json) -> Json:
        """Token ids of a text or a conversation; those that it is to begin with are kept, as in a chat."""
        return await _naming(self._tokenize(body), body)

    async def _tokenize(self, body: Json) -> Json:
        kind = TokenizeChatRequest if "messages" in body else TokenizeCompletionRequest
        plain, prefix = take_prefix(self._checked(body, kind))
        asked = _read(kind, plain)
        response = _successful(await self.tokenization.create_tokenize(asked, cast(Any, None)), TokenizeResponse)
        if prefix is not None and "messages" in body:
            request = _read(ChatCompletionRequest, plain)
            num_answered = num_messages_to_answer(cast(list[Message], request.messages))
            response.tokens = await self._continued(request, prefix, num_answered)
            response.count, response.token_strs = len(response.tokens), None
        return response.model_dump()

    def _checked(self, body: Json, kind: type[BaseModel]) -> Json:
        if refusal := find_refusal(body, self.limits) or find_mistake(body, Asked, kind):
            raise HTTPException(400, refusal)
        return ({"stop": list(self.sampling.stop_strings)} if self.sampling.stop_strings else {}) | body

    async def _continued(self, request: ChatCompletionRequest, prefix: Sequence[int], num_answered: int) -> list[int]:
        if num_answered == 0:
            raise HTTPException(400, "the prompt is to begin with given token ids, but no message is the assistant's")
        answered_ids = await self._template_ids(request, num_answered, is_whole=False)
        whole_ids = await self._template_ids(request, len(request.messages), is_whole=True)
        return continued(prefix, answered_ids, whole_ids, frozenset(self.sampling.stop_token_ids))

    async def _find_dropped(self, request: ChatCompletionRequest) -> list[str]:
        """Names the parts of a request without which the chat template writes the same; looks once at each kind."""
        has_tools = bool(request.tools) and request.tool_choice != "none"
        messages = cast("list[Message]", copy.deepcopy(request.messages))
        parts = dict(droppable(messages, has_tools=has_tools, has_documents=bool(request.documents)))
        if (found := self._dropped.get(frozenset(parts))) is None:
            found = list[str]()
            for name, changes in parts.items():
                with suppress(HTTPException, VLLMClientError, ValueError, TypeError, jinja2.TemplateError):
                    whole = await self._template_ids(request, len(messages), is_whole=True)
                    changed = request.model_copy(update=changes)
                    if whole == await self._template_ids(changed, len(messages), is_whole=True):
                        found.append(name)
            self._dropped[frozenset(parts)] = found
        return found

    async def _template_ids(self, request: ChatCompletionRequest, num_messages: int, *, is_whole: bool) -> list[int]:
        changes: dict[str, object] = {"messages": copy.deepcopy(request.messages[:num_messages])}
        if not is_whole:
            changes |= {"add_generation_prompt": False, "continue_final_message": False}
        rendered = await self.renderer.render_chat(request.model_copy(update=changes))
        if isinstance(rendered, ErrorResponse):
            raise HTTPException(rendered.error.code, rendered.error.message)
        (prompt,) = rendered[1]
        return list(cast(dict[str, list[int]], prompt)["prompt_token_ids"])


def _sampled(answered: Answered, routes_start: int) -> Iterator[SampledAnswer]:
    """Each of the answers, with the routes of its tokens from one token on."""
    for index, completion in enumerate(answered.output.outputs):
        untrained, routes = FORCED if answered.is_forced else "", None
        if answered.routes is not None:
            routes = answered.routes[index]
            untrained = untrained if routes is not None else NO_ROUTES  # of turns behind a forced one, too
        yield SampledAnswer(
            np.asarray(completion.token_ids, dtype=np.int32),
            np.asarray(_logprobs(completion), dtype=np.float32),
            "length" if completion.finish_reason == "length" else "stop",
            answered.weight_version,
            answered.num_weight_versions,
            untrained,
            None if routes is None else routes[routes_start:],
            0 if routes is None else routes_start,
        )


def _logprobs(completion: CompletionOutput) -> list[float]:
    if isinstance(completion.logprobs, FlatLogprobs):
        return completion.logprobs.logprobs
    drawn = zip(completion.token_ids, cast(list, completion.logprobs), strict=True)
    return [float(step[token_id].logprob) for token_id, step in drawn]


def _read(kind: type[Parsed], body: Json) -> Parsed:
    """Reads a request whose fields have their types as vLLM does."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise HTTPException(400, described(error, body)) from error
    except (AttributeError, KeyError, RecursionError) as error:
        raise HTTPException(400, f"the request cannot be read: {error}") from error


async def _naming(answer: Awaitable[T], body: Json) -> T:
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
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # vLLM makes an error of it
        raise asyncio.CancelledError
    if isinstance(response, ErrorResponse):
        raise HTTPException(response.error.code, response.error.message)
    assert isinstance(response, kind), "answers are not streamed"
    return response


class _Client:
    """The part of vLLM's `EngineClient` that its handlers use; passes on prompts in token ids."""

    errored = False
    input_processor = None
    """Only beam search would need one."""

    def __init__(self, policy: PolicyConfig) -> None:
        arguments = engine_arguments(policy.model_name, policy.generation, seed=0, tokenizer=policy.tokenizer.name)
        self.model_config = arguments.create_model_config()
        # As vLLM's own server without engine: nothing here computes.
        self.model_config.quantization = None
        self.vllm_config = VllmConfig(model_config=self.model_config)
        self.renderer = renderer_from_config(self.vllm_config)
        self.sampling: SamplingParams | None = None

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admits every request, as requests wait in the engine's queue."""

    async def generate(
        self, prompt: EngineInput, sampling_params: VllmSampling, request_id: str, **_: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the complete answer of an engine. Waits while the client does.

        Raises:
            ValueError: an engine refuses the request, or it is part of a session and would be sampled unlike rollouts.
        """
        asking = _asking.get(None)
        assert asking is not None
        if asking.in_session:
            assert self.sampling is not None
            values = {name: getattr(sampling_params, name) for name in (*NEUTRAL, "temperature", "top_p", "top_k")}
            if deviation := find_deviation(values, self.sampling):
                raise ValueError(deviation)
        if sampling_params.logprobs is None:
            sampling_params.logprobs = 0  # of the drawn token alone
            # Numbers in lists, as they travel; vLLM's handlers, which do not look at them then, read objects.
            sampling_params.flat_logprobs = sampling_params.prompt_logprobs is None
        answered = await asking.ask(prompt, sampling_params)
        if sampling_params.structured_outputs is not None and any(
            one.finish_reason == "error" for one in answered.output.outputs
        ):
            raise ValueError(
                "structured_outputs: vLLM cannot compile or follow this schema, pattern or grammar; correct it"
            )
        asking.answers.append(answered)
        yield answered.output
