# SPDX-License-Identifier: Apache-2.0
"""MTP layers learn: losses, gradients and acceptance of a plain loop over transformers' layers on one rank and many."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from mrl.config.schema.run import RunConfig
from tests import models
from tests.stack.policy import mtp_ranks, policy_ranks, save_ranks
from tests.stack.policy.mtp_ranks import MtpCase
from tests.stack.policy.mtp_reference import Reference
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool

_DDP = "policy.megatron_cfg.distributed_data_parallel_config"
RECOMPUTED = ("policy.megatron_cfg.activation_checkpointing=true",)
UNSHARDED = (
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=false",
    f"{_DDP}.overlap_param_gather=false",
    f"{_DDP}.overlap_grad_reduce=false",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model with MTP layers for one token (of True, which repeats them), and one with layers for two."""
    return {
        is_one: models.save_nemotron_h(tmp_path_factory.mktemp("model"), num_nextn_predict_layers=1 if is_one else 2)
        for is_one in (True, False)
    }


@pytest.mark.parametrize("case", [MtpCase(2), MtpCase(3, True, True)], ids=str)
def test_losses_and_gradients_are_those_of_a_loop_over_transformers(
    ranks: RankPool, folders: dict[bool, Path], tmp_path: Path, case: MtpCase
):
    folder = folders[case.repeats]
    config = mtp_ranks.run_config(folder, "one", case)
    assert_as_reference(ranks.run(mtp_ranks.gradients, config, world_size=1), Reference(folder, tmp_path), case)


def assert_as_reference(results: list, reference: Reference, case: MtpCase, *, balance: float = 0.0) -> None:
    ((metrics, found),) = results
    wanted = reference.learn(case, balance=balance)
    assert metrics.keys() >= wanted.keys() and len(wanted) == 1 + 2 * case.num_steps + (balance > 0)
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    gradients = reference.gradients()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = np.linalg.norm(found[name] - gradient.numpy()) / max(float(gradient.norm()), 1e-6)
        assert error <= 1e-4, (name, error)


@pytest.mark.parametrize("case", [MtpCase(2), MtpCase(3, True, True)], ids=str)
def test_the_balancing_loss_of_a_layer_is_the_mean_over_its_passes(
    ranks: RankPool, folders: dict[bool, Path], tmp_path: Path, case: MtpCase
):
    folder, balance = folders[case.repeats], 5.0
    settings = dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=balance)
    config = mtp_ranks.run_config(
        folder, "one", case, *(f"policy.megatron_cfg.{key}={value}" for key, value in settings.items())
    )
    assert_as_reference(
        ranks.run(mtp_ranks.gradients, config, world_size=1), Reference(folder, tmp_path), case, balance=balance
    )


LAYOUTS = [
    (MtpCase(2), {"tp2 sp cp2 ep2": (), "pp2 dp2 ep2": RECOMPUTED}),
    (
        MtpCase(3, repeats=True, detaches=True),
        {"tp2 sp dp2 ep2": RECOMPUTED, "pp2 dp2 ep2": UNSHARDED, "cp2 dp2 ep2": ()},
    ),
    pytest.param(MtpCase(2), {"tp2 sp dp2 ep2": (), "tp2 sp pp2 cp2 ep4": ()}, marks=pytest.mark.long("parity")),
]


@pytest.mark.parametrize(("case", "layouts"), LAYOUTS, ids=str)
def test_steps_of_many_ranks_are_those_of_one(
    ranks: RankPool, folders: dict[bool, Path], case: MtpCase, layouts: dict[str, tuple[str, ...]]
):
    folder = folders[case.repeats]
    ((alone, _),) = ranks.run(mtp_ranks.steps, mtp_ranks.run_config(folder, "one", case), 2, world_size=1)
    assert alone[1]["train/mtp_1_loss"] < alone[0]["train/mtp_1_loss"]
    assert ("train/mtp_grad_norm" in alone[0]) == case.detaches
    for layout, overrides in layouts.items():
        config = mtp_ranks.run_config(folder, layout, case, *overrides)
        results = ranks.run(mtp_ranks.steps, config, 2, world_size=policy_ranks.world_size(layout))
        for metrics, _ in results:
            assert metrics == results[0][0]
        for found, wanted in zip(results[0][0], alone, strict=True):
            compared = [
                name for name in wanted if name.startswith("train/mtp_") or name in ("train/loss", "train/grad_norm")
            ]
            assert len(compared) == 2 * case.num_steps + 2 + case.detaches
            for name in compared:
                assert found[name] == pytest.approx(wanted[name], rel=3e-5, abs=1e-6), (layout, overrides, name)


