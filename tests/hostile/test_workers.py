# SPDX-License-Identifier: Apache-2.0
"""Reward workers that an answer has taken over, and hosts whose kernel confines nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.schema.env import BUILT_IN, EnvConfig, OwnEnvConfig
from mrl.envs.task import Environment, Task
from mrl.types import Verdict
from tests.hostile.attacks import SHARE
from tests.sources import ROOT
from tests.unit.envs.deadlines import culprits_miss_theirs
from tests.unit.envs.pools import Pool, build_environment
from tests.waiting import HANG_S

WORKERS = "a reward worker is taken over"
HOSTS = "a host that cannot confine programs"
DEEDS = {
    **dict.fromkeys(("connect", "datagram", "packet"), "network"),
    **dict.fromkeys(("run", "fork", "kill"), "processes"),
    **dict.fromkeys(("write", "delete", "link"), "files"),
    **dict.fromkeys(("mode", "time", "attribute", "lock"), "files"),
    **dict.fromkeys(("niceness", "affinity", "scheduler"), "processes"),
    **dict.fromkeys(("memory", "environment", "semaphores", "shared memory", "messages"), ""),
}
CHANGES = ("write", "delete", "mode", "time", "attribute", "lock")
"""Deeds to a file that is there."""
REACHING = ("kill", "niceness", "affinity", "scheduler")
"""Deeds to this process, which as root's the kernel refuses to a worker without its privileges."""


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, Pool]]:
    """The same function, without allowances and with each."""
    made = {}
    for allow in ("", "network", "processes", "files"):
        functions = {"obey": "tests.hostile.rewards:obey"}
        own = OwnEnvConfig(functions=functions, timeout_s=HANG_S, allow=[allow] if allow else [])
        made[allow] = build_environment("obey", EnvConfig(own=own))
    yield made
    for pool in made.values():
        pool.close()


def target(deed: str, folder: Path, listener: socket.socket) -> str:
    """Target of a deed."""
    (folder / "victim").write_text("untouched")
    if deed in ("connect", "packet"):
        return str(listener.getsockname()[1])
    return "1" if deed == "kill" else str(folder / ("victim" if deed in CHANGES else "new"))


def do(pool: Pool, deed: str, folder: Path) -> tuple[Verdict, list[str], bool]:
    """The verdict, the files that a deed leaves, and whether anybody connected."""
    family = socket.AF_UNIX if deed == "datagram" else socket.AF_INET
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        if deed in ("datagram", "packet"):
            datagrams.bind(str(folder / "new") if deed == "datagram" else listener.getsockname())
        (verdict,) = pool.score([Task((deed,), target(deed, folder, listener))])
        listener.settimeout(0)
        datagrams.settimeout(0)
        try:
            heard = bool(datagrams.recv(9)) if deed in ("datagram", "packet") else listener.accept() is not None
        except BlockingIOError:
            heard = False
    return verdict, sorted(path.name for path in folder.iterdir()), heard


@pytest.mark.attack(WORKERS)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_worker_that_is_taken_over_does_no_harm(deed: str, pools: dict[str, Pool], tmp_path: Path):
    verdict, files, heard = do(pools[""], deed, tmp_path)
    assert (verdict.status, verdict.is_valid) == ("error", False)
    assert "env.own.allow=[network,processes,files]" in verdict.reason
    assert files == ["new", "victim"] if deed == "datagram" else ["victim"]
    assert (tmp_path / "victim").read_text() == "untouched" and not heard


@pytest.mark.parametrize("deed", [deed for deed, allow in DEEDS.items() if allow and deed not in REACHING])
def test_what_the_config_allows_works(deed: str, pools: dict[str, Pool], tmp_path: Path):
    pool = pools[DEEDS[deed]]
    if deed == "run":
        target_file = tmp_path / "new"
        own = OwnEnvConfig(functions={"obey": "tests.hostile.rewards:obey"}, allow=["processes", "files"])
        with build_environment("obey", EnvConfig(own=own)) as both:
            assert both.score([Task((deed,), str(target_file))])[0].reward == 1.0 and target_file.exists()
        return
    verdict, _, heard = do(pool, deed, tmp_path)
    assert verdict.reward == 1.0, verdict.reason
    assert heard == (deed in ("connect", "datagram", "packet"))


