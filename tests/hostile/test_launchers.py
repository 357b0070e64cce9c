"""What an argument of a launcher may smuggle into a manifest, a script or a form, and into what scripts install and start."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from mrl.launch import main
from tests.sources import ROOT

pytestmark = pytest.mark.attack("a launcher is given more than it shows")

TINY = ["grpo_tiny.yaml", "cluster.num_nodes=2", "cluster.gpus_per_node=8"]
NEEDED = {"slurm": [], "k8s": ["--image=mrl", "--claim=fsx"], "lepton": ["--image=mrl"]}
FIELDS = {
    "slurm": ["--name", "--account", "--partition", "--time", "--container", "--mounts", "--log-dir"],
    "k8s": ["--name", "--namespace", "--image", "--claim", "--mount", "--instance-type", "--memory", "--shm"],
    "lepton": ["--name", "--image"],
}
CASES = [(launcher, field) for launcher, fields in FIELDS.items() for field in fields]
CHARACTERS = {"line": "\n", "return": "\r", "escape": "\x1b", "nul": "\0", "separator": "\u2028", "next line": "\x85"}


@pytest.mark.parametrize(("launcher", "field"), CASES, ids="".join)
def test_a_line_break_in_a_field_is_refused_with_its_name(launcher: str, field: str, capsys: pytest.CaptureFixture[str]):
    assert main([launcher, *TINY, *NEEDED[launcher], f"{field}=a\n# rm -rf ~ #"]) == 2
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith(f"[ERROR] {field} ") and "\\n" in line


@pytest.mark.parametrize("character", CHARACTERS.values(), ids=CHARACTERS)
@pytest.mark.parametrize("launcher", FIELDS)
def test_what_cannot_be_seen_is_not_handed_on(launcher: str, character: str, capsys: pytest.CaptureFixture[str]):
    assert main([launcher, *TINY, f"logger.wandb.name=a{character}RAY_AUTH_TOKEN=guessed", *NEEDED[launcher]]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("[ERROR] overrides ") and character not in printed.rstrip("\n")


def node(tmp_path: Path, **variables: str) -> str:
    """What scripts/ray_node.sh says as the head of a node without GPUs; `ray` says what it is started with."""
    for name, text in {"ray": 'echo "ray $* mode=$RAY_AUTH_MODE"; exit 1', "python": "echo 10.0.0.1", "getent": "echo 10.0.0.1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {"NODE_RANK": "0", "NUM_NODES": "1", "GPUS_PER_NODE": "0", "HEAD_HOST": "run-0.run", "COMMAND": "true"}
    environment = {"PATH": f"{tmp_path}:{os.defpath}"} | given | variables
    done = subprocess.run(["bash", ROOT / "scripts/ray_node.sh"], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    return done.stdout + done.stderr


@pytest.mark.parametrize("variables", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": ""}, {"MRL_RAY_WITHOUT_TOKEN": "0"}], ids=str)
def test_a_cluster_without_a_token_is_not_started(tmp_path: Path, variables: dict[str, str]):
    said = node(tmp_path, **variables)
    assert "ERROR: neither RAY_TOKEN_FILE nor RAY_AUTH_TOKEN is set" in said and "ray start" not in said


@pytest.mark.parametrize(
    ("variables", "mode"),
    [({"RAY_AUTH_TOKEN": "x", "RAY_AUTH_MODE": "disabled"}, "token"), ({"MRL_RAY_WITHOUT_TOKEN": "1"}, "disabled")],
    ids=["with a token", "asked for"],
)
def test_a_cluster_is_open_only_if_that_is_asked_for(tmp_path: Path, variables: dict[str, str], mode: str):
    assert re.search(rf"^ray start .* mode={mode}$", node(tmp_path, **variables), re.MULTILINE)
