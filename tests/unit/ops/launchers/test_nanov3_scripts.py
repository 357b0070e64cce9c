# SPDX-License-Identifier: Apache-2.0
"""The scripts around a run of Nemotron 3 Nano, with recorders in place of Slurm, enroot and the Hub.

The model has the shapes and sizes of the real one, and holes for bytes.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from conversion.families.registry import family
from conversion.files.hf_folder import INDEX_FILE
from mrl.recipes import tokenizer
from tests.sources import ROOT
from tests.waiting import HANG_S

SCRIPTS = ROOT / "scripts"
NANO_30B = SCRIPTS / "bench/models/nemotron3_nano_30b_a3b.config.json"
CONFIG = json.loads(NANO_30B.read_text()) | {"max_position_embeddings": 262144}
NUM_FILES = 13
# Says in a file how it was called: its words, and the variables that are ours.
RECORDER = """\
#!/bin/bash
{ printf 'word %s\\n' "$@"; echo "folder $PWD"; env | sed 's/^/set /'; } >>"$RECORDS/$(basename "$0")"
"""


def write_hollow_model(folder: Path) -> None:
    """The files of the 30B model, of full size and of its shapes, with holes instead of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer.save(folder, model_max_length=1280)
    shapes = sorted(family(CONFIG).canonical(CONFIG).items())
    weight_map = {}
    for index in range(1, NUM_FILES + 1):
        name = f"model-{index:05d}-of-{NUM_FILES:05d}.safetensors"
        entries, num_bytes = {}, 0
        for tensor, shape in shapes[index - 1 :: NUM_FILES]:
            entries[tensor] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [num_bytes, num_bytes := num_bytes + 2 * math.prod(shape)],
            }
            weight_map[tensor] = name
        header = json.dumps(entries).encode()
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + num_bytes)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_hollow_model(folder := tmp_path_factory.mktemp("hub") / "model")
    return folder


