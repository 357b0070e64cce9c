# SPDX-License-Identifier: Apache-2.0
"""Words of `python -m mrl.plan` that no plan can be made of."""

from __future__ import annotations

import pytest

from mrl.ops.plan import main

LONGEST = "policy.max_total_sequence_length"


@pytest.mark.parametrize("given", ["49153", "90000", "0", "-3", "nan", "inf"])
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
