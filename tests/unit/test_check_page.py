# SPDX-License-Identifier: Apache-2.0
"""The table of common mistakes in docs/check.md says what `--check` says."""

import json
import re
from pathlib import Path

import pytest

from mrl import check
from tests.sources import ROOT
from tests.unit.conftest import LLAMA_8B

ROWS = re.findall(
    r"^\| `([\w.]+=\S+?)`.*? \| (\w[\w ]*): `(.+)` \|$", (ROOT / "docs/check.md").read_text(), re.MULTILINE
)


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
    found = {
        "Refused": checked.refused,
        # A host without GPUs says of each config for GPUs that no run starts there.
        "Warning": [doubt for doubt in checked.doubts if "a start on this host would refuse it" not in doubt],
        "To be provided": [*checked.provided, *checked.unchecked],
    }
    lines = [
        line
        for line in map(str, found[kind])
        if "checkpointing.checkpoint_dir" not in line and "policy.tokenizer" not in line
    ]
    assert len(lines) == 1 and re.match(".*".join(map(re.escape, quoted.split("…"))), lines[0]), lines
    assert all(not found[other] for other in found.keys() - {kind, "To be provided"}), found
