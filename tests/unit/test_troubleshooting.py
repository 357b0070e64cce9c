# SPDX-License-Identifier: Apache-2.0
"""The symptom page quotes what the product prints: every quoted message is in its source; many are produced here."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mrl.cluster.errors import way_out
from mrl.config.schema.keys import KEYS
from mrl.nemo.dialect.translate import DIALECT_KEYS
from mrl.ops.doctor import command as doctor
from mrl.ops.doctor import probe
from mrl.ops.launch import wait_for_nodes
from tests.sources import ROOT, python_files, tree_of
from tests.waiting import HANG_S

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
GAP = "…"


def rows() -> list[list[str]]:
    """Cells of every row of the page's tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| Symptom")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def messages() -> list[str]:
    """Messages that the second column quotes, of rows that print something."""
    quoted = (re.findall(r"`([^`]+)`", row[1]) for row in rows() if not row[1].startswith("nothing: "))
    return list(dict.fromkeys(message for found in quoted for message in found if " " in message))


@cache
def templates() -> str:
    """Every text of the product's source with gaps where values go, one a line."""
    texts = []
    for path in python_files(("mrl", "conversion")):
        nodes = ast.walk(tree_of(path.read_text()))
        texts += [_template(node) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    for name in ("ray.sub", "ray_node.sh", "launch_nanov3.sh", "pull_container.sh", "prepare_data.sh"):
        script = (ROOT / "scripts" / name).read_text()
        texts += re.sub(r"\$\([^()]*\)|\$\{[^{}]*\}|\$\w+", GAP, script).splitlines()
    return "\n".join(text.replace("\n", " ") for text in texts)


def _template(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return re.sub(r"%[-\d.,]*[sdgfr]", GAP, node.value) if isinstance(node.value, str) else ""
    return "".join(_template(part) if isinstance(part, ast.Constant) else GAP for part in node.values)


def test_every_row_is_complete():
    assert all(len(row) == 4 and row[0] and row[1] for row in rows())
    assert all(row[1].startswith("nothing: ") or "`" in row[1] for row in rows())


def test_every_quoted_message_is_in_the_source():
    source = templates()
    unknown = []
    for message in messages():
        parts = [part.strip(" ;:,.()") for part in message.split(GAP)]
        parts = [part for part in parts if len(part.split()) > 1 or part == message]
        assert parts, f"{message}: nothing of it can be found again"
        unknown += [(message, part) for part in parts if part not in source and not _pieces_are_in(part, source)]
    assert unknown == []


def _pieces_are_in(part: str, source: str) -> bool:
    # Messages are put together from a rule and a way out, lines of the console from names and values, each with a text
    # of its own.
    pieces = [piece.strip() for piece in re.split(r"[;:] |=|  +", part)]
    return len(pieces) > 1 and all(piece in source for piece in pieces)


def test_every_key_that_is_named_exists():
    named = set(
        re.findall(r"`((?:policy|grpo|loss_fn|cluster|checkpointing|logger|deadlines|data)\.[a-z_.]*[a-z])", PAGE)
    )
    known = KEYS.keys() | DIALECT_KEYS
    assert len(named) > 10
    assert (
        sorted(key for key in named if key not in known and not any(other.startswith(f"{key}.") for other in known))
        == []
    )


def test_every_metric_that_is_named_exists():
    named = set(re.findall(r"`((?:rollout|time|train|val)/[a-z_]+)`", PAGE))
    texts = set(templates().splitlines())
    assert named and named - texts == set()


def run_script(name: str, **variables: str) -> str:
    """Output of a script with these variables, and no others of ours."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        **variables,
    }
    command = ["bash", str(ROOT / "scripts" / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode != 0
    return done.stdout + done.stderr


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Findings of `mrl.doctor` about a config."""
    doctor.main(list(arguments))
    return capsys.readouterr().out


def test_messages_of_scripts_are_as_quoted(tmp_path: Path):
    produced = [
        run_script("ray_node.sh", NODE_RANK="0"),
        run_script("ray_node.sh", LEPTON_JOB_NAME="j", LEPTON_JOB_WORKER_INDEX="0", NUM_NODES="1", GPUS_PER_NODE="1",
                   CONFIG_PATH="c",
                   CHECKPOINT_DIR="/mnt/results", SCRIPT_PATH="/no/script.py"),
        run_script("launch_nanov3.sh", WORKSPACE=str(tmp_path), CONTAINER="/no/image.sqsh"),
        run_script("launch_nanov3.sh", WORKSPACE=str(tmp_path),
                   CONTAINER="docker://nvcr.io/nvidia/nemo-rl:v0.4.0.nemotron_3_nano"),
        run_script("launch_nanov3.sh", WORKSPACE=str(tmp_path), CONFIG_PATH="configs/mine.yaml"),
        run_script("pull_container.sh", WORKSPACE=str(tmp_path), IMAGE="nvcr.io/ORG/mrl:TAG"),
    ]  # fmt: skip
    for text, quoted in zip(
        produced,
        [
            "ERROR: missing environment variables: …; set them for the job",
            "ERROR: SCRIPT_PATH=… is not there; unset it to run python -m mrl.train",
            "CONTAINER=… is not there; give a whole path (scripts/pull_container.sh makes the file)",
            "CONTAINER=… is NeMo RL's own image, which has no mrl; docs/containers.md says how to build one",
            "CONFIG_PATH=… is relative; give a whole path, or the name of a packaged config",
            "enroot is not on this host; run this on a compute node: sbatch scripts/pull_container.sh",
        ],
        strict=True,
    ):
        assert_quoted(quoted, text)


def assert_quoted(quoted: str, text: str) -> None:
    assert quoted in messages()
    assert re.search(".*".join(map(re.escape, quoted.split(GAP))), text), text


def test_messages_about_configs_are_as_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(probe, "IMPORTED", ("json",))
    assert_quoted("…: no such key; the nearest is …", check(capsys, "grpo_tiny.yaml", "swanlab_enabledd=true"))
    assert_quoted(
        "config …: no such file in …, and no packaged config of that name; packaged are …", check(capsys, "no.yaml")
    )
    found = check(
        capsys, "grpo_tiny.yaml", f"data.train.data_path={tmp_path}/no.jsonl", f"policy.model_name={tmp_path}"
    )
    assert_quoted(
        "data.train.data_path=…: no such file or folder in …; correct the path: it names a .jsonl, .json, .parquet "
        "or .arrow file, a folder of them, or a data set's id on the Hugging Face Hub",
        found,
    )


def test_missing_nodes_are_as_quoted():
    with pytest.raises(RuntimeError) as failed:
        wait_for_nodes(lambda: [("n1", 8)], num_nodes=2, num_slots=16, names=["n1", "n2"], timeout_s=0)
    assert_quoted("… of … slots are online after … s (JOIN_TIMEOUT_S); missing, see the logs: …", str(failed.value))
    assert str(failed.value).endswith("logs: n2")


def test_advice_is_as_quoted():
    text = "CUDA out of memory. Tried to allocate 2 GiB" + way_out(RuntimeError("CUDA out of memory."))
    assert_quoted(
        "CUDA out of memory…; lower policy.generation.vllm_cfg.gpu_memory_utilization, which engines take of a GPU",
        text,
    )
    text = "NCCL communicator was aborted" + way_out(RuntimeError("NCCL communicator was aborted"))
    assert_quoted(
        "…; the ranks do not reach each other: python -m mrl.doctor looks at every node's interfaces and fabric …", text
    )
