# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/plan.md: GPUs that hold a packaged config or a large model, and the overrides with which they do."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.plan.facts import PlanModel, read_model
from mrl.plan.hardware import GPUS
from mrl.plan.plan import problems_of
from mrl.plan.search import worst_rank
from scripts.render_docs import DOCS
from tests.sources import ROOT
from tests.unit.plan.conftest import published

PAGE = (DOCS / "plan.md").read_text()
GPU_NAMES = ("a100-80g", "a100-40g", "rtx4090-24g")
FITS = "as it is"
ROWS = re.findall(r"^\| `(\w[\w.]*\.yaml)` \| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
LARGEST = re.findall(r"^\| `([\w./-]+)`.*? \| ([\d,]+) \| (\d+) \| (.+?) \|$", PAGE, re.MULTILINE)
MEANINGS = dict(re.findall(r"^- ([A-Z]+)n?: `([^`]+)`$", PAGE, re.MULTILINE))
"""Word of a cell, without its number -> overrides, in which N is that number."""
FILES = {
    "Qwen/Qwen3-30B-A3B": "qwen3_30b_a3b",
    "/path/to/hf_checkpoint": "nemotron3_nano_30b_a3b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next_80b_a3b",
}


def overrides(cell: str) -> list[str]:
    """The overrides that a cell stands for."""
    words = (
        []
        if cell == FITS
        else [(word.rstrip("0123456789"), word.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")) for word in cell.split()]
    )
    return [part.replace("=N", f"={number}") for name, number in words for part in MEANINGS[name].split()]


def hf_config_of(model: str) -> dict[str, object]:
    return published()[FILES.get(model, model)]


def misfit(config: str, gpu: str, folder: Path, words: list[str], model: str = "") -> str | None:
    hf_config = hf_config_of(model or str(load_config(config).policy.model_name))
    (folder / "config.json").write_text(json.dumps(hf_config))
    run = load_config(config, [f"policy.model_name={folder}", *words])
    assert problems_of(run) == []
    return worst_rank(run, read_model(run), GPUS[gpu])[1]


def test_the_table_has_every_config_of_a_published_model():
    named = {
        path.name for path in (ROOT / "configs").glob("*.yaml") if not path.stem.endswith(("_tiny", "_tiny_dense"))
    }
    assert {config for config, *_ in ROWS} == named
    assert all(load_config(config).num_slots == int(num_gpus) for config, num_gpus, *_ in ROWS)


@pytest.mark.parametrize(
    ("config", "gpu", "cell"),
    [(config, gpu, cell) for config, _, *cells in ROWS for gpu, cell in zip(GPU_NAMES, cells, strict=True)],
)
def test_a_config_fits_with_the_overrides_of_its_cell_and_not_without(config: str, gpu: str, cell: str, tmp_path: Path):
    assert misfit(config, gpu, tmp_path, overrides(cell)) is None
    assert (misfit(config, gpu, tmp_path, []) is None) == (cell == FITS)


@pytest.mark.parametrize(("model", "parameters", "num_nodes", "cell"), LARGEST)
def test_a_large_model_fits_its_nodes_and_not_half_of_them(
    model: str, parameters: str, num_nodes: str, cell: str, tmp_path: Path
):
    assert f"{PlanModel(hf_config_of(model)).num_parameters:,}" == parameters

    def found(nodes: int, words: str) -> str | None:
        return misfit("grpo_qwen3_30ba3b.yaml", GPU_NAMES[0], tmp_path, overrides(f"{words} N{nodes}"), model)

    assert found(int(num_nodes), cell) is None
    if num_nodes != "1":
        halved = re.sub(r"(?<=EP)\d+", lambda number: str(int(number[0]) // 2), cell)
        assert found(int(num_nodes) // 2, halved) is not None


def test_the_table_of_large_models_has_every_family_of_such_models():
    large = {config["model_type"] for config in published().values() if PlanModel(config).num_parameters > 100e9}
    assert large <= {hf_config_of(model)["model_type"] for model, *_ in LARGEST}
