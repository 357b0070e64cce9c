# SPDX-License-Identifier: Apache-2.0
"""Runs agents: each handles a row in a session of the gateway, gives a reward, and leaves training sequences.

An agent is a URL. `POST {row, base_url, api_key, model, deadline_s}`; it answers `{reward, components, mask, metrics,
columns, extracted}`, or `{error}`. A user's function has a URL too, that of processes of ours. An agent or server that
dies under way is another attempt, in a new session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, cast

import aiohttp
import numpy as np

from mrl.config.texts import rollout_name, rounded, safe_text
from mrl.envs.child import MAX_TRACE_CHARACTERS
from mrl.envs.own import MAX_COLUMN_CHARACTERS
from mrl.envs.scorer import MAX_COLUMNS
from mrl.rollout.agent_session import AgentSession
from mrl.rollout.environment import variables_of_children
from mrl.rollout.gateway import MODEL, Gateway
from mrl.rollout.receipts import Receipts
from mrl.rollout.remote import (
    BLOCKED,
    AgentBlocked,
    AgentBusy,
    AgentLost,
    AgentUnreached,
    Json,
    RemoteAgent,
    keep_running,
    until_readable,
)
from mrl.types import LARGEST_REWARD, Prompt, Rollout, RolloutRequest, SamplingParams, Status, Verdict, hashed_seed

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Attempts at one rollout whose agent dies: by its own fault, or by that of another one in its process."""
RETRY_S, MAX_PAUSE_S = 1.0, 30.0
"""First and last of the longest pauses, which double, before an agent that was not reached is asked again."""
NO_COLUMNS = ("extracted", "status")
"""Texts of an answer that are no columns of the table of samples."""


@dataclass(frozen=True)
class AgentTask:
    """Asks for one rollout of an agent. `weight_version` is that of the engines when it was asked for."""

    prompt: Prompt
    rollout_index: int
    epoch: int
    seed: int
    sampling: SamplingParams
    weight_version: int

    @property
    def request_id(self) -> str:
        return f"{self.epoch}/{self.prompt.prompt_id}/{self.rollout_index}"

    @property
    def row(self) -> dict[str, object]:
        """The row as agents get it: its fields, with question and answer also by the names that all data sets share."""
        return json.loads(self.prompt.row) | {
            "prompt": self.prompt.text,
            "expected_answer": self.prompt.expected_answer,
        }

    @property
    def request(self) -> RolloutRequest:
        """The request that its sequences answer, each with a prompt of its own."""
        prompt = self.prompt
        return RolloutRequest(
            prompt.prompt_id, self.rollout_index, self.epoch, self.seed, prompt.token_ids, self.sampling
        )

    def empty_rollout(self) -> Rollout:
        """Stands in for a rollout in which nothing was sampled: the prompt and one masked token."""
        nothing, no_routes = np.zeros(1, dtype=np.float32), np.zeros((0, 0, 0), dtype=np.uint8)
        token_ids = np.array(self.prompt.token_ids[-1:], dtype=np.int32)
        return Rollout(self.request, self.weight_version, token_ids, nothing, "abort", no_routes)


@dataclass(frozen=True)
class AgentResult:
    """A rollout that an agent has ended. Its first sequence stands for it; the others share its advantage."""

    rollouts: list[Rollout]
    verdict: Verdict
    engines: Sequence[int]
    """Engines that have answered."""


