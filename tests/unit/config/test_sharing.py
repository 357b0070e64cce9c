# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import describe_choice, describe_sharing, sharing_of
from tests.models import save_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("qwen3_moe", "deepseek_v3")}
    for name, folder in made.items():
        save_model(folder, name)
    return made


def run(folder: Path, *overrides: str) -> RunConfig:
    named = [f"policy.model_name={folder}", "grpo.num_generations_per_prompt=4", "cluster.cpu_units_per_node=4"]
    return load_config("grpo_tiny.yaml", [*named, *overrides])


def test_auto_lets_batches_decide(folders: dict[str, Path]):
    config = run(folders["qwen3_moe"])
    assert (config.policy.share_prefixes, sharing_of(config)) == ("auto", "auto")
    assert describe_sharing(config).endswith("a prompt where that saves a batch 20% of its tokens or more")
    assert "shares prefixes" in describe_choice(config, shares=True)
    assert "too few tokens" in describe_choice(config, shares=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.megatron_cfg.context_parallel_size=2", "context_parallel_size=2"),
        ("policy.sequence_packing.enabled=false", "sequence_packing.enabled=false"),
        ("cluster.gpus_per_node=1", "no run on GPUs"),
        ("++policy.megatron_cfg.peft={enabled: true, dropout: 0.1}", "peft.dropout=0.1"),
        (
            "++policy.megatron_cfg={moe_router_load_balancing_type: aux_loss, moe_aux_loss_coeff: 0.1}",
            "depends on the rows",
        ),
    ],
)
def test_auto_is_off_with_its_reason(folders: dict[str, Path], override: str, words: str):
    config = run(folders["qwen3_moe"], override)
    assert sharing_of(config) is False
    assert describe_sharing(config).startswith("trained with each rollout: ")
    assert words in describe_sharing(config)
    assert describe_choice(config, shares=False) == ""


def test_auto_is_off_for_latent_attention(folders: dict[str, Path]):
    config = run(folders["deepseek_v3"])
    assert sharing_of(config) is False
    assert "latent attention" in describe_sharing(config)


def test_what_is_given_holds(folders: dict[str, Path]):
    for given in (True, False):
        config = run(folders["qwen3_moe"], f"policy.share_prefixes={str(given).lower()}")
        assert sharing_of(config) is given
        said = "once for all rollouts of a prompt" if given else "with each rollout"
        assert describe_sharing(config) == f"trained {said}"
        assert describe_choice(config, shares=given) == ""
