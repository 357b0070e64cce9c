# SPDX-License-Identifier: Apache-2.0
"""The static search for readers of config keys: on small modules whose readers are known."""

from __future__ import annotations

from scripts.config_readers import key_readers, product_sources

SCHEMA = {
    name: text
    for name, text in product_sources().items()
    if name.startswith(("mrl.config.schema", "mrl.config.rules.data"))
}


def readers(text: str) -> set[str]:
    """The keys that a module with this text reads."""
    return set(key_readers(SCHEMA | {"mrl.example": text}))


def test_a_read_through_annotations_assignments_and_loops_is_found():
    text = """
class Stage:
    def __init__(self, config: RunConfig) -> None:
        self.loss = config.loss_fn

    def clip(self) -> float:
        return self.loss.ratio_clip_min

def rows(data: DataConfig) -> list[str]:
    return [dataset.prompt_key for dataset in data.train_sets.values()]
"""
    assert readers(text) == {
        "loss_fn.ratio_clip_min",
        "data.train.prompt_key",
        "data.train.datasets",
        "data.default.prompt_key",
    }


def test_the_same_name_in_another_section_is_not_read():
    assert readers("def f(config: RunConfig) -> bool:\n    return config.grpo.reward_scaling.enabled") == {
        "grpo.reward_scaling.enabled"
    }


def test_who_asks_a_property_reads_what_it_reads():
    text = "def f(config: CheckpointingConfig) -> float | None:\n    return config.must_save_by_s"
    assert readers(text) == {"checkpointing.checkpoint_must_save_by"}


def test_a_key_that_is_followed_is_read_by_the_readers_of_its_follower():
    text = "def f(config: AdvantageEstimatorConfig) -> bool:\n    return config.normalize_rewards"
    assert readers(text) == {"grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards"}


def test_handing_on_a_section_checking_and_writing_read_nothing():
    assert readers("def f(config: RunConfig) -> object:\n    return g(config.grpo.async_grpo)") == set()
    assert (
        set(key_readers(SCHEMA | {"mrl.check": "def f(config: RunConfig) -> int:\n    return config.grpo.seed"}))
        == set()
    )
    assert readers("def f(config: GrpoConfig) -> None:\n    config.seed = 3") == set()
