# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NeMo Gym's `ng_run`: it starts with the run's config, is started again, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mrl.config.schema.env import GymHeadConfig, NemoGymConfig
from mrl.config.schema.judges import JudgeConfig
from mrl.nemo.gym import servers as gym_module
from mrl.nemo.gym.process_child import make_ray_folder
from mrl.nemo.gym.servers import GymProcess, GymServers, gym_config, reach_gym
from tests.waiting import HANG_S, SOON_S

# Serves a head server by env.yaml, with a daemon beside it in a session of its own, as Ray's are.
PROGRAM = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

config = json.load(open("env.yaml"))
daemon = subprocess.Popen(["sleep", "10000"], start_new_session=True)
with open("started.jsonl", "a") as file:
    record = {"words": sys.argv[1:], "pids": [os.getpid(), daemon.pid], "ray": os.environ["RAY_TMPDIR"]}
    left = [name for name in os.environ if name in ("PYTHONPATH", "RAY_ADDRESS")]
    file.write(json.dumps(record | {"left": left}) + "\\n")
print("on standard output")

class Head(BaseHTTPRequestHandler):
    def do_GET(self):
        port = config["head_server"]["port"]
        agent = {"host": "127.0.0.1", "port": port}
        body = json.dumps(json.dumps({"a": {"responses_api_agents": {"simple_agent": agent}}})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", config["head_server"]["port"]), Head).serve_forever()
"""


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gym_module, "RETRY_S", 0.05)
    monkeypatch.setenv("RAY_ADDRESS", "ours")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    path = tmp_path / "ng_run.py"
    path.write_text(PROGRAM)
    return f"{sys.executable} {path} --flag"


def test_servers_start_come_back_and_leave_nothing(tmp_path: Path, program: str):
    section = NemoGymConfig(
        ["a.yaml"], command=program, start_s=HANG_S, servers={"uv_venv_dir": "/venvs", "policy_base_url": "x"}
    )
    folder, port = tmp_path / "nemo_gym", free_port()

    def started() -> list[dict]:
        return [json.loads(line) for line in (folder / "started.jsonl").read_text().splitlines()]

    async def live() -> None:
        servers = GymServers(f"http://127.0.0.1:{port}")
        config = gym_config(section, gateway_url="http://me:7", key="k", host="127.0.0.1", head_port=port)
        process = GymProcess(section, config, servers, folder=folder)
        async with asyncio.timeout(HANG_S):
            await process.start()
            assert await servers.addresses("responses_api_agents") == {"a": f"http://127.0.0.1:{port}"}
            os.kill(started()[0]["pids"][0], signal.SIGKILL)
            while len(started()) < 2 or not servers.up.done():
                await asyncio.sleep(0.05)
            process.end()
            while any(is_alive(pid) for one in started() for pid in one["pids"]) or any(
                os.path.exists(one["ray"]) for one in started()
            ):
                await asyncio.sleep(0.05)

    asyncio.run(live())
    config = json.loads((folder / "env.yaml").read_text())
    assert {
        name: config[name]
        for name in ("uv_venv_dir", "policy_base_url", "policy_api_key", "policy_model_name", "default_host")
    } == {
        "uv_venv_dir": "/venvs",
        "policy_base_url": "http://me:7/gym/v1",
        "policy_api_key": "k",
        "policy_model_name": "policy",
        "default_host": "127.0.0.1",
    }
    assert (folder / "env.yaml").stat().st_mode & 0o77 == 0
    assert [one["words"] for one in started()] == [["--flag", "+config_paths=[a.yaml]"]] * 2 and not any(
        one["left"] for one in started()
    )
    assert "on standard output" in folder.with_suffix(".log").read_text()


def test_the_folder_of_gym_s_ray_goes_with_the_run_whose_reaper_kills_its_keeper(tmp_path: Path):
    with TemporaryDirectory(prefix="mrl-ray-") as session_folder:
        assert Path(make_ray_folder(session_folder)).parent == Path(session_folder)
    # Sockets have paths of 107 bytes, and without a run's folder there is none.
    (long := tmp_path / ("long" * 10)).mkdir()
    for folder in (str(long), str(tmp_path / "absent"), ""):
        made = Path(make_ray_folder(folder))
        assert made.parent not in (long, tmp_path)
        made.rmdir()


@pytest.mark.parametrize(
    ("said", "num_starts"), [("no such server", 3), ("The current node timed out during startup.", 7)]
)
def test_a_program_that_does_not_start_is_told_with_its_log(tmp_path: Path, said: str, num_starts: int):
    """A Ray that gives up on a busy host is started as often as it takes; here it then fails in another way."""
    program = tmp_path / "ng_run.py"
    program.write_text(
        f"import sys\nopen('starts', 'a').write('x')\nsys.exit('{said}' if len(open('starts').read()) < 5 else "
        "'broken')"
    )
    section = NemoGymConfig(command=f"{sys.executable} {program}", start_s=HANG_S)

    async def live() -> None:
        servers = GymServers(f"http://127.0.0.1:{free_port()}")
        async with asyncio.timeout(HANG_S):
            await GymProcess(section, {}, servers, folder=tmp_path / "nemo_gym").start()

    with pytest.raises(RuntimeError, match=r"has ended 3 times in a row before it was up; see .*nemo_gym.log"):
        asyncio.run(live())
    assert len((tmp_path / "nemo_gym/starts").read_text()) == num_starts


def test_servers_of_the_user_s_that_nobody_has_started_are_told(tmp_path: Path):
    section = NemoGymConfig(head_server=GymHeadConfig("127.0.0.1", free_port()), start_s=SOON_S)
    reached = reach_gym(section, gateway_url="http://me:7", key="k", host="127.0.0.1", folder=tmp_path)
    with pytest.raises(
        RuntimeError,
        match=r"env.nemo_gym.head_server: http://127.0.0.1:\d+, NeMo Gym's head server: Cannot connect .*start_s",
    ):
        asyncio.run(reached)


def test_servers_ask_judges_of_the_run_by_their_names():
    # Names and options of NeMo RL's examples/nemo_gym/nemotron-3-ultra/student_rlvr1.yaml.
    of_gym = {
        "nl2bash_judge_model": {
            "responses_api_models": {
                "local_vllm_model": {
                    "entrypoint": "app.py",
                    "model": None,
                    "uses_reasoning_parser": True,
                    "ray_worker_py_executable": "/opt/python",
                    "vllm_serve_kwargs": {"tensor_parallel_size": 4},
                }
            }
        },
        "genrm_model": {"responses_api_models": {"genrm_model": {"api_key": "dummy_key", "model": None}}},
        "other": {"resources_servers": {}},
    }
    judges = {name: JudgeConfig(name) for name in ("nl2bash_judge_model", "genrm_model", "safety")}
    section = NemoGymConfig(command="ng_run", servers=of_gym)
    found = gym_config(section, gateway_url="http://me:7", key="k", host="h", head_port=1, judges=judges)

    def asks(name: str, **more: object) -> dict[str, object]:
        return {
            "entrypoint": "app.py",
            "base_url": f"http://me:7/judges/{name}/v1",
            "api_key": "k",
            "model": name,
            "return_token_id_information": False,
            "uses_reasoning_parser": False,
            **more,
        }

    assert found["nl2bash_judge_model"] == {
        "responses_api_models": {"vllm_model": asks("nl2bash_judge_model", uses_reasoning_parser=True)}
    }
    assert found["genrm_model"] == {"responses_api_models": {"genrm_model": asks("genrm_model")}}
    assert found["safety"] == {"responses_api_models": {"vllm_model": asks("safety")}}
    assert found["other"] == of_gym["other"]
