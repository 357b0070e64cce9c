# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of several folders. Property tests try the same examples in every run, without a deadline."""

from __future__ import annotations

import copy
import functools
import json
import math
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from omegaconf import _utils, base, grammar_parser

from conversion.boxes import DTYPE_BYTES
from conversion.families.registry import family
from conversion.files.hf_folder import DTYPES
from mrl.config import files
from mrl.data import prompts, supervised, trial
from tests.sources import ROOT
from tests.tiny import TINY_CONFIG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_weights(folder: Path, hf_config: Mapping[str, object], dtype: str = "BF16") -> None:
    """Writes the weights of a model, all of them zeros: checks read no more than their header."""
    entries, end = {}, 0
    for name, shape in family(hf_config).canonical(hf_config).items():
        start, end = end, end + DTYPE_BYTES[DTYPES[dtype]] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


@pytest.fixture(scope="session", autouse=True)
def parse_once() -> Iterator[None]:
    """Expressions and this checkout's files are parsed once: most tests load a config, and this is half its time."""
    read = files._read_yaml
    read_once, parse = functools.cache(read), functools.cache(grammar_parser.parse)

    def read_yaml(path: Path) -> tuple[dict[str, object], dict[files.Key, tuple[int, object]]]:
        return copy.deepcopy(read_once(path)) if path.is_relative_to(ROOT) else read(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_read_yaml", read_yaml)
        for module in (_utils, base):
            patch.setattr(module, "parse", parse)
        yield


@pytest.fixture(scope="session", autouse=True)
def try_once() -> Iterator[None]:
    """A chat template that passed its trial, which starts a process, is not retried; tests/hostile has failing ones."""
    passed, try_template = set[str](), trial.try_template

    def try_new(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, object] | None) -> None:
        if (case := f"{tokenizer.chat_template} {tokenizer.special_tokens_map} {template_kwargs}") not in passed:
            try_template(tokenizer, template_kwargs)
            passed.add(case)

    with pytest.MonkeyPatch.context() as patch:
        for module in (trial, prompts, supervised):
            patch.setattr(module, "try_template", try_new)
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the byte tokenizer."""
    from mrl.recipes import tokenizer  # imports transformers, which most tests do without

    tokenizer.save(folder := tmp_path_factory.mktemp("tokenizer"), model_max_length=1280)
    return folder


@pytest.fixture(scope="session")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of Llama-3.1-8B alone."""
    folder = tmp_path_factory.mktemp("llama_8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


@pytest.fixture
def workplace(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, made the working directory, with grpo_tiny.yaml's model and data files; it passes every check."""
    model, data = tmp_path / "prepared/tiny/model", tmp_path / "prepared/tiny/data"
    shutil.copytree(tokenizer_folder, model)
    data.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_CONFIG))
    write_weights(model, TINY_CONFIG)
    for name, question in (("train", "1+1="), ("validation", "0+2=")):
        row = {"question": question, "answer": "2", "agent_ref": {"name": "plain"}}
        (data / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
        pair = {"prompt": question, "chosen": "2", "rejected": "3"}
        (data / f"{name}_preferences.jsonl").write_text(f"{json.dumps(pair)}\n" * 64)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts write no page, which would take most of their time."""
    monkeypatch.setattr("mrl.store.run_folder.write_report", lambda *_, **__: None)