def test_a_worker_computes_reads_and_writes_its_own_folder(pools: dict[str, Pool]):
    assert [pool.score([Task(("work",))])[0].reward for pool in pools.values()] == [1.0] * 4


def test_libraries_of_graders_work_in_a_worker_that_is_confined(pools: dict[str, Pool]):
    (verdict,) = pools[""].score([Task(("libraries",))])
    assert verdict.reward == 1.0, verdict.reason


@pytest.mark.attack(SHARE)
def test_a_program_that_outlives_its_grader_leaves_no_folder():
    name = f"left-{uuid.uuid4()}"
    options = {"test_timeout_s": HANG_S, "timeout_s": HANG_S, "may_escape": False}
    program = f"```\nimport time\nopen('{name}', 'w')\ntime.sleep(6000)\n```"
    task = Task((program,), row=json.dumps({"unit_tests": {"inputs": [""], "outputs": [""]}}))

    def written() -> list[Path]:
        return [
            *Path(tempfile.gettempdir()).glob(f"mrl-*/{name}"),
            *Path(tempfile.gettempdir()).glob(f"mrl-*/*/{name}"),
        ]

    environment = Environment("mrl.envs.code:make", options, timeout_s=HANG_S, allowances=("processes",))
    with Pool(environment) as pool, culprits_miss_theirs("```", when=lambda: written() != []):
        assert pool.score([task])[0].status == "timeout"
    assert written() == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_worker_is_under_a_filter(name: str):
    with build_environment(name, EnvConfig()):
        children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
        states = [
            Path(f"/proc/{pid}/status").read_text()
            for pid in children
            if f".{name}:make" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
    assert states and all("Seccomp:\t2" in state and "NoNewPrivs:\t1" in state for state in states)


ON_SUCH_A_HOST = """
import json, sys
from mrl.config.schema.env import CodeEnvConfig, EnvConfig
from mrl.envs import code, confine
from tests.unit.envs.pools import build_environment
from mrl.envs.task import Task
call, allow = sys.argv[1], sys.argv[2] == "True"
confine.install(confine.filter_program({call: confine.ENOSYS}, confine.ALLOW))
config = EnvConfig(code=CodeEnvConfig(num_workers=1, allow_unconfined=allow))
tests = {"unit_tests": {"inputs": [""], "outputs": ["42"]}}
try:
    with build_environment("code", config) as pool:
        (verdict,) = pool.score([Task(("```\\nprint(42)\\n```",), row=json.dumps(tests))])
    said = {"reward": verdict.reward, "flags": verdict.flags}
except RuntimeError as error:
    said = {"error": str(error)}
# Nobody may get reward 0 for what the host lacks either.
try:
    code.run_test("print(42)", "", "42", "", 20)
except RuntimeError as error:
    said["program"] = str(error)
print(json.dumps(said))
"""


@pytest.mark.attack(HOSTS)
@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize(
    ("call", "lack"), [("landlock_create_ruleset", "Landlock: "), ("seccomp", "seccomp: "), ("capset", "capset: ")]
)
def test_a_host_that_cannot_confine_programs_refuses_them(call: str, lack: str, allow: bool):
    command = [sys.executable, "-c", ON_SUCH_A_HOST, call, str(allow)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    said = json.loads(done.stdout)
    assert lack in said["program"]
    if not allow:
        assert (
            lack in said["error"]
            and "env.code.allow_unconfined=true" in said["error"]
            and "mrl.doctor" in said["error"]
        )
    else:
        assert (said["reward"], said["flags"]) == (1.0, ["unconfined"])
        assert "env.code.allow_unconfined=true" in done.stderr
