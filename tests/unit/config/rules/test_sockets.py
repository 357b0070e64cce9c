# SPDX-License-Identifier: Apache-2.0
"""Folders for temporary files whose sockets would have too long a path are named before anything starts."""

from __future__ import annotations

import socket
import tempfile
import uuid
from datetime import datetime
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.rules import sockets
from mrl.config.rules.sockets import ENGINE_SOCKET, MAX_PATH_BYTES, RAY_SOCKET, longest_folder
from tests.unit.config.problems import texts_of


def folder_of(num_bytes: int) -> str:
    return "/tmp/" + "x" * (num_bytes - len("/tmp/"))


def test_names_of_sockets_are_as_long_as_those_of_the_libraries():
    assert len(ENGINE_SOCKET) == len(str(uuid.uuid4()))
    # ray/_private/node.py
    session = f"session_{datetime.today().strftime('%Y-%m-%d_%H-%M-%S_%f')}_{2**22}"
    made = tempfile.mkdtemp(prefix="mrl-ray-")
    Path(made).rmdir()
    assert len(RAY_SOCKET) == len(f"{Path(made).name}/ray/{session}/sockets/plasma_store")


def test_the_system_takes_no_longer_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as taken, socket.socket(socket.AF_UNIX) as refused:
        taken.bind("x" * MAX_PATH_BYTES)
        with pytest.raises(OSError, match="too long"):
            refused.bind("y" * (MAX_PATH_BYTES + 1))


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_tmpdir_that_takes_no_file_is_named(workplace: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    """Python, Ray and vLLM would each take another folder, and say nothing."""
    folder = workplace / "tmp"
    if kind == "a file":
        folder.write_text("")
    monkeypatch.setenv("TMPDIR", str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "longest_folder", lambda socket: len(str(folder)))  # pytest's own is long
        (problem,) = texts_of(load_config("grpo_tiny.yaml"))
    assert problem.startswith(f"TMPDIR={folder}: temporary files cannot be written there: ")
    assert problem.endswith("or set it to another folder of this host, such as /tmp")


@pytest.mark.parametrize(
    ("overrides", "name"), [([], RAY_SOCKET), (["cluster.num_nodes=2"], ENGINE_SOCKET)], ids=["one node", "several"]
)
def test_a_long_tmpdir_is_named_with_the_way_out(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], name: str
):
    most = longest_folder(name)
    monkeypatch.setattr(sockets, "why_unwritable", lambda folder: "")  # there is no such folder
    for num_bytes in (most, most + 1):
        monkeypatch.setenv("TMPDIR", folder_of(num_bytes))
        found = [
            problem for problem in texts_of(load_config("grpo_tiny.yaml", overrides)) if problem.startswith("TMPDIR=")
        ]
        assert len(found) == num_bytes - most
    assert f"it may have {most}, and has {most + 1}; set it to a shorter folder of this host, such as /tmp" in found[0]


def test_variables_of_the_processes_are_looked_at(workplace: Path):
    folder = folder_of(longest_folder(ENGINE_SOCKET) + 1)
    override = f"policy.generation.vllm_cfg.env_vars.VLLM_RPC_BASE_PATH={folder}"
    (problem,) = texts_of(load_config("grpo_tiny.yaml", [override]))
    assert problem.startswith(f"{override}: sockets are created below it")
