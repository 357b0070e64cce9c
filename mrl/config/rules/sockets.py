# SPDX-License-Identifier: Apache-2.0
"""The folder of temporary files: it can be written to, and leaves room for the names of sockets below it."""

from __future__ import annotations

import os
import tempfile

from mrl import env
from mrl.config.errors import Problems
from mrl.config.schema.run import RunConfig

MAX_PATH_BYTES = 107
"""sun_path of unix(7), without the zero at its end."""
RAY_SOCKET = "mrl-ray-12345678/ray/session_2000-01-01_00-00-00_123456_4194304/sockets/plasma_store"
"""Ray's longest path below the folder, with a process id of seven digits, for a run on one node; others use the
launcher's Ray.
"""
PROBE_BYTES = 2**16
ENGINE_SOCKET = "00000000-0000-0000-0000-000000000000"
"""Longest socket name of vLLM's processes. Those of Python's multiprocessing, pymp-12345678/listener-12345678, are
shorter.
"""


def longest_folder(socket: str) -> int:
    """Longest folder, in bytes, for a socket of this name."""
    return MAX_PATH_BYTES - len(socket) - 1


def temporary_folder() -> str:
    """The folder of temporary files that the environment names, or that Python chooses; libraries take others."""
    return env.TMPDIR.read() or tempfile.gettempdir()


def why_unwritable(folder: str) -> str:
    """The reason why no file can be written in a folder: it is missing, full, read-only, another's; "" if one can.

    Python and libraries say nothing of it, and each takes another folder.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        return str(error.strerror if isinstance(error, OSError) else error)
    return ""


def check_sockets(config: RunConfig, problems: Problems) -> None:
    """Checks that the folders for temporary files leave room for the names of sockets."""
    socket, whose = (
        (RAY_SOCKET, "Ray's sockets") if config.cluster.num_nodes == 1 else (ENGINE_SOCKET, "the engines' sockets")
    )
    folders = [("TMPDIR", temporary_folder(), socket, whose)]
    for key, variables in (
        ("policy.megatron_cfg.env_vars", config.policy.megatron_cfg.env_vars),
        ("policy.generation.vllm_cfg.env_vars", config.policy.generation.vllm_cfg.env_vars),
    ):
        folders += [
            (f"{key}.{name}", (variables or {}).get(name, ""), ENGINE_SOCKET, "sockets")
            for name in ("TMPDIR", "VLLM_RPC_BASE_PATH")
        ]
    for name, folder, socket, whose in folders:
        size, most = len(os.fsencode(folder)), longest_folder(socket)
        if size > most:
            rule = (
                f"{whose} are created below it, and their paths have at most {MAX_PATH_BYTES} bytes: it may "
                f"have {most}, and has {size}"
            )
            problems.tell(name, folder, rule, "set it to a shorter folder of this host, such as /tmp", "to be provided")
        elif folder and (name == "TMPDIR" or config.cluster.num_nodes == 1) and (reason := why_unwritable(folder)):
            way_out = "make it, make room there, or set it to another folder of this host, such as /tmp"
            problems.tell(name, folder, f"temporary files cannot be written there: {reason}", way_out, "to be provided")
