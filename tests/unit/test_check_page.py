# SPDX-License-Identifier: Apache-2.0
"""The table of common mistakes in docs/check.md says what `--check` says."""

import json
import re
from pathlib import Path

import pytest

from mrl import check
from tests.sources import ROOT

ROWS = re.findall(r"^\| `([\w.]+=\S+?)`.*? \| (\w[\w ]*): `(.+)` \|$", (ROOT / "docs/check.md").read_text(), re.MULTILINE)
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


def test_the_table_has_ten_mistakes():
    assert len(ROWS) >= 10


@pytest.mark.parametrize(("override", "kind", "quoted"), ROWS, ids=[row[0] for row in ROWS])
def test_a_common_mistake_gets_the_line_that_the_page_quotes(workplace: Path, override: str, kind: str, quoted: str):
    tiny = json.loads((workplace / "prepared/tiny/model/config.json").read_text())
    for name, sizes in {"model16": tiny | {"head_dim": 16}, "8b": LLAMA_8B}.items():
        (workplace / name).mkdir()
        (workplace / name / "config.json").write_text(json.dumps(sizes))
    words = ["grpo_tiny.yaml", override]
    if "billion" in quoted:
        (workplace / "mine.yaml").write_text("defaults: grpo_math_8B.yaml\npolicy: {model_name: 8b}\n")
        words[0] = "mine.yaml"
    checked = check.examine(words[0], words[1:])
    found = {"Refused": checked.refused, "Warning": checked.doubts, "To be provided": [*checked.provided, *checked.unchecked]}
    lines = [line for line in found[kind] if "checkpointing.checkpoint_dir" not in line and "policy.tokenizer" not in line]
    assert len(lines) == 1 and re.match(".*".join(map(re.escape, quoted.split("…"))), lines[0]), lines
    assert all(not found[other] for other in found.keys() - {kind, "To be provided"}), found
