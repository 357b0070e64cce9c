# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users: exit code 2 and one message with key, value, rule and way out, before any actor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.stack.loop.conftest import write_inputs
from tests.waiting import HANG_S


@dataclass(frozen=True)
class Case:
    """A command line that is at fault."""

    words: list[str]
    message: list[str]
    """Parts of what is printed: key, value, rule, way out. `{folder}` stands for the folder of the inputs."""


# One of each stage of a start: the config, the rows, the run folder. Unit tests hold each message.
CASES = {
    "unknown key": Case(
        ["grpo.num_prompt_per_step=8"],
        ["grpo.num_prompt_per_step=8 (command line): no such key", "the nearest is grpo.num_prompts_per_step"],
    ),
    "corrupt data row": Case(
        ["data.train.data_path={folder}/corrupt.jsonl"],
        [
            "data.train.data_path={folder}/corrupt.jsonl has 2 bad rows; correct or remove them",
            "{folder}/corrupt.jsonl:2: invalid JSON at column ",
            "{folder}/corrupt.jsonl:3: no key expected_answer or answer",
        ],
    ),
    "folder in use": Case(
        ["checkpointing.checkpoint_dir={folder}/used"],
        [
            "checkpointing.checkpoint_dir={folder}/used is in use by process {pid} on ",
            "stop it, or choose another folder",
        ],
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("inputs")
    overrides = write_inputs(folder)
    good = json.dumps({"question": "10+11=", "answer": "21"})
    (folder / "corrupt.jsonl").write_text(f'{good}\n{{"question": "10+12=", "answer"\n{{"question": "10+13="}}\n')
    (folder / "used").mkdir()
    (folder / "used" / "owner.json").write_text(json.dumps(this_process()))
    return folder, overrides


def this_process() -> dict[str, object]:
    """Content that a run writes into its folder to own it."""
    process = {
        "host": os.uname().nodename,
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""),
        "namespace": os.stat("/proc/self/ns/pid").st_ino,
        "pid": os.getpid(),
        "start": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]),
    }
    return {"process": process, "job": None, "restart": 0}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is as short as that of a user's temporary files: sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="bad-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_with_one_message_before_anything_starts(
    inputs: tuple[Path, list[str]], temporary: Path, name: str
):
    folder, overrides = inputs
    case = CASES[name]
    words = [word.format(folder=folder) for word in case.words]
    result = subprocess.run(
        [sys.executable, "-m", "mrl.train", "grpo_tiny.yaml", *overrides, *words],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    for part in case.message:
        assert part.format(folder=folder, pid=os.getpid()) in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    # Ray's session folder would lie here, and an actor's log there.
    assert list(temporary.glob("mrl-ray-*")) == []
    assert list(folder.rglob("actors")) == []


def test_the_same_inputs_without_a_fault_pass(inputs: tuple[Path, list[str]]):
    from mrl.config.load import load_config
    from mrl.data.prompts import load_prompts
    from mrl.loop.preflight import check_start

    _, overrides = inputs
    assert len(load_prompts(check_start(load_config("grpo_tiny.yaml", overrides))).train) == 64
