# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import asdict

import pytest

from mrl.config.schema.keys import KEYS
from mrl.config.schema.run import RunConfig
from mrl.store.advisories import RULES, SWITCHES, WINDOW, Advisor, _rise, advisories, facts_of, silence
from mrl.store.run_files import Row, setting
from tests.unit.ops.view.runs import row

FACTS = {"num_prompts": 4.0, "max_lag": 2.0}


def keys(rows: list[Row]) -> list[str]:
    return [advisory.key for advisory in advisories(rows, FACTS)]


def steps(count: int, **metrics: float | None) -> list[Row]:
    return [row(step, **metrics) for step in range(1, count + 1)]


def test_a_healthy_run_gets_no_advice():
    assert keys(steps(60)) == [] and keys([]) == [] and keys([{"step": 0, "val/accuracy": 0.3}]) == []


def gamed(new: dict[str, float], old: dict[str, float], *, count: int = 100) -> list[Row]:
    """A reward that rises from 0.11 to 1.1, other metrics in two halves, and a validation every tenth step."""
    rows = [row(step, **(old if step <= count // 2 else new)) for step in range(1, count + 1)]
    return [
        {name: value for name, value in each.items() if name != "val/accuracy" or i % 10 == 9}
        for i, each in enumerate(rows)
    ]


# Per rule: the rows at which it holds, and what is the most that does not make it hold.
CASES: dict[str, tuple[list[Row], list[Row]]] = {
    "not_finite": (steps(1, train__loss=None), steps(1, train__loss=9e9)),
    "engines_die": ([row(i, rollout__engine_restarts=i) for i in range(1, 5)],
                    [row(i, rollout__engine_restarts=7) for i in range(1, 9)]),
    "no_signal": (steps(3, rollout__groups_without_signal=4),
                  [*steps(2, rollout__groups_without_signal=4), row(3, rollout__groups_without_signal=3)]),
    "writes_lost": (steps(1, logger__lost=1), steps(1, logger__lost=0)),
    "kl": (steps(1, train__kl_penalty=0.51), steps(1, train__kl_penalty=0.5)),
    "grad_norm": (steps(3, train__grad_norm=10.1), [*steps(2), row(3, train__grad_norm=20.0)]),
    "reward_flat": (
        [row(i, train__reward=0.3 + 0.1 * (i % 2)) for i in range(1, 21)],
        [row(i, train__reward=0.3 + 0.1 * (i % 2)) for i in range(1, 20)]),
    "generation_rises": ([row(i, time__generation=1.0 if i < 11 else 1.4) for i in range(1, 21)],
                         [row(i, time__generation=1.0 if i < 11 else 1.2) for i in range(1, 21)]),
    "hacked_held_out": (gamed(dict(val__accuracy=0.3), dict(val__accuracy=0.4)),
                        gamed(dict(val__accuracy=0.4), dict(val__accuracy=0.3))),
    "hacked_length": (gamed(dict(rollout__mean_length=160), dict(rollout__mean_length=100)),
                      gamed(dict(rollout__mean_length=140), dict(rollout__mean_length=100))),
    "hacked_truncated": (gamed(dict(rollout__truncated_fraction=0.19), dict(rollout__truncated_fraction=0.05)),
                         gamed(dict(rollout__truncated_fraction=0.14), dict(rollout__truncated_fraction=0.05))),
    "hacked_repetition": (gamed(dict(rollout__repetitive_fraction=0.2), dict(rollout__repetitive_fraction=0)),
                          gamed(dict(rollout__repetitive_fraction=0.09), dict(rollout__repetitive_fraction=0))),
    "hacked_language": (gamed(dict(rollout__non_ascii_fraction=0.2), dict(rollout__non_ascii_fraction=0.05)),
                        gamed(dict(rollout__non_ascii_fraction=0.1), dict(rollout__non_ascii_fraction=0.05))),
    "dlogp": (steps(3, train__mean_abs_dlogp=0.06), steps(3, train__mean_abs_dlogp=0.04)),
    "truncated": (steps(3, rollout__truncated_fraction=0.3), steps(3, rollout__truncated_fraction=0.19)),
    "dropped": (steps(1, rollout__sums__dropped_tools=1),
                steps(1, rollout__sums__dropped_tools=0, rollout__dropped_agent_groups=8)),
    "overridden": (steps(1, rollout__sums__overridden_top_p=0.5), steps(1, rollout__sums__overridden_top_p=0)),
    "masked": ([row(1, rollout__math__num_rollouts=8, rollout__code__num_rollouts=10, rollout__code__failed=2)],
               [row(1, rollout__math__num_rollouts=8, rollout__math__failed=0, rollout__code__num_rollouts=10,
                    rollout__code__failed=1)]),
    "router": (steps(3, train__moe__unused_experts_worst=0.6), steps(3, train__moe__unused_experts_worst=0.4)),
    "idle": (steps(5, rollout__engine_idle_fraction=0.6), steps(4, rollout__engine_idle_fraction=0.6)),
    "reward_waits": ([row(i, **({"time__reward": 5.0} if i == 3 else {})) for i in range(1, 6)],
                     [row(i, **({"time__reward": 2.0} if i == 3 else {})) for i in range(1, 6)]),
    "lag": (steps(5, train__max_trajectory_age=2), steps(5, train__max_trajectory_age=1)),
    "refit_share": (steps(5, time__refit=0.5), steps(5, time__refit=0.3)),
    "packing": (steps(5, train__packing_efficiency=0.4), steps(5, train__packing_efficiency=0.6)),
    "checkpoint_waits": ([row(i, **({"time__checkpoint": 3.0} if i % 10 == 0 else {})) for i in range(1, 21)],
                         [row(i, **({"time__checkpoint": 1.0} if i % 10 == 0 else {})) for i in range(1, 21)]),
}  # fmt: skip


@pytest.mark.parametrize("key", [rule.key for rule in RULES])
def test_a_rule_holds_beyond_its_limit_and_not_before(key: str):
    held, quiet = CASES[key]
    assert keys(held) == [key]
    assert keys(quiet) == []


def test_hacking_needs_a_rising_reward_without_a_rising_held_out_one():
    """Longer replies are no fault by themselves: of reasoning they are the point."""
    longer, shorter = dict(rollout__mean_length=200.0), dict(rollout__mean_length=100.0)
    assert keys(gamed(longer, shorter)) == keys(gamed(shorter, longer)) == ["hacked_length"]
    assert keys(gamed(longer | dict(val__accuracy=0.5), shorter | dict(val__accuracy=0.3))) == []
    assert keys(gamed(longer | dict(val__accuracy=0.3), shorter | dict(val__accuracy=0.3))) == ["hacked_length"]
    assert keys(gamed(longer, shorter, count=38)) == []
    falling: list[Row] = [{**each, "train/reward": 1 - 0.001 * i} for i, each in enumerate(gamed(longer, shorter))]
    assert keys(falling) == []


@pytest.mark.parametrize("name", ["rollout__truncated_fraction", "rollout__repetitive_fraction"])
def test_a_policy_that_learns_to_end_is_not_accused(name: str):
    assert keys(gamed({name: 0.02}, {name: 0.19})) == []


def test_hacking_waits_for_validations_if_there_are_any():
    rows = gamed(dict(rollout__mean_length=200.0), dict(rollout__mean_length=100.0))
    few: list[Row] = [{**each, **({"val/accuracy": 0.3} if i % 25 == 24 else {})} for i, each in enumerate(rows)]
    assert keys(rows) == ["hacked_length"] and keys(few) == []


def test_a_rise_is_counted_in_standard_errors():
    # Means 2 and 8, and variance 1 in both halves of three.
    rows = [{"train/reward": value} for value in (1.0, 2.0, 3.0, 7.0, 8.0, 9.0)]
    assert _rise(rows, "train/reward", 3) == pytest.approx(6 / (2 / 3) ** 0.5)
    assert _rise(rows, "train/reward", 4) is None


def test_errors_of_agents_are_looked_for_where_agents_log():
    """The names of both files are those that `tests/stack/loop` finds errors in."""
    (advisory,) = advisories([row(1, rollout__busy__num_rollouts=8, rollout__busy__failed=4)], FACTS)
    assert "logs/exp_*/actors/rewards*.log, of agents gateway*.log" in advisory.line()


def test_liveness_comes_before_hints():
    rows = steps(3, train__kl_penalty=9.0, train__loss=None, rollout__truncated_fraction=1.0)
    assert [advisory.level for advisory in advisories(rows, FACTS)] == ["stop", "look", "look"]


def test_an_advisory_says_what_was_seen_why_and_which_key():
    (advisory,) = advisories(steps(7, train__kl_penalty=0.62), FACTS)
    assert advisory.line() == (
        "[Look] step 7: kl = 0.62 (above 0.5). Likely: the policy runs away from the reference. "
        "Try: loss_fn.reference_policy_kl_penalty up; policy.megatron_cfg.optimizer.lr down"
    )


def test_nobody_is_told_to_switch_on_what_is_on():
    rows = steps(5, train__packing_efficiency=0.4)
    tried = [
        advisories(rows, facts_of({"policy": {"sequence_packing": {"enabled": is_on}}}))[0].turn
        for is_on in (False, True)
    ]
    more = "policy.sequence_packing.train_mb_tokens down"
    assert tried == [f"policy.sequence_packing.enabled=true; {more}", more]


def test_every_switch_is_one_of_the_config():
    values = asdict(RunConfig())
    assert {switch: type(setting(values, switch.removesuffix("=true"))) for switch in SWITCHES} == dict.fromkeys(
        SWITCHES, bool
    )


def test_the_console_hears_of_a_rule_once():
    advisor = Advisor(FACTS)
    heard = [
        [advisory.key for advisory in advisor.new(row(step, train__kl_penalty=0.1 * step))]
        for step in range(1, 3 * WINDOW)
    ]
    assert [index + 1 for index, found in enumerate(heard) if found] == [6] and heard[5] == ["kl"]


def test_what_a_warning_has_said_is_for_the_page_alone():
    altered = row(1, rollout__sums__dropped_tools=1.0, rollout__sums__overridden_temperature=2.0)
    altered = {name.replace("__", "/"): value for name, value in altered.items()}
    assert [advisory.key for advisory in advisories([altered], FACTS)] == ["dropped", "overridden"]
    assert Advisor(FACTS).new(altered) == []


def test_a_running_run_that_writes_nothing_hangs():
    assert silence(steps(3), silent_s=299) is None
    found = silence(steps(3, time__total=60.0), silent_s=601)
    assert found is not None and found.level == "stop" and silence(steps(3, time__total=60.0), silent_s=599) is None


def test_every_key_to_turn_is_a_key_of_the_config():
    sections = r"(?:policy|grpo|loss_fn|checkpointing|logger)"
    named = {name for rule in RULES for name in re.findall(rf"\b{sections}(?:\.\w+)+", rule.turn)}
    sections_of = {key.rpartition(".")[0] for key in KEYS}
    assert len(named) > 10 and named - KEYS.keys() - sections_of == set()


def test_older_weights_of_rollouts_that_went_on_are_no_fault():
    rows = [row(step) | {"train/mean_abs_dlogp": 0.07, "train/max_trajectory_age": 1.0} for step in range(1, 6)]
    told = [{one.key for one in advisories(rows, facts_of({"grpo": {"oversample": factor}}))} for factor in (1.0, 1.5)]
    assert "dlogp" in told[0] and not {"dlogp", "lag"} & told[1]
