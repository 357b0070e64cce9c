# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's servers as agents: a row is sent to its agent's `/run`, whose answer says tokens and reward. A run
may start them, by a program in an environment of the user's; they are restarted if they end.

The form is that of nemo_gym/rollout_collection.py; what is read of the answer, that of NeMo RL's
nemo_rl/environments/nemo_gym.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from conversion.files.reading import parse_json
from mrl.config.files import read_yaml
from mrl.config.schema.env import GYM_PATH, NemoGymConfig
from mrl.config.schema.judges import JudgeConfig
from mrl.config.texts import rounded
from mrl.data.fields import REQUEST
from mrl.rollout.agent_session import AgentSession
from mrl.rollout.agents import AgentTask, is_finite
from mrl.rollout.environment import variables_of_children
from mrl.rollout.gateway import JUDGES, MODEL
from mrl.rollout.receipts import Receipts
from mrl.rollout.remote import (
    AgentLost,
    AgentUnreached,
    Json,
    RemoteAgent,
    keep_running,
    open_client,
    read_answer,
    until_readable,
)
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


RAY_GAVE_UP = b"timed out during startup"
"""Part of Ray's message if it is not up within a fixed 30 s (ray/_private/node.py); on a busy host the next try
succeeds.
"""
NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Environment variables of this Python, which the servers must not inherit; those of this Ray neither."""
OF_OWN_VLLM = ("vllm_serve_kwargs", "vllm_serve_env_vars", "ray_worker_py_executable", "hf_home", "debug")
"""Options of model servers that start vLLM themselves."""
# As NeMo RL gives them (nemo_rl/environments/nemo_gym.py): Gym's own defaults let few rollouts run at once.
CONNECTIONS = {"global_aiohttp_connector_limit": 65_536, "global_aiohttp_connector_limit_per_host": 16_384}


def gym_config(
    section: NemoGymConfig,
    *,
    gateway_url: str,
    key: str,
    host: str,
    head_port: int,
    judges: Mapping[str, JudgeConfig] = MappingProxyType({}),
) -> dict[str, object]:
    """Settings that NeMo Gym reads: the user's own keys, where models are, and where its head server is to be."""
    asks = {"policy_base_url": gateway_url + GYM_PATH, "policy_api_key": key, "policy_model_name": MODEL}
    # Servers of several hosts find each other by a real address.
    return {
        "default_host": host,
        **CONNECTIONS,
        **section.servers,
        **{
            name: judge_server(section.servers.get(name), judge, f"{gateway_url}{JUDGES}/{name}/v1", key, name)
            for name, judge in judges.items()
        },
        **asks,
        "head_server": {"host": host, "port": head_port},
    }


def judge_server(given: object, judge: JudgeConfig, url: str, key: str, name: str) -> dict[str, object]:
    """A model server of NeMo Gym's that asks a judge of the run, of the kind that the config gives it.

    One that would start vLLM itself becomes `vllm_model`, which asks an address.
    """
    kinds = given.get("responses_api_models") if isinstance(given, Mapping) else None
    kind, options = next(iter(kinds.items())) if kinds else ("vllm_model", {})
    kept = {option: value for option, value in (options or {}).items() if option not in OF_OWN_VLLM}
    defaults = {"return_token_id_information": False, "uses_reasoning_parser": judge.reasoning_parser is not None}
    asks = {"entrypoint": "app.py", "base_url": url, "api_key": key, "model": name}
    return {"responses_api_models": {kind.replace("local_vllm_model", "vllm_model"): defaults | kept | asks}}


async def reach_gym(
    section: NemoGymConfig,
    *,
    gateway_url: str,
    key: str,
    host: str,
    folder: Path,
    judges: Mapping[str, JudgeConfig] = MappingProxyType({}),
) -> GymServers:
    """NeMo Gym's servers, started if so configured; `host`: this machine. RuntimeError: they do not start or answer."""
    if not section.command:
        servers = GymServers(f"http://{section.head_server.host}:{section.head_server.port}")
        await servers.wait_for_head(section.start_s)
        return servers
    with socket.create_server((host, 0)) as free:
        head_port = free.getsockname()[1]
    servers = GymServers(f"http://{host}:{head_port}")
    config = gym_config(section, gateway_url=gateway_url, key=key, host=host, head_port=head_port, judges=judges)
    servers.process = process = GymProcess(section, config, servers, folder=folder)
    await process.start()
    return servers


class GymProcess:
    """The program, in a process that is replaced when it ends. For one event loop."""

    def __init__(
        self, section: NemoGymConfig, config: Mapping[str, object], servers: GymServers, *, folder: Path
    ) -> None:
        """`folder` is where it runs, and gets its config; its output goes to `<folder>.log`."""
        self.section, self.servers, self.folder = section, servers, folder
        self.log_file = folder.with_suffix(".log")
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "env.yaml"
        file.touch(mode=0o600)  # it has the key
        file.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")  # which is YAML, too
        self._watch: asyncio.Future[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Starts the servers, and waits until they are up. RuntimeError: they do not start, or not in time."""
        name = f"env.nemo_gym.command={self.section.command}"
        self._watch = asyncio.ensure_future(keep_running(name, self._run, log=self.log_file))
        up = self.servers.up
        await asyncio.wait({self._watch, up}, return_when=asyncio.FIRST_COMPLETED, timeout=self.section.start_s)
        if self._watch.done():
            await self._watch
        if not up.done():
            self.end()
            limit = f"{rounded(self.section.start_s)} s (env.nemo_gym.start_s)"
            raise RuntimeError(
                f"env.nemo_gym.command: NeMo Gym's servers are not up within {limit}; see {self.log_file}"
            )

    def end(self) -> None:
        """Ends the servers for good."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _run(self) -> tuple[bool, int | None]:
        log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        process = self._process = self._begin()
        looking = asyncio.ensure_future(self.servers.look_for_life(self.section.start_s))
        await _closed(process)
        looking.cancel()
        was_up = self.servers.up.done()
        self.servers.set_down()
        return was_up or self._has_logged(RAY_GAVE_UP, log_start), process.poll()

    def _has_logged(self, text: bytes, start: int) -> bool:
        with self.log_file.open("rb") as log:
            log.seek(start)
            return text in log.read()

    def _begin(self) -> subprocess.Popen[bytes]:
        program, *arguments = shlex.split(self.section.command or "")
        program = shutil.which(program) or program
        paths = [os.path.abspath(path) if os.path.isfile(path) else path for path in self.section.config_paths]
        words = [program, *arguments, f"+config_paths=[{','.join(paths)}]"]
        variables = {
            name: value
            for name, value in variables_of_children().items()
            if name not in NOT_THEIRS and not name.startswith("RAY_")
        }
        variables["PATH"] = os.pathsep.join((os.path.dirname(program), os.environ.get("PATH", "")))
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                # Isolated: the environment is for the servers.
                [sys.executable, "-I", str(Path(__file__).with_name("process_child.py")), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=variables,
            )


async def _closed(process: subprocess.Popen[bytes]) -> None:
    """Returns when nobody holds the standard output of a process any more."""
    assert process.stdout is not None
    try:
        await until_readable(process.stdout.fileno())
    finally:
        process.poll()  # it has detached what runs, and ended long ago