@pytest.fixture
def site(model: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a user who has followed the tutorial up to the launch, at a site with recorders as its programs."""
    programs, workspace = tmp_path / "programs", tmp_path / "work space"
    programs.mkdir()
    data = workspace / "RL-nano-v3" / "data"
    data.mkdir(parents=True)
    data.with_name("model").symlink_to(model)
    for name in ("train-split.jsonl", "val-split.jsonl"):
        (data / name).write_text(
            (
                '{"responses_create_params": {"input": "1+1"}, "agent_ref": {"name": "math_with_judge_simple_agent"}, '
                '"expected_answer": "2"}\n'
            )
            * 128
        )
    add_program(programs, "sbatch", 'echo "Submitted batch job 9453356"\n')
    add_program(programs, "sinfo", "printf 'batch\\ninteractive\\n'\n")
    add_program(programs, "sacctmgr", "printf 'research\\nteaching\\n'\n")
    (tmp_path / "records").mkdir()
    return {
        "PATH": f"{programs}:{os.defpath}",
        "HOME": str(tmp_path),
        "RECORDS": str(tmp_path / "records"),
        "WORKSPACE": str(workspace),
        "VENV": str(Path(sys.executable).parent.parent),
        "ACCOUNT": "research",
        "MIN_FREE_GB": "0.001",
    }


def add_program(folder: Path, name: str, more: str = "") -> None:
    (folder / name).write_text(RECORDER + more)
    (folder / name).chmod(0o755)


def call(
    script: str, variables: dict[str, str], *words: str, folder: Path = Path("/tmp")
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / script), *words]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=HANG_S)


def record(site: dict[str, str], program: str) -> tuple[list[str], dict[str, str]]:
    """The words and the variables with which a program was called."""
    lines = (Path(site["RECORDS"]) / program).read_text().splitlines()
    words = [line.removeprefix("word ") for line in lines if line.startswith("word ")]
    return words, dict(
        line.removeprefix("set ").split("=", 1) for line in lines if line.startswith("set ") and "=" in line
    )


def test_the_launcher_submits_the_tutorials_job_from_tmp(site: dict[str, str]):
    done = call("launch_nanov3.sh", site, "grpo.max_num_steps=10", '++logger.wandb.name="it\'s mine"')
    assert done.returncode == 0, done.stdout + done.stderr
    base = site["WORKSPACE"]
    lines = done.stdout.splitlines()
    assert lines[-3:] == [
        "Submitting 32-node training job...",
        f"Using BASE_LOG_DIR: {base}/nemoRL/nemo-rl",
        "Submitted batch job 9453356",
    ]
    assert "13 of 13 safetensors files, 63.2 GB" in done.stdout
    assert "32 nodes x 8 = 256 GPUs" in done.stdout
    words, variables = record(site, "sbatch")
    assert words[-1] == str(SCRIPTS / "ray.sub")
    run = f"{base}/RL-nano-v3"
    assert set(words[:-1]) == {
        "--nodes=32", "--job-name=nemotron-nano-30b", "--time=8:00:00", "--chdir=/tmp", "--account=research",
        "--gres=gpu:8",
        f"--output={run}/logs/slurm-%j.out", f"--error={run}/logs/slurm-%j.err",
    }  # fmt: skip
    assert variables["PWD"] == "/tmp"
    assert variables["BASE_LOG_DIR"] == f"{base}/nemoRL/nemo-rl" and Path(variables["BASE_LOG_DIR"]).is_dir()
    assert (variables["GPUS_PER_NODE"], variables["HF_HOME"]) == ("8", f"{run}/.cache/huggingface")
    assert variables["MRL_COMPILED"] == f"{run}/.cache/mrl-compiled"
    assert variables["VENV"] == site["VENV"] and "PYTHONPATH" not in variables and "MOUNTS" not in variables
    assert shlex.split(variables["COMMAND"]) == [
        "python", "-m", "mrl.train", "--config", "grpo_nanov3.yaml", f"policy.model_name={run}/model",
        f"data.train.data_path={run}/data/train-split.jsonl", f"data.validation.data_path={run}/data/val-split.jsonl",
        "checkpointing.enabled=true", f"checkpointing.checkpoint_dir={run}/checkpoints",
        "cluster.num_nodes=32", "cluster.gpus_per_node=8", "grpo.max_num_steps=10", "++logger.wandb.name=\"it's mine\"",
    ]  # fmt: skip


def test_an_image_in_a_registry_is_named_as_enroot_wants_it(site: dict[str, str]):
    done = call(
        "launch_nanov3.sh",
        site | {"CONTAINER": "docker://nvcr.io/my-org/mrl:1.2", "TRAINING_CMD": "true", "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, variables = record(site, "sbatch")
    assert (variables["CONTAINER"], variables["MOUNTS"]) == (
        "docker://nvcr.io#my-org/mrl:1.2",
        f"{site['WORKSPACE']}:{site['WORKSPACE']}",
    )


@pytest.mark.parametrize(
    ("time", "warning"),
    [
        ("8:00:00", "with most of --time 8:00:00 unused; give a shorter --time or a later time to save (--time: TIME)"),
        ("1:00:00", "Slurm ends the attempt before, at --time 1:00:00"),
        ("4:00:00", ""),
    ],
)
def test_a_time_limit_is_compared_with_the_last_save(site: dict[str, str], time: str, warning: str):
    """grpo_nanov3.yaml saves at 3 h 40 min, as NeMo RL's does."""
    done = call("launch_nanov3.sh", site | {"TIME": time})
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("[WARNING]")]
    assert (["checkpoint_must_save_by=00:03:40:00: " in line and warning in line for line in said]) == [True] * bool(
        warning
    )


