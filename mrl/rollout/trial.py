# SPDX-License-Identifier: Apache-2.0
"""Tries an agent without a model: its requests are read and refused as in a run, and given texts answer them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import Logprob

from mrl.data.chat import tokenizer_of
from mrl.rollout.agents import AgentRunner, AgentTask, FunctionAgent
from mrl.rollout.callers import Answered, EngineLines, Params, Prompt
from mrl.rollout.gateway import Gateway
from mrl.rollout.http_gate import listen, make_server
from mrl.rollout.remote import RemoteAgent
from mrl.rollout.serving import Handlers
from mrl.types import Prompt as Row
from mrl.types import Verdict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema.run import RunConfig

HOST = "127.0.0.1"
Try = Callable[[Row, Sequence[str]], Awaitable[Verdict]]
"""Runs the agent on a row, with these answers to its requests, the last one again if it asks more."""


class GivenTexts:
    """An engine in whose place texts answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.replies: Iterator[str] = itertools.repeat("")
        self.num_asked = 0

    async def health(self) -> tuple[bool, int | None]:
        return True, 0

    async def ask(self, prompt: Prompt, params: Params) -> Answered:
        """The next text, cut at `max_tokens`, as the answer to a request; `n` of them to one for several."""
        self.num_asked += 1
        outputs = [self._output(index, params) for index in range(params.n)]
        prompt_ids = list(cast("dict[str, list[int]]", prompt)["prompt_token_ids"])
        return Answered(RequestOutput(str(self.num_asked), None, prompt_ids, None, outputs, True), 0, 1)

    def _output(self, index: int, params: Params) -> CompletionOutput:
        text, end = next(self.replies), self._tokenizer.eos_token_id
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), end]
        is_cut = params.max_tokens is not None and len(ids) > params.max_tokens
        if is_cut:
            ids = ids[: params.max_tokens]
            text = str(self._tokenizer.decode(ids))
        logprobs = [{token: Logprob(0.0)} for token in ids]
        return CompletionOutput(index, text, ids, 0.0, logprobs, finish_reason="length" if is_cut else "stop")


@asynccontextmanager
async def open_trial(name: str, config: RunConfig) -> AsyncIterator[Try]:
    """Starts agent `name` of the config, whose engine limits are known, and a gateway for it.

    RuntimeError: the agent cannot be loaded.
    """
    handlers = Handlers(config.policy)
    engine, lines = GivenTexts(tokenizer_of(config)), EngineLines()
    lines.set([engine])
    length = config.policy.generation.vllm_cfg.max_model_len
    gateway = Gateway(lines, handlers, api_key=secrets.token_urlsafe(32), max_model_len=length)
    listener = listen(HOST, range(1))
    runner = AgentRunner(
        gateway,
        url=f"http://{HOST}:{listener.getsockname()[1]}",
        timeout_s=config.env.agent_timeout_s,
        masks_flagged=config.env.should_mask_flagged_samples,
    )
    url = config.env.remote.get(name)
    if url is not None and urlsplit(url).hostname not in (HOST, "localhost"):
        raise RuntimeError(f"{url}: a trial answers at {HOST} alone; try the agent on the host where it runs")
    agent = RemoteAgent(url) if url is not None else FunctionAgent(config.env.own.agents[name], log_name="stderr")
    runner.agents[name] = [agent]
    logging.getLogger(AgentRunner.__module__).setLevel(logging.ERROR)  # a table has what it says of each rollout
    server = make_server(gateway.app(), has_key=gateway.has_key, max_body=gateway.max_body)
    serving, numbers = asyncio.ensure_future(server.serve(sockets=[listener])), itertools.count()

    async def attempt(row: Row, replies: Sequence[str]) -> Verdict:
        engine.replies = itertools.chain(replies, itertools.repeat(replies[-1]))
        before = engine.num_asked
        ended = await runner.run(AgentTask(row, next(numbers), 0, 0, handlers.sampling, 0))
        counted = {"requests": float(engine.num_asked - before), **ended.verdict.metrics}
        return replace(ended.verdict, metrics=counted)

    try:
        await agent.start()
        yield attempt
    finally:
        if isinstance(agent, FunctionAgent):
            agent.end()
        server.should_exit = True
        await serving
