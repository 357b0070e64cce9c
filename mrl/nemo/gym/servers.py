# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's servers as agents: a row is sent to its agent's `/run`, whose answer says tokens and reward.

The form is that of nemo_gym/rollout_collection.py; what is read of the answer, that of NeMo RL's
nemo_rl/environments/nemo_gym.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from conversion.files.reading import parse_json
from mrl.config.files import read_yaml
from mrl.config.texts import rounded
from mrl.data.fields import REQUEST
from mrl.rollout.agent_session import AgentSession
from mrl.rollout.agents import AgentTask, is_finite
from mrl.rollout.receipts import Receipts
from mrl.rollout.remote import AgentLost, AgentUnreached, Json, RemoteAgent, open_client, read_answer
from mrl.types import SamplingParams

logger = logging.getLogger(__name__)

NO_RECEIPT = "untrained_tokens_no_receipt"
"""Metric: tokens that came back in a rollout and were not sampled for it."""
FAILURE = "_ng_failure_class"
"""Field of an answer whose reward says nothing: Gym (nemo_gym/judge.py) gives 0 where a judge fails, with HTTP 200."""
ANYWHERE = ("0.0.0.0", "127.0.0.1", "::", "localhost")
"""Hosts that mean the machine of the head server itself."""
HEAD_S = 30.0
RETRY_S = 2.0
WARN_S = 60.0


@dataclass
class GymServers:
    """The servers behind one head server, which knows their addresses."""

    head_url: str
    up: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done while the servers are up. Rows wait for it."""
    waiting: dict[object, tuple[str, str]] = field(default_factory=dict)
    """Server and reason, of each row that waits for one."""
    process: object = None
    """The process that starts them; it lives as long as they do."""
    _agents: dict[str, RemoteAgent] = field(default_factory=dict)
    _may_have_moved: bool = False
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the head server is asked: once for all rows that wait."""
    _warn_at: float = 0.0

    async def answer(
        self, task: AgentTask, session: AgentSession, receipts: Receipts, *, group: int, deadline_s: float
    ) -> Json:
        """A rollout's answer, as `reply_of`. Errors as those of `run`."""
        with receipts.rollout(task.sampling):
            row = gym_row(json.loads(task.prompt.row), task.sampling, index=task.rollout_index, group=group)
            result = await self.run(task.prompt.env_name, row, deadline_s=deadline_s)
            return reply_of(result, session, receipts, row)

    async def run(self, name: str, row: Json, *, deadline_s: float) -> Json:
        """An agent's answer to a row; waits while none listens. Errors as `RemoteAgent.ask`; RuntimeError: no agent."""
        end, place = time.monotonic() + deadline_s, object()
        try:
            while (left := end - time.monotonic()) > 0:
                if not self.up.done():
                    self.waiting[place] = "NeMo Gym's servers", "they start"
                    await asyncio.wait([self.up], timeout=left)
                    continue
                self.waiting.pop(place, None)
                try:
                    return await (await self._find(name)).post(row, deadline_s=left)
                except AgentUnreached as lost:
                    self._may_have_moved = True
                    self.waiting[place] = f"agent {name} of NeMo Gym", str(lost)
                    await self._pause(lost)
                except AgentLost:
                    self._may_have_moved = True
                    raise
        finally:
            self.waiting.pop(place, None)
        raise TimeoutError

    async def _find(self, name: str) -> RemoteAgent:
        """The agent of that name, where it is now."""
        async with self._asking:
            if name not in self._agents or self._may_have_moved:
                await self._find_all(name)
        return self._agents[name]

    async def _find_all(self, name: str) -> None:
        addresses = await self.addresses("responses_api_agents")
        if name not in addresses:
            known = ", ".join(sorted(addresses)) or "none"
            raise RuntimeError(
                f"NeMo Gym's servers have no agent {name}, which rows name in agent_ref; theirs are {known}. Name "
                "its config file in env.nemo_gym.config_paths"
            )
        self._may_have_moved = False
        for one, address in addresses.items():
            if one not in self._agents or self._agents[one].url != f"{address}/run":
                self._agents[one] = RemoteAgent(f"{address}/run")

    async def addresses(self, kind: str = "") -> dict[str, str]:
        """URL of every server of a kind, by name; "" = all. AgentUnreached: the head server does not answer."""
        timeout = aiohttp.ClientTimeout(total=HEAD_S)
        try:
            async with (
                open_client(timeout) as client,
                client.get(f"{self.head_url}/global_config_dict_yaml") as response,
            ):
                # YAML as a text in JSON.
                config = read_yaml(str(parse_json(await read_answer(response))))
            found = _addresses(config, urlsplit(self.head_url).hostname, kind)
            for url in found.values():
                URL(url)  # ValueError: nobody can be at this address
            return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise AgentUnreached(f"{self.head_url}, NeMo Gym's head server: {error or type(error).__name__}") from error

    def set_up(self) -> None:
        """Marks the servers as up."""
        if not self.up.done():
            self.up.set_result(None)

    def set_down(self) -> None:
        """Marks the servers as down until others start."""
        if self.up.done():
            self.up = asyncio.get_running_loop().create_future()

    async def wait_for_head(self, limit_s: float) -> None:
        """Marks the user's servers as up once the head server answers. RuntimeError: it does not in time."""
        end, reason = time.monotonic() + limit_s, AgentUnreached()
        while time.monotonic() < end:
            try:
                await self.addresses()
                return self.set_up()
            except AgentUnreached as lost:
                await self._pause(reason := lost)
        raise RuntimeError(
            f"env.nemo_gym.head_server: {reason}, for {rounded(limit_s)} s (env.nemo_gym.start_s); start it, or "
            "correct the address"
        )

    async def _pause(self, lost: AgentUnreached) -> None:
        if time.monotonic() > self._warn_at:
            self._warn_at = time.monotonic() + WARN_S
            logger.warning("The run waits for NeMo Gym's servers: %s", lost)
        await asyncio.sleep(RETRY_S)

    async def look_for_life(self, limit_s: float) -> None:
        """Marks the servers as up once each accepts connections; gives up after a limit."""
        addresses, end = dict[str, str](), time.monotonic() + limit_s
        while time.monotonic() < end:
            await asyncio.sleep(RETRY_S)
            with suppress(AgentUnreached):  # the head server comes first
                addresses = await self.addresses()
            if addresses and all([await _accepts(address) for address in addresses.values()]):
                return self.set_up()


