# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.errors import Problems, Unchecked
from mrl.config.load import load_config
from mrl.config.rules.checks import check_disk
from tests.unit.config.problems import problems_of

PEFT, FREEZE = "policy.megatron_cfg.peft", "policy.megatron_cfg.freeze_config.modules"
ENABLED = f"{PEFT}.enabled=true"

GOOD = [
    [ENABLED],
    [ENABLED, f"{PEFT}.target_modules=[linear_qkv,linear_proj,'*.layers.1.*.linear_fc1']"],
    [ENABLED, f"{PEFT}.exclude_modules=[in_proj]", f"{PEFT}.lora_A_init_method=zero", f"{PEFT}.lora_B_init_method=kaiming"],
    [ENABLED, f"{PEFT}.lora_dtype=None", f"{PEFT}.dropout=0.1", f"{PEFT}.dropout_position=pre"],
    [f"{FREEZE}=[backbone.embeddings.weight,'backbone.layers.0.*']"],
    # Of adapters that are switched off nothing is asked.
    [f"{PEFT}.target_modules=[q_proj]"],
]


@pytest.mark.parametrize("overrides", GOOD)
def test_rules_that_can_be_followed(workplace: Path, overrides: list[str]):
    assert problems_of(*overrides) == []


BAD = [
    ([ENABLED, f"{PEFT}.target_modules=[q_proj]"], f"{PEFT}.target_modules=['q_proj']: 'q_proj' names no linear layer"),
    ([ENABLED, f"{PEFT}.exclude_modules=['*.linear_fc3']"], f"{PEFT}.exclude_modules=['*.linear_fc3']: '*.linear_fc3' names no"),
    ([ENABLED, f"{PEFT}.exclude_modules=['*']"], "no layer is left to adapt"),
    (
        [ENABLED, f"{PEFT}.target_modules=[in_proj]", f"{PEFT}.exclude_modules=[out_proj]"],
        f"{PEFT}.exclude_modules=['out_proj']: it excludes layers",
    ),
    ([ENABLED, f"{PEFT}.lora_B_init_method=normal"], f"{PEFT}.lora_B_init_method=normal: with peft.lora_A_init_method=xavier"),
    ([ENABLED, f"{PEFT}.lora_A_init_method=zero"], "no gradient would ever reach the adapters"),
    ([ENABLED, f"{PEFT}.lora_dtype=bfloat16"], f"{PEFT}.lora_dtype=bfloat16: adapters cannot be coarser"),
    ([ENABLED, f"{PEFT}.dim=0"], f"{PEFT}.dim=0: out of range"),
    ([ENABLED, f"{PEFT}.dropout=1.0"], f"{PEFT}.dropout=1.0: out of range"),
    ([ENABLED, f"{PEFT}.a2a_experimental=true"], f"{PEFT}.a2a_experimental=true: what adapters exchange"),
    ([f"{FREEZE}=[decoder.layers.0.mlp]"], f"{FREEZE}=['decoder.layers.0.mlp']: 'decoder.layers.0.mlp' matches no tensor"),
    ([f"{FREEZE}=['*']"], "nothing is left to train"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD)
def test_rules_that_cannot_be_followed(workplace: Path, overrides: list[str], message: str):
    problem, *others = problems_of(*overrides)
    assert message in problem and all(isinstance(other, Unchecked) for other in others)


def test_a_checkpoint_of_adapters_needs_less_disk(workplace: Path):
    messages = []
    for overrides in ([], [ENABLED]):
        problems = Problems(config := load_config("grpo_tiny.yaml", overrides))
        check_disk(config, 10**15, problems)
        messages += problems.texts
    assert "checkpoints of 16000000.00 GB" in messages[0] and "checkpoints of 4000000.00 GB" in messages[1]
