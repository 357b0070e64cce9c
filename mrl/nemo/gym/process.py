# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym's servers as the run starts them, by a program in an environment of the user's; restarted if they end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from mrl.config.schema.env import GYM_PATH, NemoGymConfig
from mrl.config.schema.judges import JudgeConfig
from mrl.config.texts import rounded
from mrl.nemo.gym.servers import GymServers
from mrl.rollout.environment import variables_of_children
from mrl.rollout.gateway import JUDGES, MODEL
from mrl.rollout.remote import keep_running, until_readable

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
