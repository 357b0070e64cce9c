# SPDX-License-Identifier: Apache-2.0
"""Words of `python -m mrl.plan` that no plan can be made of."""

from __future__ import annotations

import pytest

from mrl.config.load import load_config
from mrl.config.rules.plausible import find_doubts
from mrl.ops.plan import main

LONGEST = "policy.max_total_sequence_length"


@pytest.mark.parametrize("given", ["49153", "90000"])
def test_a_mean_rollout_is_within_the_longest(capsys: pytest.CaptureFixture[str], given: str):
    assert main(["grpo_nanov3.yaml", "policy.model_name=none", f"{LONGEST}=49152", f"--mean-tokens={given}"]) == 2
    said = capsys.readouterr().out
    rule = f"a rollout with its prompt has 1 to 49152 tokens ({LONGEST}=49152)"
    assert f"--mean-tokens={given}: {rule}; give a number within, or raise that key" in said


@pytest.mark.parametrize("given", ["1", "49152"])
def test_the_longest_itself_may_be_the_mean(capsys: pytest.CaptureFixture[str], given: str):
    assert main(["grpo_nanov3.yaml", "policy.model_name=none", f"{LONGEST}=49152", f"--mean-tokens={given}"]) == 2
    said = capsys.readouterr().out
    assert "policy.model_name=none: no readable config.json" in said and "--mean-tokens" not in said


def test_rows_shorter_than_the_longest_sequence_are_neither_advised_nor_planned_in_silence(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    one_node = ["grpo_qwen3_30ba3b.yaml", folders["qwen"], "cluster.num_nodes=1", "--gpu=h100"]
    assert main([*one_node, "--search"]) == 2
    said = capsys.readouterr().out
    tokens = "policy.sequence_packing.train_mb_tokens"
    assert f"lower {LONGEST}, and {tokens} with it, as a row holds the longest sequence" in said
    assert "Nearest layouts" not in said and said.count("Layouts: ") == 1
    main([*one_node, f"{tokens}=1024"])
    said = capsys.readouterr().out
    config = load_config(one_node[0], [*one_node[1:3], f"{tokens}=1024"])
    (doubt,) = [doubt for doubt in find_doubts(config) if "exceeds a row of" in doubt]
    assert f"Warning: {doubt}" in said
