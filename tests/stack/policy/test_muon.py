# SPDX-License-Identifier: Apache-2.0
"""Muon: steps against Newton-Schulz in numpy, layouts, and checkpoints that go on bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.cluster.daemons import obstacles_of
from mrl.config.schema.run import RunConfig
from mrl.kernels import find_muon_fault
from tests import models
from tests.stack.policy import muon_ranks, policy_ranks, save_ranks
from tests.stack.ranks import RankPool

FAULT = find_muon_fault()
needs_muon = pytest.mark.skipif(bool(FAULT), reason=FAULT)
OPTIMIZER = "policy.megatron_cfg.optimizer"
MUON = (
    f"{OPTIMIZER}.optimizer=muon",
    f"{OPTIMIZER}.use_distributed_optimizer=false",
    f"{OPTIMIZER}.use_precision_aware_optimizer=false",
    "policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=false",
    f"{OPTIMIZER}.muon_fp32_matmul_prec=highest",
    f"{OPTIMIZER}.muon_tp_mode=duplicated",
)
LR, DECAY, EPSILON, BETA_1, BETA_2 = 1e-3, 0.01, 1e-3, 0.9, 0.999
MOMENTUM, SCALE = 0.9, 0.2
# Of the five steps, as published with modded-nanogpt (Newton-Schulz, arXiv:2502.16982).
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def config_of(folder: Path, layout: str, *overrides: str) -> RunConfig:
    return policy_ranks.run_config(folder, layout, *MUON, *overrides)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """The matrix with singular values near 1, times the root of its longer side."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / np.linalg.norm(x)
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x) * max(matrix.shape) ** 0.5


def by_parts(matrix: np.ndarray, heads_of_group: int, head_dim: int) -> np.ndarray:
    """`orthogonal` of query, key and value apart, which Megatron keeps group by group."""
    groups = matrix.reshape(-1, (heads_of_group + 2) * head_dim, matrix.shape[1])
    ends = (0, heads_of_group * head_dim, (heads_of_group + 1) * head_dim, groups.shape[1])
    parts = []
    for start, end in zip(ends, ends[1:], strict=False):
        part = groups[:, start:end]
        parts.append(orthogonal(part.reshape(-1, matrix.shape[1])).reshape(part.shape))
    return np.concatenate(parts, axis=1).reshape(matrix.shape)


@needs_muon
def test_two_steps_are_those_of_newton_and_schulz_and_adams_for_the_rest(ranks: RankPool, tmp_path: Path):
    folder = models.save_model(tmp_path / "model", "qwen3_moe")
    settings = [f"{OPTIMIZER}.muon_extra_scale_factor={SCALE}", f"{OPTIMIZER}.muon_momentum={MOMENTUM}"]
    config = config_of(
        folder, "one", *settings, f"{OPTIMIZER}.muon_nesterov=true", "policy.max_grad_norm=0",
        f"{OPTIMIZER}.adam_beta1={BETA_1}", f"{OPTIMIZER}.adam_beta2={BETA_2}",
    )  # fmt: skip
    (found,) = ranks.run(muon_ranks.two_steps, config, world_size=1)
    kinds = set[str]()
    for name, (is_matrix, values, gradients) in found.items():
        x, mean, square = values[0].astype(np.float64), np.zeros(values[0].shape), np.zeros(values[0].shape)
        for step, gradient in enumerate(gradients, start=1):
            gradient = gradient.astype(np.float64)
            # Megatron decays no biases and norms.
            x = x * (1 - LR * DECAY * (x.ndim > 1))
            if is_matrix:
                mean = MOMENTUM * mean + (1 - MOMENTUM) * gradient
                ahead = (1 - MOMENTUM) * gradient + MOMENTUM * mean
                is_qkv = "linear_qkv" in name
                kinds.add("qkv" if is_qkv else "matrix")
                x = x - LR * SCALE * (by_parts(ahead, 2, 32) if is_qkv else orthogonal(ahead))
            else:
                kinds.add("adam")
                mean = BETA_1 * mean + (1 - BETA_1) * gradient
                square = BETA_2 * square + (1 - BETA_2) * gradient**2
                root = np.sqrt(square / (1 - BETA_2**step)) + EPSILON
                x = x - LR * mean / (1 - BETA_1**step) / root
            np.testing.assert_allclose(values[step], x, atol=2e-7, err_msg=f"{name}, step {step}")
        assert np.abs(values[2] - values[0]).max() > 1e-4, name
    assert kinds == {"qkv", "matrix", "adam"}


@needs_muon
@pytest.mark.parametrize("layout", ["tp2 sp dp2 ep2", "pp2 dp2 ep2"])
def test_every_layout_goes_on_from_its_checkpoint_bit_for_bit_with_the_losses_of_one_rank(
    ranks: RankPool, folder: Path, tmp_path: Path, layout: str
):
    (expected,) = ranks.run(muon_ranks.steps, config_of(folder, "one"), 4, world_size=1)
    config, world_size = config_of(folder, layout), policy_ranks.world_size(layout)
    unbroken = ranks.run(save_ranks.save_after_steps, config, tmp_path / "weights", 2, world_size=world_size)
    for name in ("train/loss", "train/grad_norm"):
        found = [step[name] for step in unbroken[0][0]]
        np.testing.assert_allclose(found, [step[name] for step in expected[0][2:]], rtol=1e-4, atol=1e-6)
    resumed = ranks.run(save_ranks.load_and_step, config, tmp_path / "weights", world_size=world_size)
    assert resumed == [(metrics, checksums) for metrics, checksums, _ in unbroken]


def test_an_installation_without_muon_is_refused_before_anything_starts(folder: Path):
    told = obstacles_of(config_of(folder, "one"))
    assert [line for line in told if "muon" in line] == (
        [f"megatron_cfg.optimizer.optimizer=muon: {FAULT}"] if FAULT else []
    )
