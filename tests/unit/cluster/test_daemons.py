# SPDX-License-Identifier: Apache-2.0
"""Limits and variables that Ray's daemons do not survive, each set in a process of its own, and what daemons'
logs say.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cluster.daemons import CPU_ENGINES, MIB, PROGRAMS, last_words
from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

ASK = "from mrl.cluster.daemons import find_obstacles; print(*find_obstacles(), sep='\\n')"


def found(variables: dict[str, str] | None = None, *, prelude: str = "", ask: str = ASK) -> list[str]:
    """The obstacles that a process finds under these variables, after `prelude`."""
    # Ray sets some of its own in a process that imports it, such as this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | (variables or {})
    command = [sys.executable, "-c", f"import os, resource, socket\n{prelude}\n{ask}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S
    )
    assert not done.stdout or done.stdout.endswith("\n"), done.stderr
    return done.stdout.splitlines()


def test_a_usual_host_has_no_obstacle():
    assert found({"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "0", "PYTHONWARNINGS": "ignore", "PYTHONOPTIMIZE": "1"}) == [
        ""
    ]


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("FSIZE", 100 * MIB, "ulimit -f is 102400, and 263168 is needed: Ray's object store is one file of 256 MiB"),
        ("NOFILE", 64, "ulimit -n is 64, and 128 is needed"),
        ("AS", 3 << 30, "ulimit -v is 3145728, and 3670016 is needed"),
        ("CPU", 600, "ulimit -t is 600, and 3600 is needed: the system ends each process"),
        ("DATA", 1 << 30, "ulimit -d is 1048576, and 1572864 is needed"),
    ],
)
def test_a_limit_that_is_too_low_is_named_with_the_least_that_works(limit: str, value: int, said: str):
    number = getattr(resource, f"RLIMIT_{limit}")
    (line,) = found(prelude=f"resource.setrlimit({int(number)}, ({value}, {value}))")
    assert line.startswith(said) and "/etc/security/limits.conf" in line


@pytest.mark.parametrize(
    "setting",
    [
        "RAY_JOB_CONFIG_JSON_ENV_VAR={",
        'RAY_JOB_CONFIG_JSON_ENV_VAR={"runtime_env": {"working_dir": "gcs://a.zip"}, "metadata": {}}',
        "RAY_OVERRIDE_RESOURCES={}",
        "RAY_USE_TLS=1",
        "PYTHONWARNINGS=error",
        "PYTHONWARNINGS=default,err::DeprecationWarning",
        "PYTHONOPTIMIZE=2",
        "PYTHONINSPECT=1",
        "PYTHONDEVMODE=1",
        "PYTHONTRACEMALLOC=1",
    ],
)
def test_a_variable_that_ends_every_child_is_named(setting: str):
    name, _, value = setting.partition("=")
    (line,) = found({name: value})
    assert line.startswith(f"{setting}: ") and "unset it" in line


def test_variables_with_which_ray_starts_are_not_named():
    job = '{"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1"}}'
    assert found({"RAY_USE_TLS": "False", "RAY_JOB_CONFIG_JSON_ENV_VAR": job}) == [""]


def test_variables_of_ray_are_named_where_it_does_not_start():
    ask = "from mrl.cluster.daemons import settings_of_ray; print(settings_of_ray())"
    assert found({"RAY_worker_register_timeout_seconds": "1", "RAYMOND": "x"}, ask=ask) == [
        "this shell sets RAY_worker_register_timeout_seconds, which Ray reads; unset them; "
    ]
    assert found(prelude="os.environ['RAY_AUTH_MODE'] = 'token'", ask=ask) == [""]


def test_a_path_without_the_programs_that_start_processes_is_named(tmp_path: Path):
    lines = found({"PATH": str(tmp_path)})
    assert [line.startswith(f"PATH={tmp_path}: ") for line in lines] == [True, True]
    assert "Ray starts each process of a run by bash" in lines[0] and "cores by lscpu" in lines[1]
    for program in PROGRAMS:
        (tmp_path / program).symlink_to(Path(shutil.which(program) or "").resolve())
    assert found({"PATH": str(tmp_path)}) == [""]
    # Nothing of a run without engines asks for the cores.
    (tmp_path / CPU_ENGINES).unlink()
    ask = ASK.replace("find_obstacles()", "find_obstacles(has_engines=False)")
    assert found({"PATH": str(tmp_path)}, ask=ask) == [""]


def test_gpus_need_all_addresses():
    prelude = "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    assert found(prelude=prelude) == [""]
    (line,) = found(prelude=prelude, ask=ASK.replace("find_obstacles()", "find_obstacles(on_gpus=True)"))
    assert "ulimit -v is 1073741824, and unlimited is needed: CUDA reserves" in line


def test_a_host_without_loopback_is_named():
    """Nothing answers at a port without a listener, as on an interface that is down."""
    prelude = (
        "socket.create_connection = lambda *_, **__: (_ for _ in ()).throw(OSError(101, 'Network is unreachable'))"
    )
    (line,) = found(prelude=prelude)
    assert (
        line.startswith("127.0.0.1 does not answer ([Errno 101] Network is unreachable)")
        and "ip link set lo up" in line
    )


def test_shared_memory_that_takes_no_file_is_named():
    (line,) = found(prelude="from mrl.cluster import daemons\ndaemons.SHARED = '/proc/self'")
    assert line.startswith("/proc/self takes no file (") and "mount -o remount,rw" in line


def test_too_few_processes_are_named_with_what_a_run_takes():
    prelude = "from mrl.cluster import daemons\ndaemons.free_threads = lambda: (199, 1)"
    (line,) = found(prelude=prelude)
    assert line.startswith(
        "limit of processes (ulimit -u, pids.max) leaves 199 threads: the driver, Ray and 1 slot take 265"
    )


# Lines of Ray 2.60 under PYTHONOPTIMIZE=2 and under a full session folder, shortened.
AGENT = """
2026-11-28 06:06:05,967 INFO agent.py:1 -- Starting
Traceback (most recent call last):
  File "ray/dashboard/agent.py", line 12, in <module>
    from ray.util.state import common
  File "ray/util/state/common.py", line 947, in <module>
    state.__doc__ += f\"\"\"