def _addresses(config: object, head: str | None, kind: str) -> dict[str, str]:
    found = dict[str, str]()
    for name, instance in config.items() if isinstance(config, dict) else ():
        for server_kind, servers in instance.items() if isinstance(instance, dict) else ():
            options = next(iter(servers.values()), None) if isinstance(servers, dict) else None
            if isinstance(options, dict) and options.get("port") and kind in ("", server_kind):
                host = options.get("host") or head
                found[str(name)] = f"http://{head if host in ANYWHERE else host}:{options['port']}"
    return found


async def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, ValueError):  # no such name, or too long for one
        return False
    writer.close()
    return True


def gym_row(fields: Mapping[str, object], sampling: SamplingParams, *, index: int, group: int) -> Json:
    """A row as agents get it: with the run's sampling, as NeMo RL sends it, its group, and the rollout's number in it.

    `genrm_compare` compares answers of one `_ng_task_index`. Without one it would mix groups of the same text.
    """
    request = dict(cast(Mapping[str, object], fields.get(REQUEST) or {}))
    longest = request.get("max_output_tokens")
    limits = [sampling.max_new_tokens, *([longest] if isinstance(longest, int) else [])]
    request |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_output_tokens": min(limits)}
    return {**fields, REQUEST: request, "_rowidx": index, "_ng_task_index": group, "_ng_rollout_index": index}


def reply_of(result: Json, session: AgentSession, receipts: Receipts, row: Json) -> Json:
    """An agent's answer to a row in the form of `mrl.rollout.agents`; adds its turns sampled here to the session."""
    if "error" in result and "response" not in result:
        return result  # a server's refusal; an answer may have a field of that name
    response = result.get("response")
    outputs = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(outputs, Sequence):
        return {"error": "NeMo Gym's agent answers without response.output"}
    num_unknown = receipts.claim(outputs, session)
    for item in outputs:
        _note(item, session)
    asked = row.get(REQUEST)
    given = (asked.get("input") if isinstance(asked, Mapping) else None) or []
    session.heard.note([*(given if isinstance(given, list) else [given]), *outputs])
    if failure := result.get(FAILURE):
        reasons = [
            str(value) for name, value in result.items() if name.startswith("_ng_failure") and isinstance(value, str)
        ]
        return {"error": f"NeMo Gym's agent gives no verdict: {': '.join(reasons) or failure}"}
    numbers = {name: value for name, value in result.items() if is_finite(value)}
    reward = numbers.pop("reward", None)
    components = result.get("reward_components") or {}
    if isinstance(components, Mapping) and components and isinstance(reward, int | float):
        total = sum(value for value in components.values() if isinstance(value, int | float))
        if not math.isclose(total, reward, rel_tol=1e-5, abs_tol=1e-6):
            return {"error": f"NeMo Gym's agent answers reward={reward} and reward_components that add up to {total}"}
    instance = result.get("instance_config")
    is_masked = isinstance(instance, Mapping) and instance.get("mask_sample") is True
    metrics = numbers | ({NO_RECEIPT: num_unknown} if num_unknown else {})
    return {"reward": reward, "components": components, "mask": is_masked, "metrics": metrics}


def _note(item: object, session: AgentSession) -> None:
    if not isinstance(item, Mapping):
        return
    if item.get("type") == "function_call":
        session.note_text(
            "", {"tool_calls": [{"function": {"name": item.get("name"), "arguments": item.get("arguments")}}]}
        )
    elif item.get("role") == "assistant" and isinstance(parts := item.get("content"), list):
        session.note_text("".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping)), None)
