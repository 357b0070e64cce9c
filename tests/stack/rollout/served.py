# SPDX-License-Identifier: Apache-2.0
"""A gateway in a thread, with vLLM's handlers, in front of an engine of this process that its test steps."""

from __future__ import annotations

import asyncio
import copy
import pickle
import uuid
from typing import TYPE_CHECKING, Any

from mrl.rollout.callers import Answered, Question
from tests.unit.rollout.gateways import Running

if TYPE_CHECKING:
    from mrl.config.schema.policy import PolicyConfig
    from mrl.rollout.engine import Engine


class LocalEngine:
    """Asks an engine as `EngineLine` does, with a copy of all that would go to another process and back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def health(self) -> tuple[bool, int | None]:
        return self.engine.can_sample, self.engine.weight_version

    async def ask(self, prompt: Any, params: Any) -> Answered:
        loop, question_id = asyncio.get_running_loop(), uuid.uuid4().hex
        future: asyncio.Future[Answered] = loop.create_future()

        def settle(copied: bytes) -> None:
            if not future.done():
                answered = pickle.loads(copied)
                future.set_exception(answered) if isinstance(answered, Exception) else future.set_result(answered)

        def answer(found: Answered | Exception) -> None:
            loop.call_soon_threadsafe(settle, pickle.dumps(found))

        prompt, params = pickle.loads(pickle.dumps((prompt, params)))
        self.engine.callers.ask(Question(question_id, prompt, params, answer))
        try:
            return await future
        except asyncio.CancelledError:
            self.engine.callers.withdraw(question_id)
            raise


def gateway_of(engine: Engine, policy: PolicyConfig) -> Running:
    """The gateway of a run with this engine alone."""
    from mrl.rollout.serving import Handlers

    policy = copy.deepcopy(policy)
    policy.generation.vllm_cfg.max_model_len = engine.llm.model_config.max_model_len
    running = Running(Handlers(policy))
    running.gateway.model = policy.model_name
    running.use(LocalEngine(engine))
    return running


def engine_url(running: Running) -> str:
    """Base URL for those who ask the engine, with the run's key."""
    return f"{running.url}/engines/0/v1"
