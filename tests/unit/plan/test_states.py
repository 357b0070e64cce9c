# SPDX-License-Identifier: Apache-2.0
from mrl.config.load import load_config
from mrl.plan.facts import state_rules
from mrl.plan.states import Elements, StateRules, state_bytes


def test_muon_has_one_moment_of_layers_and_adam_two_of_what_lies_around_them():
    """Main parameters of 140 elements, a momentum of 110, and two moments of 30, 4 bytes each."""
    states = state_bytes(Elements(dense=100, experts=40, ends=30), StateRules(1, 1, moment_bytes=4))
    assert states.optimizer == 4 * (140 + 110 + 2 * 30)
    run = load_config("grpo_tiny.yaml", ["policy.megatron_cfg.optimizer.optimizer=muon"])
    assert state_rules(run).moment_bytes == 4
