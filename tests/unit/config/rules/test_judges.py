# SPDX-License-Identifier: Apache-2.0
"""Judges that cannot be are refused by their own keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cluster.scheduling import EngineSlots, judge_slots, own_slots
from mrl.config.load import load_config
from tests.unit.config.problems import problems_of

SIZES = [
    "policy.generation.vllm_cfg.tensor_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    *(f"policy.megatron_cfg.{kind}_model_parallel_size=1" for kind in ("tensor", "expert")),
]


GIVEN = [*SIZES, "judges.fair.model_name=prepared/tiny/model", "cluster.num_nodes=5", "cluster.cpu_units_per_node=2"]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["judges.fair.num_nodes=5"], "5 nodes of judges leave the policy none of cluster.num_nodes=5"),
        (["judges.fair.tensor_parallel_size=3"], "its 1 nodes of 2 slots hold no whole engines of 3 workers"),
        (["judges.fair.enforce_eager=false"], "judges.fair.enforce_eager=false: CUDA graphs need GPUs"),
        (["judges.fair.model_nam=x"], "the nearest is judges.fair.model_name"),
        (["judges.fair.vllm_kwargs.no_such=1"], "judges.fair.vllm_kwargs.no_such=1: no argument of vLLM"),
        (["judges.fair.vllm_kwargs.seed=1"], "judges.fair.vllm_kwargs.seed=1"),
        (["judges.fair.max_model_len=99999999"], "lower judges.fair.max_model_len"),
        (["judges.fair.reasoning_parser=nope"], "judges.fair.reasoning_parser=nope: vLLM has no parser"),
        (["judges.policy_model.model_name=x"], "policy_model is no name for a judge"),
        (["judges.empty={}"], "judges.empty.model_name is required"),
        (["judges.fair.num_nodes=two"], "judges.fair.num_nodes=two: must be a whole number"),
        (["judges.fair.model_name=/nowhere"], "judges.fair.model_name=/nowhere"),
        (["algorithm=sft"], "algorithm=sft has no rollouts to judge"),
    ],
    ids=lambda value: value[0].partition("=")[0] if isinstance(value, list) else "",
)
def test_judges_that_cannot_be_are_refused(workplace: Path, overrides: list[str], part: str):
    found = problems_of(*GIVEN, *overrides)
    assert any(part in text for text in found), found


def test_judges_have_whole_nodes_of_their_own(workplace: Path):
    assert problems_of(*GIVEN) == []
    more = ["judges.fair.num_nodes=3", "judges.fair.tensor_parallel_size=2"]
    config = load_config("grpo_tiny.yaml", [*GIVEN, *more])
    assert (config.num_policy_ranks, config.num_own_slots, config.num_slots) == (4, 6, 10)
    assert own_slots(config) == {"judge:fair": range(4, 10)}
    engines = EngineSlots(0, (4, 5)), EngineSlots(1, (6, 7)), EngineSlots(2, (8, 9))
    assert judge_slots(config) == {"fair": engines}