def test_every_setting_of_the_launcher_is_honoured(site: dict[str, str], tmp_path: Path):
    image = tmp_path / "mrl.sqsh"
    image.touch()
    chosen = {
        "CONTAINER": str(image), "MOUNTS": "/a:/a", "NUM_NODES": "16", "GPUS_PER_NODE": "4", "TIME": "1:00:00",
        "JOB_NAME": "mine",
        "PARTITION": "interactive", "GPU_REQUEST": "--gpus-per-node=4", "BASE_LOG_DIR": f"{tmp_path}/ray",
        "LOG_DIR": f"{tmp_path}/logs",
        "TRAINING_CMD": "python my_own.py", "HF_HOME": f"{tmp_path}/hub", "PYTHON": sys.executable,
        "CKPT_DIR": f"{tmp_path}/checkpoints",
    }  # fmt: skip
    done = call("launch_nanov3.sh", site | chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    words, variables = record(site, "sbatch")
    expected = {"--nodes=16", "--time=1:00:00", "--job-name=mine", "--partition=interactive", "--gpus-per-node=4"}
    assert expected < set(words) and f"--output={tmp_path}/logs/slurm-%j.out" in words
    assert not any(word.startswith("--gres") for word in words)
    assert variables["COMMAND"] == "python my_own.py"
    handed_on = ("CONTAINER", "MOUNTS", "BASE_LOG_DIR", "HF_HOME", "GPUS_PER_NODE")
    assert {name: variables[name] for name in handed_on} == {name: chosen[name] for name in handed_on}


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"WORKSPACE": ""}, [], "WORKSPACE is not set"),
        ({"MODEL_CHECKPOINT": "/nowhere"}, [], "config.json is missing"),
        ({"DATA_DIR": "/nowhere"}, [], "/nowhere/val-split.jsonl cannot be read"),
        ({"MIN_FREE_GB": "1000000000"}, [], "GB are asked for"),
        ({"LOG_DIR": "logs"}, [], "LOG_DIR=logs is relative"),
        ({"ACCOUNT": "nobodys"}, [], "ACCOUNT=nobodys is none of yours: research, teaching"),
        ({"ACCOUNT": ""}, [], "ACCOUNT is not set; yours are research, teaching"),
        ({"PARTITION": "huge"}, [], "PARTITION=huge is none of this site's: batch, interactive"),
        ({"VENV": "/nowhere"}, [], "neither CONTAINER nor a virtual environment"),
        ({"CONTAINER": "/nowhere/mrl.sqsh"}, [], "CONTAINER=/nowhere/mrl.sqsh is not there"),
        ({"CONTAINER": "docker://nvcr.io/nvidia/nemo-rl:v0.4.0.nemotron_3_nano"}, [], "NeMo RL's own image"),
        (
            {"CONTAINER": "docker://nvcr.io/me/mrl:1", "CKPT_DIR": "/elsewhere"},
            [],
            "CKPT_DIR=/elsewhere is not below HOST_BASE",
        ),
        ({}, ["grpo.num_prompts_per_stepp=3"], "nearest is grpo.num_prompts_per_step"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_submitted(
    site: dict[str, str], changes: dict[str, str], words: list[str], message: str
):
    done = call("launch_nanov3.sh", site | changes, *words)
    assert done.returncode == 2
    assert message in done.stdout + done.stderr
    assert not (Path(site["RECORDS"]) / "sbatch").exists()


def test_an_image_is_imported_whole_or_not_at_all(site: dict[str, str], tmp_path: Path):
    add_program(tmp_path / "programs", "enroot", 'echo image >"$3"; exit ${ENROOT_CODE:-0}\n')
    workspace = Path(site["WORKSPACE"])
    image = {"IMAGE": "docker://nvcr.io/my-org/mrl:1.2"}
    assert call("pull_container.sh", site | image | {"ENROOT_CODE": "1"}).returncode == 1
    assert list(workspace.glob("*.sqsh*")) == []
    (Path(site["RECORDS"]) / "enroot").unlink()
    done = call("pull_container.sh", site | image)
    assert done.returncode == 0, done.stderr
    words, variables = record(site, "enroot")
    # enroot takes what stands before a # for the registry, and asks Docker Hub without one.
    assert words[:2] == ["import", "--output"] and words[3] == "docker://nvcr.io#my-org/mrl:1.2"
    assert variables["ENROOT_CACHE_PATH"] == f"{workspace}/.cache/enroot"
    assert [path.name for path in workspace.glob("*.sqsh*")] == ["mrl.1.2.sqsh"]
    assert "is there already" in call("pull_container.sh", site | image).stdout
    assert "IMAGE is not set" in call("pull_container.sh", site).stderr


def test_downloads_are_tried_again_and_verified(site: dict[str, str], tmp_path: Path):
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    # The second download of the model succeeds.
    add_program(venv, "hf", '[[ $(grep -c "word download" "$RECORDS/hf") != 1 ]]\n')
    add_program(venv, "python")
    variables = site | {"VENV": str(tmp_path / "venv"), "RETRY_S": "0"}
    done = call("prepare_data.sh", variables)
    assert done.returncode == 0, done.stdout + done.stderr
    run = f"{site['WORKSPACE']}/RL-nano-v3"
    words, _ = record(site, "hf")
    model = [
        "download",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "--repo-type",
        "model",
        "--local-dir",
        f"{run}/model",
    ]
    assert words[: 2 * len(model)] == model * 2
    assert [word for word in words if word.endswith(("Blend", "17k", "Data")) and word[0] != "/"] == [
        "nvidia/Nemotron-3-Nano-RL-Training-Blend", "BytedTsinghua-SIA/DAPO-Math-17k", "Skywork/Skywork-OR1-RL-Data",
    ]  # fmt: skip
    words, _ = record(site, "python")
    prepare = ["-m", "mrl.prepare", "nano3", "--source", f"{run}/downloads", "--out", f"{run}/data"]
    verify = [
        "-m",
        "mrl.prepare",
        "verify",
        "--model",
        f"{run}/model",
        "--data",
        f"{run}/data",
        "--disk",
        run,
        "--min-free-gb",
        "0.001",
    ]
    assert words == prepare + verify
    (venv / "hf").write_text("#!/bin/sh\nexit 1\n")
    done = call("prepare_data.sh", variables | {"PARTS": "model", "ATTEMPTS": "2"})
    assert done.returncode == 2 and "could not be downloaded" in done.stderr
