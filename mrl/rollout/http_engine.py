"""What vLLM's own HTTP handlers take for an engine: each request becomes a question to the engine that this process steps."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import cast

from vllm import RequestOutput, SamplingParams
from vllm.inputs import EngineInput

from mrl.rollout.callers import Answered, Question
from mrl.rollout.engine import Engine
from mrl.rollout.http_rules import NEUTRAL, find_deviation
from mrl.types import SamplingParams as RunSampling


class HttpEngine:
    """The part of vLLM's `EngineClient` that its handlers of completions and chats use. Lives in the server's event loop."""

    errored = False

    def __init__(self, engine: Engine, sampling: RunSampling, *, wake: Callable[[], None]) -> None:
        """`wake` is called after every question: it sees to it that the engine is stepped. `sampling` is that of training."""
        self.vllm_config = engine.llm.vllm_config
        self.model_config = engine.llm.model_config
        self.renderer = engine.llm.renderer
        self.input_processor = engine.llm.input_processor
        self._callers = engine.callers
        self._sampling = sampling
        self._wake = wake
        self._answers: dict[str, Answered] = {}

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Takes every request: they wait in the engine's queue."""

    async def generate(
        self, prompt: EngineInput, sampling_params: SamplingParams, request_id: str, *, session_id: str | None = None, **_: object
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the complete answer, which `take_answers` gives with its weight version. Waits as long as the client does.

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

        def answer(answered: Answered | Exception) -> None:
            loop.call_soon_threadsafe(_settle, future, answered)

        question = Question(uuid.uuid4().hex, prompt, sampling_params, answer)
        self._callers.ask(question)
        self._wake()
        try:
            answered = await future
        except asyncio.CancelledError:
            self._callers.withdraw(question.question_id)
            self._wake()
            raise
        if sampling_params.structured_outputs is not None and any(one.finish_reason == "error" for one in answered.output.outputs):
            raise ValueError("structured_outputs: vLLM cannot compile or follow this schema, pattern or grammar; correct it")
        self._answers[request_id] = answered
        yield answered.output

    def take_answers(self, request_id: str) -> list[Answered]:
        """What was sampled for a request of vLLM's handlers, prompt by prompt; they put a kind in front of its id, and a number behind."""
        names = [name for name in self._answers if request_id in name]
        return [self._answers.pop(name) for name in names]


def logprobs_of(output: RequestOutput) -> list[float]:
    """Logprob of each token of a single answer."""
    (completion,) = output.outputs
    drawn = zip(completion.token_ids, cast(list, completion.logprobs), strict=True)
    return [float(step[token_id].logprob) for token_id, step in drawn]


def _settle(future: asyncio.Future[Answered], answered: Answered | Exception) -> None:
    if future.done():  # the client has gone
        return
    if isinstance(answered, Answered):
        future.set_result(answered)
    else:
        future.set_exception(answered)