def test_detached_layers_leave_the_policy_as_it_would_be_without_them(ranks: RankPool, folders: dict[bool, Path]):
    """Both norms are far above what is clipped at."""
    overrides = ("policy.max_grad_norm=0.01", "policy.logprob_chunk_size=64")
    plain, learning = (
        mtp_ranks.run_config(folders[True], "one", MtpCase(steps, True, True), *overrides) for steps in (0, 3)
    )
    (wanted, before), (found, after) = (
        ranks.run(mtp_ranks.steps, config, 2, world_size=1)[0] for config in (plain, learning)
    )
    ((_, start),) = ranks.run(mtp_ranks.steps, plain, 0, world_size=1)
    for step, of_plain in zip(found, wanted, strict=True):
        assert min(step["train/grad_norm"], step["train/mtp_grad_norm"]) > 0.05
        # Experts of MTP layers count in the means over layers.
        assert {name: step[name] for name in of_plain if "/moe/" not in name} == {
            n: v for n, v in of_plain.items() if "/moe/" not in n
        }
    assert before.keys() == after.keys() == start.keys()
    # Left alone, they are as they were.
    assert {name for name in start if start[name] == before[name]} >= {name for name in start if "mtp." in name}
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all("mtp." in name for name in changed)
    assert {name for name in before if "mtp." in name} - changed == {
        name for name in before if "mtp." in name and "expert_bias" in name
    }


@pytest.mark.parametrize(
    ("layout", "overrides"), [("one", UNSHARDED), ("tp2 sp dp2 ep2", UNSHARDED), ("pp2 dp2 ep2", ())], ids=str
)
def test_gradients_of_detached_layers_have_a_norm_of_their_own(
    ranks: RankPool, folders: dict[bool, Path], tmp_path: Path, layout: str, overrides: tuple[str, ...]
):
    limit, folder = 0.01, folders[True]
    case = MtpCase(2, repeats=True, detaches=True)
    config = mtp_ranks.run_config(folder, layout, case, f"policy.max_grad_norm={limit}", *overrides)
    results = ranks.run(mtp_ranks.clipped, config, world_size=policy_ranks.world_size(layout))
    reference = Reference(folder, tmp_path)
    reference.learn(case)
    squares = {True: 0.0, False: 0.0}
    for name, gradient in reference.gradients().items():
        squares[name.startswith("mtp.")] += float(gradient.double().square().sum())
    for rest, own, ready in results:
        assert (rest, own) == pytest.approx((squares[False] ** 0.5, squares[True] ** 0.5), rel=1e-4)
        # Megatron's step still scales by what clips the others.
        assert ready * limit / rest == pytest.approx(limit, rel=1e-4)


def test_a_gradient_that_is_not_finite_leaves_the_others_as_they_are(ranks: RankPool, folders: dict[bool, Path]):
    config = mtp_ranks.run_config(
        folders[True], "one", MtpCase(2, repeats=True, detaches=True), "policy.max_grad_norm=0.01"
    )
    ((rest, own, again),) = ranks.run(mtp_ranks.clipped, config, math.inf, world_size=1)
    # For the train step to tell, which changes no parameter then.
    assert rest == math.inf and 0 < own < math.inf and again == own


JOINS = "policy.megatron_cfg.freeze_config.modules=[mtp.*.enorm.weight,mtp.*.hnorm.weight,mtp.*.eh_proj.weight]"


