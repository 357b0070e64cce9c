# SPDX-License-Identifier: Apache-2.0
"""A policy with adapters: what is trained, what engines and exports get, and that checkpoints go on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mrl.convert import main as convert
from tests.stack.policy import lora_ranks, policy_ranks, save_ranks
from tests.stack.policy.lora_ranks import LoraRun
from tests.stack.ranks import RankPool
from tests.unit.conversion.test_lora_export import applied

LAYOUT = "tp2 sp dp2 ep2"
PEFT = [
    "policy.megatron_cfg.peft.enabled=true",
    "policy.megatron_cfg.peft.dim=4",
    "policy.megatron_cfg.peft.alpha=8",
    # Adapters of it are trained and merged like others, but PEFT refuses them.
    "policy.megatron_cfg.peft.exclude_modules=[out_proj]",
    "loss_fn.reference_policy_kl_penalty=0.1",
]


@pytest.fixture(scope="module")
def run(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[LoraRun]]:
    weights_dir = tmp_path_factory.mktemp("step_2") / "weights"
    config = policy_ranks.run_config(folder, LAYOUT, *PEFT)
    return weights_dir, ranks.run(
        lora_ranks.run_lora, config, weights_dir, 2, world_size=policy_ranks.world_size(LAYOUT)
    )


def test_only_adapters_are_trained(run: tuple[Path, list[LoraRun]]):
    for rank in run[1]:
        assert rank.starts_as_base
        assert rank.changed_base == []
        assert rank.trained and all(name.startswith("adapters.") for name in rank.trained)
        assert rank.change > 1e-3


def test_reference_and_merged_logprobs(run: tuple[Path, list[LoraRun]]):
    for rank in run[1]:
        assert rank.reference_error == 0.0
        assert rank.merged_error < 1e-5


def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPool, folder: Path, run: tuple[Path, list[LoraRun]]):
    weights_dir, unbroken = run
    config = policy_ranks.run_config(folder, LAYOUT, *PEFT)
    resumed = ranks.run(save_ranks.load_and_step, config, weights_dir, world_size=policy_ranks.world_size(LAYOUT))
    assert resumed == [(rank.following, rank.checksums) for rank in unbroken]


@pytest.mark.parametrize(
    "layout",
    ["one", *(pytest.param(name, marks=pytest.mark.long("parity")) for name in ("pp2 dp2 ep2", "tp2 sp etp2"))],
)
def test_another_layout_goes_on_with_the_same_losses(
    ranks: RankPool, folder: Path, run: tuple[Path, list[LoraRun]], layout: str
):
    config = policy_ranks.run_config(folder, layout, *PEFT)
    metrics, _ = ranks.run(save_ranks.load_and_step, config, run[0], world_size=policy_ranks.world_size(layout))[0]
    expected = run[1][0].following
    for name, tolerance in (("train/loss", 5e-7), ("train/grad_norm", 5e-6)):
        np.testing.assert_allclose(
            [step[name] for step in metrics], [step[name] for step in expected], atol=tolerance, rtol=tolerance
        )


def test_exports_hold_the_adapters(folder: Path, run: tuple[Path, list[LoraRun]], tmp_path: Path):
    assert convert(["mcore-to-hf", "--mcore", str(run[0]), "--out", str(tmp_path / "merged")]) == 0
    exported = load_file(tmp_path / "merged/model.safetensors")
    base = load_file(folder / "model.safetensors")
    assert exported.keys() == base.keys()
    assert convert(["adapters", "--mcore", str(run[0]), "--out", str(tmp_path / "peft")]) == 0
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 8)
    assert settings["target_modules"] == ["down_proj", "in_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    by_peft = applied(base, tmp_path / "peft")
    for name, values in exported.items():
        np.testing.assert_allclose(values.numpy(), by_peft[name].numpy(), atol=1e-6, rtol=0, err_msg=name)
    adapted = {name for name in base if by_peft[name] is not base[name]}
    # Of experts that no token went to, nothing changes.
    assert sum(not torch.equal(exported[name], base[name]) for name in adapted) > len(adapted) // 2
    assert exported.keys() - adapted and all((exported[name] == base[name]).all() for name in exported.keys() - adapted)


@pytest.mark.long("parity")
def test_the_export_is_what_engines_get(ranks: RankPool, folder: Path, run: tuple[Path, list[LoraRun]], tmp_path: Path):
    (live,) = ranks.run(
        lora_ranks.exported_weights, policy_ranks.run_config(folder, "one", *PEFT), run[0], world_size=1
    )
    assert convert(["mcore-to-hf", "--mcore", str(run[0]), "--out", str(tmp_path / "merged")]) == 0
    exported = load_file(tmp_path / "merged/model.safetensors")
    assert exported.keys() == live.keys()
    for name, values in live.items():
        np.testing.assert_allclose(exported[name].numpy(), values, atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.long("parity")
@pytest.mark.parametrize("layout", ["tp2 sp dp2 ep2", "pp2 dp2 ep2"])
def test_the_refit_moves_merged_weights(ranks: RankPool, folder: Path, layout: str):
    config = policy_ranks.run_config(folder, layout, *PEFT)
    engine, _ = ranks.run(policy_ranks.refit_after_steps, config, world_size=policy_ranks.world_size(layout))[0]
    one = policy_ranks.run_config(folder, "one", *PEFT)
    expected, _ = ranks.run(policy_ranks.refit_after_steps, one, world_size=1)[0]
    assert engine.keys() == expected.keys()
    for name, values in engine.items():
        np.testing.assert_allclose(values, expected[name], atol=2e-6, rtol=0, err_msg=name)


@pytest.mark.long("parity")
@pytest.mark.parametrize("overrides", [["dropout=0.5"], ["dropout=0.5", "dropout_position=pre"], ["dropout=0.0"]])
def test_logprobs_are_without_dropout(ranks: RankPool, folder: Path, overrides: list[str]):
    settings = [*PEFT[:-1], *(f"policy.megatron_cfg.peft.{item}" for item in overrides)]
    (is_same, difference), *_ = ranks.run(
        lora_ranks.dropout_logprobs, policy_ranks.run_config(folder, "one", *settings), world_size=1
    )
    assert is_same
    # The train pass drops values, the logprob pass before it does not.
    assert difference < 1e-5 if overrides == ["dropout=0.0"] else difference > 1e-3


@pytest.mark.long("parity")
@pytest.mark.parametrize("layer", [0, 6])
def test_a_stage_may_have_no_adapters(ranks: RankPool, folder: Path, layer: int):
    settings = [*PEFT, f"policy.megatron_cfg.peft.target_modules=['*.layers.{layer}.*']"]
    metrics = {}
    for layout in ("one", "pp2 dp2 ep2", "tp2 sp dp2 ep2"):
        config = policy_ranks.run_config(folder, layout, *settings)
        metrics[layout] = ranks.run(
            policy_ranks.metrics_of_steps, config, 3, world_size=policy_ranks.world_size(layout)
        )[0]
    for layout, steps in metrics.items():
        for name in ("train/loss", "train/grad_norm"):
            values = [[step[name] for step in metrics_of] for metrics_of in (steps, metrics["one"])]
            np.testing.assert_allclose(*values, atol=5e-6, rtol=5e-6, err_msg=f"{layout} {name}")


@pytest.mark.long("parity")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_goes_on_bit_for_bit(ranks: RankPool, folder: Path, tmp_path: Path, dtype: str):
    bf16 = [
        "policy.precision=bfloat16",
        "policy.megatron_cfg.optimizer.bf16=true",
        f"policy.megatron_cfg.peft.lora_dtype={dtype}",
    ]
    config = policy_ranks.run_config(folder, "dp2", *PEFT, *bf16)
    unbroken = ranks.run(save_ranks.save_after_steps, config, tmp_path, 1, world_size=2)
    assert ranks.run(save_ranks.load_and_step, config, tmp_path, world_size=2) == [result[:2] for result in unbroken]


@pytest.mark.parametrize(
    "overrides", [[], pytest.param([*PEFT, "policy.megatron_cfg.peft.alpha=16"], marks=pytest.mark.long("parity"))]
)
def test_other_adapters_are_refused(
    ranks: RankPool, folder: Path, run: tuple[Path, list[LoraRun]], overrides: list[str]
):
    config = policy_ranks.run_config(folder, "one", *overrides)
    with pytest.raises(
        RuntimeError, match=r"ValueError: .* was saved with policy.megatron_cfg.peft \{'dim': 4, 'alpha': 8.0"
    ):
        ranks.run(save_ranks.load_weights_only, config, run[0], world_size=1)