TypeError: unsupported operand type(s) for +=: 'NoneType' and 'str'
"""
RAYLET = """
[2026-11-28 06:06:06,100 I 19772 19772] (raylet) main.cc:1: Starting
[2026-11-28 06:06:06,805 E 19772 19812] (raylet) agent_manager.cc:87: The raylet exited immediately because \
one agent failed
[2026-11-28 06:06:06,807 I 19772 19797] (raylet) accessor.cc:204: Unregistering node
"""


def test_the_last_errors_of_daemons_are_found_in_their_logs(tmp_path: Path):
    logs = tmp_path / "session_latest" / "logs"
    assert last_words(tmp_path) == ""
    logs.mkdir(parents=True)
    (logs / "dashboard_agent.log").write_text(AGENT)
    (logs / "raylet.out").write_text(RAYLET)
    (logs / "gcs_server.out").write_text(RAYLET.replace(" E ", " I "))
    assert last_words(tmp_path) == (
        "dashboard_agent.log: TypeError: unsupported operand type(s) for +=: 'NoneType' and 'str'; "
        "raylet.out: (raylet) agent_manager.cc:87: The raylet exited immediately because one agent failed"
    )


def test_the_signal_that_ended_a_daemon_is_named(tmp_path: Path):
    with subprocess.Popen(["sleep", str(HANG_S)]) as daemon:
        daemon.send_signal(signal.SIGXFSZ)
        wait_until(lambda: last_words(tmp_path) != "", "end of the daemon")
        assert last_words(tmp_path) == "sleep was ended by SIGXFSZ"
        assert last_words(tmp_path, [daemon.pid]) == ""