def test_layers_that_are_computed_again_learn_behind_frozen_joins(ranks: RankPool, folders: dict[bool, Path]):
    case, found = MtpCase(2, repeats=True, detaches=True), {}
    for overrides in ((), (*RECOMPUTED, JOINS)):
        config = mtp_ranks.run_config(folders[True], "one", case, *overrides)
        ((_, found[overrides]),) = ranks.run(mtp_ranks.gradients, config, world_size=1)
    whole, frozen = found.values()
    assert {name for name in whole if name not in frozen} == {
        f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")
    }
    for name, gradient in frozen.items():
        np.testing.assert_allclose(gradient, whole[name], atol=1e-6, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "detaches", [pytest.param(False, marks=pytest.mark.long("parity")), True], ids=["joined", "detached"]
)
def test_bfloat16_learns_the_same(ranks: RankPool, folders: dict[bool, Path], detaches: bool):
    case, steps = MtpCase(2, repeats=True, detaches=detaches), []
    for overrides in ((), BF16, (*BF16, *RECOMPUTED, f"{_DDP}.grad_reduce_in_fp32=false")):
        config = mtp_ranks.run_config(folders[True], "pp2 dp2 ep2", case, *overrides)
        steps.append(ranks.run(mtp_ranks.steps, config, 2, world_size=4)[0][0])
    wanted, *others = steps
    for found in others:
        for step, of_float32 in zip(found, wanted, strict=True):
            for name in ("loss", "mtp_1_loss", "mtp_2_loss"):
                assert step[f"train/{name}"] == pytest.approx(of_float32[f"train/{name}"], rel=0.02), name
            norm = "train/mtp_grad_norm" if detaches else "train/grad_norm"
            assert step[norm] == pytest.approx(of_float32[norm], rel=0.1)


def test_a_checkpoint_goes_on_at_any_layout(ranks: RankPool, folders: dict[bool, Path], tmp_path: Path):
    case, saved = MtpCase(2, repeats=True, detaches=True), "tp2 sp dp2 ep2"

    def config(layout: str, case: MtpCase = case) -> RunConfig:
        found = mtp_ranks.run_config(folders[True], layout, case)
        found.algorithm = "grpo"
        return found

    unbroken = ranks.run(save_ranks.save_after_steps, config(saved), tmp_path, 1, world_size=4)
    wanted, _, _ = unbroken[0]
    for layout in (saved, "pp2 dp2 ep2"):
        resumed = ranks.run(save_ranks.load_and_step, config(layout), tmp_path, world_size=4)
        assert layout != saved or resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]
        for found, step in zip(resumed[0][0], wanted, strict=True):
            for name in ("loss", "grad_norm", "mtp_1_loss", "mtp_2_loss", "mtp_grad_norm"):
                assert found[f"train/{name}"] == pytest.approx(step[f"train/{name}"], rel=1e-5, abs=1e-6), (
                    layout,
                    name,
                )
    # They may be left alone from here on.
    left, _ = ranks.run(save_ranks.load_and_step, config(saved, MtpCase(0)), tmp_path, world_size=4)[0]
    assert (
        left[0]["train/loss"] == pytest.approx(wanted[0]["train/loss"], abs=1e-6) and "train/mtp_1_loss" not in left[0]
    )


def test_a_checkpoint_without_their_moments_is_refused(ranks: RankPool, folders: dict[bool, Path], tmp_path: Path):
    left, learning = (mtp_ranks.run_config(folders[True], "dp2", MtpCase(steps, repeats=True)) for steps in (0, 2))
    ranks.run(save_ranks.save_after_steps, left, tmp_path, 1, world_size=2)
    form = json.loads((tmp_path / "iter_0000000/run_config.yaml").read_text())["optimizer"]
    assert form["frozen"] == left.frozen_settings() and form["frozen"]["mtp_num_layers"] == 0
    said = (
        r"iter_0000000 has no optimizer state of mtp\.layers\.0\.\S+ \(tensors without: \d+\), which was not "
        r"trained when this was saved"
    )
    with pytest.raises(RuntimeError, match=said):
        ranks.run(save_ranks.load_and_step, learning, tmp_path, world_size=2)
