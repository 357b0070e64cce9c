# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from mrl.cluster.scheduling import start_deadline, weight_bytes
from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from tests.sources import ROOT

NANO3 = ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json"


def run_on(model: Path, *, gpus_per_node: int = 0) -> RunConfig:
    return load_config("grpo_tiny.yaml", [f"policy.model_name={model}", f"cluster.gpus_per_node={gpus_per_node}"])


def shards(folder: Path, *sizes: int) -> Path:
    """A Hugging Face folder whose files take no room on the disk."""
    names = [f"model-{index}.safetensors" for index in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        with (folder / name).open("wb") as file:
            file.truncate(size)
    index = {"weight_map": {f"{name}.{tensor}": name for name in names for tensor in "ab"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_tiny_model_has_the_five_minutes_of_its_processes(tmp_path: Path):
    deadline = start_deadline(run_on(shards(tmp_path, 2_000_000)))
    assert 300 <= deadline.seconds < 301
    assert str(deadline) == "start deadline 300 s: 300 s for processes + 0 s for 0.0 GB of weights at 50 MB/s"


def test_sixty_gigabytes_have_half_an_hour_on_gpus(tmp_path: Path):
    deadline = start_deadline(run_on(shards(tmp_path, *[5_000_000_000] * 12), gpus_per_node=8))
    assert deadline.seconds == 300 + 300 + 60_000 / 50
    assert str(deadline).startswith("start deadline 1,800 s: ")


def test_a_folder_without_weights_is_judged_by_its_config(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(NANO3.read_bytes())
    num_bytes = weight_bytes(tmp_path)
    # The published folder of 31.6 billion parameters in bfloat16.
    assert num_bytes == pytest.approx(63.2e9, rel=0.01)
    assert 1800 < start_deadline(run_on(tmp_path, gpus_per_node=8)).seconds < 1900


def test_without_the_model_the_rest_is_told(tmp_path: Path):
    deadline = start_deadline(run_on(tmp_path / "nowhere", gpus_per_node=8))
    assert deadline.seconds == 600
    assert "read the weights of " in str(deadline) and str(deadline).endswith("nowhere is added once they are here")
    (tmp_path / "config.json").write_text("{")
    assert start_deadline(run_on(tmp_path)).seconds == 300


def test_what_the_config_says_wins(tmp_path: Path):
    folder = shards(tmp_path, 60_000_000_000)
    config = load_config("grpo_tiny.yaml", [f"policy.model_name={folder}", "deadlines.start_s=42"])
    assert str(start_deadline(config)) == "start deadline 42 s: deadlines.start_s"
