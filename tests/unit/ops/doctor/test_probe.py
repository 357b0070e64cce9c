# SPDX-License-Identifier: Apache-2.0
"""Facts read from real folders, sockets, processes and this host."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.ops.doctor import probe
from mrl.ops.doctor.probe import Apex
from mrl.ops.doctor.software import applies, is_in_range, read_pins, read_wanted, split_requirement
from tests.sources import ROOT
from tests.waiting import HANG_S


def test_the_facts_of_this_host(tmp_path: Path):
    facts = probe.probe_host({"the cache": tmp_path / "not" / "there"}, is_in_cluster=False)
    assert facts.host == socket.gethostname()
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.packages["pyyaml"] == importlib.metadata.version("PyYAML")
    assert facts.missing_modules == () and facts.import_errors == {}
    assert facts.disks["the cache"].total_bytes == shutil.disk_usage(tmp_path).total
    assert facts.shared_memory.total_bytes == shutil.disk_usage("/dev/shm").total
    assert facts.limits["nofile"].hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert "lo" in facts.network.interfaces


def package(root: Path, name: str, **files: str) -> None:
    (root / name).mkdir()
    for file, text in {"__init__": "", **files}.items():
        (root / name / f"{file}.py").write_text(text)


def test_a_fake_apex_is_told_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert probe.find_apex() is None
    (tmp_path / "apex").mkdir()  # any folder of that name is imported
    assert probe.find_apex() == Apex(str(tmp_path / "apex"), False)
    package(tmp_path / "apex", "normalization")
    assert probe.find_apex() == Apex(str(tmp_path / "apex"), True)


def test_builds_are_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    package(
        tmp_path,
        "torchvision",
        __init__="raise ImportError",
        version="__version__: str = '0.28.0+cu130'\ncuda = None\n",
    )
    package(tmp_path, "torchaudio", __init__="raise ImportError")
    assert probe.build_tag("torchvision", "0.28.0") == "cu130"
    assert probe.build_tag("torchaudio", "2.13.0+cpu") == "cpu"
    assert probe.build_tag("torchcodec", "0.9.0") == ""


def test_libraries_without_their_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert probe.missing_modules({"torch": "2.13.0"}) == ()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys_modules = {
        name: module for name, module in sys.modules.items() if name.split(".")[0] not in ("ray", "megatron")
    }
    monkeypatch.setattr(sys, "modules", sys_modules)
    (tmp_path / "megatron").mkdir()
    assert probe.missing_modules({"ray": "2.60.0", "megatron-core": "0.16.1"}) == ("ray", "megatron.core")


def test_why_a_module_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package(tmp_path, "torn", __init__="import no_such_module")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe.import_error("json") == ""
    assert probe.import_error("torn") == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_port_that_somebody_listens_at_is_taken():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert probe.is_taken(port)
    assert not probe.is_taken(port)


def test_ports_are_those_of_the_launchers(monkeypatch: pytest.MonkeyPatch):
    for name in (*probe.NODE_PORTS, *probe.SLURM_PORTS):
        monkeypatch.delenv(name, raising=False)
    text = (ROOT / "scripts" / "ray.sub").read_text() + (ROOT / "scripts" / "ray_node.sh").read_text()
    written = {name: int(port) for name, port in re.findall(r"^(\w*PORT)=\$\{\1:-(\d+)\}", text, re.MULTILINE)}
    assert written == dict(probe.read_ports().numbers)
    monkeypatch.setenv("PORT", "54514")
    ports = probe.read_ports()
    assert ports.numbers["PORT"] == 54514
    assert ports.ephemeral == tuple(map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))


def test_the_digest_follows_every_source_file(tmp_path: Path):
    for folder in ("mrl", "conversion"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mrl" / "a.py").write_text("1")
    first = probe.source_digest(tmp_path)
    (tmp_path / "mrl" / "a.py").rename(tmp_path / "mrl" / "b.py")
    second = probe.source_digest(tmp_path)
    (tmp_path / "conversion" / "notes.txt").write_text("not a source")
    assert len({first, second}) == 2 and probe.source_digest(tmp_path) == second


def test_what_is_wanted_is_what_pyproject_and_constraints_say():
    wanted = read_wanted()
    assert wanted.ranges[""]["ray"] == ">=2.60,<3" and wanted.ranges["gpu"]["transformer-engine"] == ">=2.11,<3"
    assert wanted.pins["cpu"]["typing-extensions"] == wanted.pins["gpu"]["typing-extensions"] != ""
    # Independent of this host: what is tested lies in the ranges.
    for kind in ("cpu", "gpu"):
        ranges = {**wanted.ranges[""], **wanted.ranges[kind]}
        assert [name for name, text in ranges.items() if not is_in_range(wanted.pins[kind][name], text)] == []


def test_a_python_without_tomllib_is_told_that_it_is_too_old(monkeypatch: pytest.MonkeyPatch):
    whole = read_wanted()
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert read_wanted().python == whole.python and not is_in_range("3.10.13", whole.python)


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.13", "==2.13.0", True),
        ("2.13.1", "==2.13.0", False),
        ("0.16.1", ">=0.16.1,<0.20", True),
        ("0.20.0", ">=0.16.1,<0.20", False),
        ("0.20.0rc1", ">=0.16.1,<0.20", False),
        ("10.0", ">=9,<10", False),
        ("3.13.1", ">=3.11,<3.13", False),
        ("1.0", "", True),
    ],
)
def test_ranges(version: str, wanted: str, expected: bool):
    assert is_in_range(version, wanted) == expected


@pytest.mark.parametrize(("python", "version"), [("3.11.4", "0.16.1"), ("3.12.0", "0.19.2"), ("3.13", "0.19.2")])
def test_each_python_has_the_pins_of_its_markers(python: str, version: str):
    found = [read_pins(ROOT / f"constraints-{kind}.txt", python) for kind in ("cpu", "gpu")]
    assert [pins["megatron-core"] for pins in found] == [version, version]
    assert applies("a==1; extra == 'x'", python) and applies(f"a==1; python_version >= '{python[:4]}'", python)


def test_requirements_are_split():
    assert split_requirement('ray[default] >=2.60,<3; extra == "x"') == ("ray", ">=2.60,<3")
    assert split_requirement("Typing_Extensions") == ("typing-extensions", "")


LIGHT = """
import sys
from mrl.ops.doctor import command as doctor
doctor.main(["--json"])
print(sorted({"torch", "ray", "vllm", "omegaconf", "yaml"} & sys.modules.keys()))
"""


def test_without_a_config_no_library_is_imported():
    # So that none that is broken can keep the doctor from saying so.
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, env=environment()
    )
    assert done.stdout.splitlines()[-1] == "[]" and done.stderr == ""


def test_without_any_library_the_doctor_says_what_is_missing():
    for arguments, found in (
        ([], "isal is missing (>=1.8,<2)"),
        (["grpo_tiny.yaml"], "the config cannot be read: No module named 'yaml'"),
    ):
        # -S leaves site-packages out.
        command = [sys.executable, "-S", "-m", "mrl.doctor", *arguments]
        variables = environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, env=variables)
        assert done.returncode == 1 and found in done.stdout, done.stdout + done.stderr


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
