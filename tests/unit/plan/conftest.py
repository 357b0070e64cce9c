# SPDX-License-Identifier: Apache-2.0
"""Folders with the config.json of published models."""

from __future__ import annotations

import json
import shutil

import pytest

from conversion.families.registry import FAMILIES
from tests.sources import ROOT

MODELS = {"nano": "nemotron3_nano_30b_a3b", "qwen": "qwen3_30b_a3b"}
FOLDER = ROOT / "scripts/bench/models"


def published() -> dict[str, dict[str, object]]:
    """config.json of published models by id; of those with images the text model's, as transformers saves it alone."""
    found: dict[str, dict[str, object]] = {
        path.name.removesuffix(".config.json"): json.loads(path.read_text()) for path in FOLDER.glob("*.config.json")
    }
    for group in json.loads((FOLDER / "hub.json").read_text()):
        config = group["config"].get("text_config", group["config"])
        if config["model_type"] == "kimi_k2":  # what mrl says to write there
            config |= {"model_type": "deepseek_v3"}
        if config["model_type"] in FAMILIES:
            found |= dict.fromkeys(group["ids"], config)
    return found


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, file in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"scripts/bench/models/{file}.config.json", folder / "config.json")
        found[name] = f"policy.model_name={folder}"
    return found
