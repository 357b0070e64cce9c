# SPDX-License-Identifier: Apache-2.0
"""The section `data` of NeMo RL's older files, which is flat."""

from __future__ import annotations

import re
from pathlib import Path

from mrl.config.load import load_run

FLAT = """
defaults: grpo_math_1B.yaml
data:
  max_input_seq_length: 512
  prompt_file: null
  system_prompt_file: null
  dataset_name: ResponseDataset
  train_data_path: a.jsonl
  val_data_path: null
  train_split: null
  val_split: null
  input_key: q
  output_key: a
  system_prompt: null
  use_preserving_dataset: false
  val_data_paths: null
  shuffle: true
"""
"""`data` as NeMo RL's files had it before it had `data.default`."""


def test_flat_data_of_older_files_is_taken_over(tmp_path: Path):
    path = tmp_path / "old.yaml"
    path.write_text(FLAT)
    config, migration = load_run(path, ["data.system_prompt_file=system.txt"])
    data = config.data
    assert (data.train.data_path, data.train.input_key, data.default.output_key) == ("a.jsonl", "q", "a")
    assert data.train.system_prompt_file == "system.txt" and data.validation is None
    said = "\n".join([*migration.renamed, *migration.sections()["without effect"]])
    for old, new in (("system_prompt_file", "default.system_prompt_file"), ("val_split", "validation")):
        assert re.search(rf"data\.{old}=\S+ \([^)]*\) -> data\.{new}$", said, re.MULTILINE), said