class FunctionAgent:
    """An agent in a process that is replaced when it dies: a function of the user's, or an environment of verifiers."""

    def __init__(
        self,
        path: str,
        command: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        log_name: str = "gateway.log",
    ) -> None:
        """`path` is the function, or the name of what `command` serves, with these environment variables.

        `log_name` is the name of this process's log, for messages.
        """
        # Children find a user's module where Python finds it here: Ray gives its processes the driver's folders.
        self._variables = variables or {
            **variables_of_children(),
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        }
        self._words = (*command, "serve") if command else (sys.executable, "-m", "mrl.rollout.agent_child", path)
        self.path, self._log_name = path, log_name
        # Stays open in this process: requests that come between two children wait for the next one.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._key = secrets.token_urlsafe(32)
        self._remote = RemoteAgent(f"http://127.0.0.1:{self._listener.getsockname()[1]}/", api_key=self._key)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = False
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._blocker = dict[str, object]()
        """Last report of the process: session and line of an agent that blocks its loop. Each process has its own."""
        self.reports: list[str] = []
        """Lines that have blocked the loop since the owner looked last."""
        self.num_running = 0

    async def start(self) -> None:
        """Starts the process, and waits until the function is loaded. RuntimeError: it cannot be."""
        name = f"agents: the process of {self.path}"
        self._watch = asyncio.ensure_future(keep_running(name, self._run, log=self._log_name))
        await asyncio.wait({self._loaded, self._watch}, return_when=asyncio.FIRST_COMPLETED)
        if self._watch.done():
            await self._watch

    async def ask(self, task: Json) -> Json:
        """Asks as `RemoteAgent.ask` does, and ends a process that is stuck. RuntimeError: the process keeps dying."""
        process, blocker, self.num_running = self._process, self._blocker, self.num_running + 1
        # The process may be long in coming to the task, and has the same clock.
        deadline_at = time.monotonic() + cast(float, task["deadline_s"])
        answer = asyncio.ensure_future(self._remote.ask({**task, "deadline_at": deadline_at}))
        try:
            await asyncio.wait({answer, self._watch}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await self._watch
            reply = await answer
        except TimeoutError:
            if process is not None and process.poll() is None:
                logger.warning(
                    "The process of agent %s does not end a rollout at its deadline, and is ended", self.path
                )
                process.kill()
            # Another rollout's deadline may have ended the process already: then its reports from before count.
            blocker = self._blocker or blocker
            if blocker.get("session", task["base_url"]) != task["base_url"]:
                raise AgentBlocked(f"another agent blocks its process: {blocker['place']}") from None
            raise
        finally:
            answer.cancel()
            self.num_running -= 1
        blocker = self._blocker or blocker
        if reply.get("status") == BLOCKED and blocker.get("session") != task["base_url"]:
            raise AgentBlocked(f"another agent has blocked its process: {blocker.get('place')}")
        return reply

    async def _read_reports(self, descriptor: int) -> None:
        """Notes reports of the process until it ends."""
        try:
            text = b""
            while True:
                await until_readable(descriptor)
                if not (part := os.read(descriptor, 65_536)):
                    return
                *lines, text = (text + part).split(b"\n")
                for line in lines:
                    self._blocker.update(json.loads(line))
                    self.reports.append(str(self._blocker["place"]))
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Ends the process for good."""
        self._watch.cancel()
        self._listener.close()
        if self._process is not None:
            self._process.kill()

    async def _run(self) -> tuple[bool, int | None]:
        descriptor, (reports, report_fd) = self._listener.fileno(), os.pipe()
        process = self._process = subprocess.Popen(
            [*self._words, str(descriptor), str(report_fd), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=(descriptor, report_fd),
            env=self._variables,
        )
        os.close(report_fd)
        self._is_up, reading = False, asyncio.ensure_future(self._read_reports(reports))
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # a process that has ended is seen below
            pipe.write(f"{self._key}\n".encode())
        looking = asyncio.ensure_future(self._look_for_life())
        await _ended(process.pid)
        looking.cancel()
        await asyncio.wait([reading], timeout=1.0)  # a process that it has left behind may hold the pipe
        reading.cancel()
        self._blocker = {}
        return self._is_up, process.poll()

    async def _look_for_life(self) -> None:
        """Notes when the process answers; if it ends first, `_run` notices."""
        with suppress(aiohttp.ClientError):
            async with (
                aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=None)) as client,
                client.get(f"{self._remote.url}health") as response,
            ):
                await response.read()
            self._is_up = True
            if not self._loaded.done():
                self._loaded.set_result(None)


async def _ended(pid: int) -> None:
    """Returns when a child has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        await until_readable(descriptor)
    finally:
        os.close(descriptor)


Agent = RemoteAgent | FunctionAgent


class GymAgents(Protocol):
    """NeMo Gym's servers: `mrl.nemo.gym.servers.GymServers`."""

    waiting: dict[object, tuple[str, str]]
    """Server and reason, of each row that waits for one."""

    async def answer(
        self, task: AgentTask, session: AgentSession, receipts: Receipts, *, group: int, deadline_s: float
    ) -> Json: ...


class AgentRunner:
    """Does rollouts by agents. For one event loop, the gateway's."""

    def __init__(self, gateway: Gateway, *, url: str, timeout_s: float, masks_flagged: bool) -> None:
        """`url` is the gateway's. A rollout takes at most `timeout_s`, all its attempts together."""
        self.gateway = gateway
        self.agents: dict[str, list[Agent]] = {}
        self.gym: GymAgents | None = None
        """Does the rows of all others."""
        self._url, self._timeout_s, self._masks_flagged = url, timeout_s, masks_flagged
        self._nonce = secrets.token_hex(8)
        self.altered: set[tuple[str, str]] = set()
        """Agents, and what was altered in requests of theirs: see `AgentSession.altered`."""
        self._waiting: dict[str, tuple[str, str]] = {}
        """Agent and reason, of each rollout whose agent cannot be reached."""
        self._listens = dict[str, asyncio.Future[None]]()
        """Wakes the rollouts of an agent at whose address nothing listened."""

    def waiting(self) -> dict[str, tuple[int, str]]:
        """Number of rollouts that wait for an unreachable agent, and the newest reason, by the agent's name."""
        found = dict[str, tuple[int, str]]()
        for name, reason in [*self._waiting.values(), *(self.gym.waiting.values() if self.gym is not None else ())]:
            found[name] = found.get(name, (0, ""))[0] + 1, reason
        return found

    def blocked(self) -> dict[str, str]:
        """Lines at which an agent has blocked the others of its process since the last call, and the agent's name."""
        found = dict[str, str]()
        for name, agents in self.agents.items():
            for agent in agents:
                if isinstance(agent, FunctionAgent):
                    found |= dict.fromkeys(agent.reports, name)
                    agent.reports.clear()
        return found

    async def run(self, task: AgentTask) -> AgentResult:
        """Runs a rollout, with new attempts if the agent is lost. One without a task is awaited until the deadline."""
        try:
            return await self._run(task)
        finally:
            self._waiting.pop(task.request_id, None)

    async def _run(self, task: AgentTask) -> AgentResult:
        end, reason, attempt, pause_s = time.monotonic() + self._timeout_s, "", 0, RETRY_S
        while attempt < MAX_ATTEMPTS:
            session = self.gateway.open_session(sampling=task.sampling, seed=task.seed)
            try:
                reply = await self._ask(task, session, max(1.0, end - time.monotonic()))
            except TimeoutError:
                reply = {
                    "error": f"no answer within {rounded(self._timeout_s)} s (env.agent_timeout_s)",
                    "status": "timeout",
                }
            except AgentUnreached as lost:
                if time.monotonic() + pause_s < end:
                    await self._pause(task, lost, pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
                    continue
                reply = {
                    "error": f"no agent within {rounded(self._timeout_s)} s (env.agent_timeout_s): {lost}",
                    "status": "timeout",
                }
            except AgentLost as lost:
                reason, attempt = str(lost), attempt + 1
                if isinstance(lost, AgentBlocked):
                    end = time.monotonic() + self._timeout_s
                logger.warning("%s loses its agent: %s", rollout_name(task.request_id), reason)
                await asyncio.sleep(RETRY_S)
                continue
            finally:
                self.gateway.close_session(session)
            return self._ended(task, session, judged(reply, masks_flagged=self._masks_flagged), attempt)
        return self._ended(
            task, session, failed(f"the agent was lost {MAX_ATTEMPTS} times: {reason}", "crash"), MAX_ATTEMPTS
        )

    async def _pause(self, task: AgentTask, lost: AgentUnreached, most_s: float) -> None:
        name = task.prompt.env_name
        self._waiting[task.request_id] = f"agent {name}", str(lost)
        pause_s = random.uniform(0.0, most_s)  # not all at once
        if isinstance(lost, AgentBusy):
            await asyncio.sleep(pause_s)
            self._waiting.pop(task.request_id, None)
            return
        listens = self._listens.setdefault(name, asyncio.get_running_loop().create_future())
        if (await asyncio.wait([listens], timeout=pause_s))[0]:
            await asyncio.sleep(random.uniform(0.0, RETRY_S))

    def _note_connection(self, name: str) -> None:
        if (listens := self._listens.pop(name, None)) is not None:
            listens.set_result(None)
            self._waiting = {key: found for key, found in self._waiting.items() if found[0] != f"agent {name}"}

    async def _ask(self, task: AgentTask, session: AgentSession, deadline_s: float) -> Json:
        name = task.prompt.env_name
        if (agents := self.agents.get(name)) is None:
            assert self.gym is not None, name
            # Of a group that is asked again, servers may still hold the answers of the time before.
            group = hashed_seed(f"{self._nonce}/{task.epoch}/{task.prompt.prompt_id}/{task.weight_version}")
            return await self.gym.answer(task, session, self.gateway.receipts, group=group, deadline_s=deadline_s)
        agent = min(agents, key=lambda one: one.num_running if isinstance(one, FunctionAgent) else 0)
        if isinstance(agent, RemoteAgent):
            agent.on_connected = partial(self._note_connection, name)
        base_url = f"{self._url}/sessions/{session.session_id}/v1"
        asked = {
            "row": task.row,
            "base_url": base_url,
            "api_key": session.key,
            "model": MODEL,
            "deadline_s": deadline_s,
        }
        return await agent.ask(asked)

    def _ended(self, task: AgentTask, session: AgentSession, verdict: Verdict, num_lost: int) -> AgentResult:
        rollouts = session.tree.sequences(task.request)
        if verdict.is_valid and not rollouts:
            verdict = failed("the agent has sampled nothing that can be trained", "error", verdict)
        if not verdict.is_valid:
            name = rollout_name(task.request_id)
            logger.warning("%s (%s) is not trained: %s", name, task.prompt.env_name, verdict.reason)
        metrics = {
            **verdict.metrics,
            "sequences": float(len(rollouts)),
            "lost_attempts": float(num_lost),
            **{f"untrained_tokens_{reason}": float(count) for reason, count in session.tree.num_untrained().items()},
            **{safe_text(name)[:90]: float(count) for name, count in session.altered.items()},
        }
        self.altered.update((task.prompt.env_name, safe_text(name)[:90]) for name in session.altered)
        # What is masked keeps its place, and costs no more than that.
        kept = (rollouts if verdict.is_valid else rollouts[:1]) or [task.empty_rollout()]
        said = replace(verdict, metrics=metrics, text=safe_text(session.text), conversations=session.heard.shown())
        return AgentResult(kept, said, tuple(session.engines))


def judged(reply: Json, *, masks_flagged: bool) -> Verdict:
    """Verdict in an agent's answer: a reward, or components summing to it; `mask` keeps the rollout out of the loss.

    Texts in `columns`, and others beside the reward, are columns of the table of samples.
    """
    if (error := reply.get("error")) is not None:
        status = "timeout" if reply.get("status") == "timeout" else "error"
        said = failed(str(error)[:500] or "the agent answers an empty error", status)
        return replace(said, trace=safe_text(str(reply.get("trace") or ""), MAX_TRACE_CHARACTERS))
    try:
        components, metrics = (_numbers(reply, name) for name in ("components", "metrics"))
        total = reply.get("reward")
        reward = sum(components.values()) if total is None and components else _number(total, "reward")
        if not isinstance(is_masked := reply.get("mask") or False, bool):
            raise ValueError(f"the agent answers mask={is_masked!r:.80}, which is neither true nor false")
        columns = _columns(reply)
    except ValueError as error:
        return failed(str(error), "error")
    is_valid = not (is_masked and masks_flagged)
    return Verdict(
        reward,
        is_valid,
        "ok" if is_valid else "flagged",
        safe_text(str(reply.get("extracted") or ""), MAX_COLUMN_CHARACTERS),
        "",
        columns=columns,
        components=components,
        flags=("mask_sample",) if is_masked else (),
        reason="" if is_valid else "its agent masks it",
        metrics=metrics,
    )


def failed(reason: str, status: Status, verdict: Verdict | None = None) -> Verdict:
    """The verdict on a rollout that does not count."""
    return Verdict(
        0.0, False, status, "", "", reason=safe_text(reason), metrics={} if verdict is None else verdict.metrics
    )


def _numbers(reply: Json, name: str) -> dict[str, float]:
    found = reply.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"the agent answers {name}={found!r:.80}, which is no object of numbers")
    return {safe_text(str(key)): _number(value, f"{name}.{key}") for key, value in found.items()}


def _columns(reply: Json) -> dict[str, str]:
    found = reply.get("columns") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"the agent answers columns={found!r:.80}, which is no object of texts")
    beside = {key: text for key, text in reply.items() if isinstance(text, str) and key not in NO_COLUMNS}
    named = [*(beside | dict(found)).items()][:MAX_COLUMNS]
    return {
        safe_text(str(key), MAX_COLUMN_CHARACTERS): safe_text(str(text), MAX_COLUMN_CHARACTERS) for key, text in named
    }


def _number(value: object, name: str) -> float:
    if is_finite(value):
        return float(cast(float, value)) + 0.0  # -0.0 is 0.0
    raise ValueError(f"the agent answers {name}={value!r:.80}, which is no finite number")


def is_finite(value: object) -> bool:
    """True if a value is a number that a reward can be."""
    return isinstance(value, bool | int | float) and abs(value) <= LARGEST_REWARD
