# SPDX-License-Identifier: Apache-2.0
"""Downloads that are whole pass, and every way one can break is named; files are written by the safetensors library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.families.registry import family
from conversion.files.hf_folder import INDEX_FILE
from mrl.ops import prepare
from tests.sources import ROOT
from tests.unit.conversion.hf_folders import tiny_config
from tests.waiting import HANG_S

NUM_FILES = 13


def shard(index: int) -> str:
    return f"model-{index:05d}-of-{NUM_FILES:05d}.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as the Hub has them: 13 files and their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = tiny_config("nemotron_h")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shapes = sorted(family(config).canonical(config).items())
    weight_map = {}
    for index in range(1, NUM_FILES + 1):
        tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes[index - 1 :: NUM_FILES]}
        save_file(tensors, folder / shard(index), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard(index))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train-split.jsonl", "val-split.jsonl"):
        (folder / name).write_text('{"question": "1+1"}\n{"question": "1+2"}\n')
    return folder


def verify(*arguments: object) -> int:
    return prepare.main(["verify", *map(str, arguments)])


def test_whole_downloads_pass_with_no_library_installed(model: Path, data: Path, tmp_path: Path):
    # -S: no site-packages, as on a login node.
    words = [
        "-S",
        "-m",
        "mrl.prepare",
        "verify",
        "--model",
        model,
        "--data",
        data,
        "--disk",
        tmp_path / "later",
        "--min-free-gb",
        "0.001",
    ]
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={"PATH": os.defpath},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{NUM_FILES} of {NUM_FILES} safetensors files" in done.stdout
    assert "train-split.jsonl: 2 rows" in done.stdout and "GB are free" in done.stdout
    assert "PROBLEM" not in done.stdout


def truncate(folder: Path) -> None:
    path = folder / shard(7)
    path.write_bytes(path.read_bytes()[:-2])


def retouch(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def rewrite(folder: Path, more: dict[str, torch.Tensor], *, lost: int = 0) -> None:
    """Adds tensors to a file, and leaves its last ones out."""
    tensors = load_file(folder / shard(3))
    save_file(dict(list(tensors.items())[: len(tensors) - lost]) | more, folder / shard(3))


def begin(folder: Path) -> None:
    path = folder / ".cache/huggingface/download/abc.incomplete"
    path.parent.mkdir(parents=True)
    path.touch()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (truncate, f"{shard(7)} has "),
        (lambda folder: (folder / shard(13)).unlink(), f"{shard(13)} is missing"),
        (
            lambda folder: (folder / shard(2)).write_bytes(b""),
            f"{shard(2)} is no safetensors file, or an incomplete one",
        ),
        (lambda folder: (folder / INDEX_FILE).unlink(), f"no readable {INDEX_FILE}"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            "model.safetensors is read, as in transformers, and these are not: model-00001",
        ),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (retouch(model_type="gpt2"), "model_type='gpt2' is not supported"),
        (retouch(vocab_size=640), "have another shape than by config.json"),
        (
            lambda folder: rewrite(folder, {"lora.weight": torch.zeros(2)}),
            "tensors are unknown to config.json: 1, the first is lora",
        ),
        (lambda folder: rewrite(folder, {}, lost=1), "tensors are missing: 1, the first is backbone."),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (begin, "files downloaded only in part: 1;"),
    ],
)
def test_what_is_broken_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], problem: str
):
    spoil(model)
    assert verify("--model", model) == 2
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("PROBLEM")]
    assert len(problems) == 1 and problem in problems[0]


def test_all_problems_are_said_at_once(model: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    truncate(model)
    (model / shard(13)).unlink()
    (data / "train-split.jsonl").write_text('{"question": "", "_hf_placeholder": {"row": 1}}\n')
    (data / "val-split.jsonl").write_text('{"question": "1+1"}\n{"question"')
    assert verify("--model", model, "--data", data, "--disk", data, "--min-free-gb", 1e9) == 2
    printed = capsys.readouterr().out
    assert printed.count("PROBLEM") == 5
    assert "train-split.jsonl:1 is a placeholder" in printed
    assert "last row is cut off" in printed
    assert "1000000000 GB are asked for" in printed
    assert "5 of 6 checks failed" in printed
