# SPDX-License-Identifier: Apache-2.0
"""Folders with the config.json of published models."""

from __future__ import annotations

import shutil

import pytest

from tests.sources import ROOT

MODELS = {"nano": "nemotron3_nano_30b_a3b", "qwen": "qwen3_30b_a3b"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, file in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"scripts/bench/models/{file}.config.json", folder / "config.json")
        found[name] = f"policy.model_name={folder}"
    return found
