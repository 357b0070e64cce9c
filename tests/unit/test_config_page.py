# SPDX-License-Identifier: Apache-2.0
"""Every config key is on docs/config.md and in `mrl.keys`. test_docs.py checks that all pages are up to date."""

from __future__ import annotations

import logging
import re

import pytest

from mrl.config.schema.keys import KEYS
from mrl.nemo.dialect.translate import DIALECT_KEYS
from mrl.ops.manual import foreign_keys, main, matching
from scripts.render_docs import DOCS

KEYS_TO_SET, REFERENCE = (DOCS / "config.md").read_text().split("<!-- config -->")


def keys_of_the_table() -> set[str]:
    """The keys that the table names, those of repeated sections included."""
    rows = re.findall(r"^\| (?:`([\w.]+)`|–) \| (.*) \|$", REFERENCE, re.MULTILINE)
    found = {".".join(filter(None, [section, name])) for section, row in rows for name in re.findall(r" ?`(\w+)`", row)}
    repeats = [(section, of) for section, row in rows for of in re.findall(r"as in `([\w.]+)`", row)]
    lacking = [
        (section, lacks) for section, row in rows for lacks in re.findall(r" without ((?:`\w+`(?: and )?)+)", row)
    ]
    lacks = {
        f"{section}.{name}" for section, names in lacking for name in re.findall(r"\w+", names.replace(" and ", " "))
    }
    repeated = {key.replace(of, section, 1) for section, of in repeats for key in KEYS if key.startswith(f"{of}.")}
    return (found - lacks) | (repeated - lacks)


def test_every_key_of_the_schema_is_on_the_page_and_no_other():
    table = keys_of_the_table()
    assert KEYS.keys() - table == set()
    others = {key for key in table - KEYS.keys() if ".NAME" not in key and not key.startswith("teacher")}
    assert others == set()


def test_the_keys_to_set_exist():
    named = re.findall(r"^\| `([\w.]+)` \|", KEYS_TO_SET, re.MULTILINE)
    assert len(named) >= 30 and set(named) - KEYS.keys() == set()


def test_every_key_of_the_dialect_is_explained():
    assert DIALECT_KEYS - foreign_keys().keys() == set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grpo.oversample", ["grpo.oversample=1.0 (float, at least 1 and at most 2)", "Prompts under way"]),
        ("topk_logits", ["distillation.topk_logits_k=64", "At most the vocabulary."]),
        ("value.megatron_cfg", ["keys of policy.megatron_cfg"]),
        ("value.megatron_cfg.optimizer.lr", ["keys of policy.megatron_cfg"]),
        ("env.own.functions.mine", ["env.own.functions="]),
        ("policy.dtensor_cfg.lora_cfg.dim", ["(NeMo RL's)", "Here policy.megatron_cfg.peft.dim."]),
        ("policy.quant_cfg", ["Refused but at null: training with quantised weights"]),
    ],
)
def test_a_key_is_explained_by_a_part_of_its_name(name: str, said: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([name]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert [part for part in said if part not in printed] == []


def test_a_section_has_its_keys_alone_and_an_unknown_name_its_nearest(capsys: pytest.CaptureFixture[str]):
    assert matching("a.b", {"a.b": "1", "a.b.c": "2", "xa.b": "3", "a.bc": "4"}) == ["1", "2"]
    assert main(["grpo.oversampel"]) == 2
    assert "grpo.oversampel: no key has this in its name; the nearest: grpo.oversample," in capsys.readouterr().out
    assert logging.getLogger("mrl.ops.manual").handlers == []
