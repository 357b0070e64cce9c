# SPDX-License-Identifier: Apache-2.0
"""Families of installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversion.families.common import VllmParallel
from conversion.families.decoder import decoder_family
from conversion.families.registry import family, installed_family, llama
from tests import models
from tests.sources import ROOT


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes an entry point of the group, as pip does."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "own_family"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(model_type: str, value: str) -> None:
        folder = tmp_path / "package-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: package\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[mrl.families]\n{model_type} = {value}\n")

    yield write
    installed_family.cache_clear()


def test_the_family_of_the_example_has_the_tables_of_llama(install):
    install("mistral", "mistral_family:FAMILY")
    config = {**models.TINY["mistral"], "model_type": "mistral"}
    llama = config | {"model_type": "llama"}
    assert family(config).canonical(config) == family(llama).canonical(llama)
    layouts = [family(one).vllm_layout(one, VllmParallel(tp=2), 1, "float32") for one in (config, llama)]
    assert layouts[0] == layouts[1]
    with pytest.raises(ValueError, match="sliding_window=4096 is in use"):
        family(config).canonical(config | {"sliding_window": 4096, "max_position_embeddings": 32768})


def test_a_family_may_have_fields_of_megatron_s_config_of_its_own():
    own, plain = (decoder_family(llama, **fields) for fields in ({"rotary_interleaved": True}, {}))
    config = {**models.TINY["mistral"], "model_type": "llama"}
    given, usual = (each.megatron_arguments(config)["transformer"] for each in (own, plain))
    assert given == usual | {"rotary_interleaved": True} and own.canonical(config) == plain.canonical(config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mistral_family:mistral", "is a function; make it a conversion.families.common.Family"),
        ("mistral_family:no_such", "AttributeError"),
        ("no_such_module:FAMILY", "ModuleNotFoundError"),
    ],
)
def test_what_is_no_family_is_refused(install, value: str, message: str):
    install("mistral", value)
    with pytest.raises(ValueError, match=f"entry point {value} of mrl.families:? {message}"):
        family({"model_type": "mistral"})


def test_a_family_that_nobody_has_is_refused():
    with pytest.raises(
        ValueError, match="model_type='unheard_of' is not supported; use one of .*, or add a family of your own"
    ):
        family({"model_type": "unheard_of"})
