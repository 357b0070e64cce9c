# SPDX-License-Identifier: Apache-2.0
"""Fused kernels are taken only where they do what they are for; the checks of GPU hosts run on the CPU too."""

from __future__ import annotations

import pytest

from scripts.gpu import policy_checks
from scripts.gpu.plan import Setup
from tests.stack.policy import fusion_ranks
from tests.stack.ranks import RankPool

CPU = Setup("cpu", 0.001)


@pytest.mark.long("parity")
def test_probes_call_the_kernels(ranks: RankPool):
    (faults,) = ranks.run(fusion_ranks.faults, world_size=1)
    assert {name for name, fault in faults.items() if fault is None} == {"apex", "rope"}
    assert "unrelated" in faults["no apex"] and "has no wgrad_gemm_accum_fp32" in faults["other apex"]
    assert "wrong sums" in faults["wrong sums"] and "packed rows" in faults["wrong rope"]
    assert all("Transformer Engine" in faults[name] for name in ("no rope", "no permute", "no adam"))


def test_a_probe_that_raises_is_a_fault_unless_it_breaks_the_gpu(ranks: RankPool):
    ((fusions, is_precision_aware, warnings, broken),) = ranks.run(fusion_ranks.raising, world_size=1)
    assert {key for key, is_on in fusions.items() if is_on} == {"bias_activation_fusion"} and not is_precision_aware
    cause = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
    for key, origin, reason in (
        ("moe_permute_fusion", "is the default", cause),
        ("apply_rope_fusion", "is the default", cause),
        ("gradient_accumulation_fusion", "this config asks for", cause),
        (
            "optimizer.use_precision_aware_optimizer",
            "is the default",
            "ModuleNotFoundError: No module named 'transformer_engine'",
        ),
    ):
        expected = (
            f"policy.megatron_cfg.{key}=true, which {origin}, has no effect on this host: its probe raised {reason}"
        )
        assert expected in warnings
    assert len(warnings) == 4
    assert broken.startswith("policy.megatron_cfg.moe_permute_fusion=true: its probe raised AcceleratorError")
    assert "broke the process's CUDA context" in broken and "set policy.megatron_cfg.moe_permute_fusion=false" in broken


def test_products_of_tf32_are_told_from_those_of_float32(ranks: RankPool):
    assert ranks.run(fusion_ranks.products, world_size=1) == [({"torch": "float32"}, {"torch": "TF32"})]


@pytest.mark.long("parity")
def test_without_a_gpu_all_fusions_are_off(ranks: RankPool):
    from_model = dict(activation_func="squared_relu", gated_linear_unit=False, num_moe_experts=8)
    ((fusions, optimizer),) = ranks.run(fusion_ranks.arguments, from_model, world_size=1)
    assert len(fusions) == 5 and not any(fusions.values())
    assert optimizer == {"use_precision_aware_optimizer": False, "store_param_remainders": False}


def test_the_checks_of_the_policy_run_on_the_cpu():
    (row,) = policy_checks.gradients(CPU)
    assert row["worst relative error of a gradient"] == 0.0 and row["layers"] == "local, plain torch"


@pytest.mark.long("parity")
def test_the_check_of_mamba_kernels_finds_wrong_ones():
    from mrl.policy.mamba_torch import mamba_split_conv1d_scan_combined

    def without_resets(*arguments, seq_idx, **settings):
        return mamba_split_conv1d_scan_combined(*arguments, seq_idx=seq_idx * 0, **settings)

    def of_tf32(*arguments, **settings):
        with fusion_ranks.Tf32():
            return mamba_split_conv1d_scan_combined(*arguments, **settings)

    rows = policy_checks.compare_scans(CPU, mamba_split_conv1d_scan_combined)
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    for wrong in (without_resets, of_tf32):
        with pytest.raises(policy_checks.Missed, match="relative errors in torch.float32"):
            policy_checks.compare_scans(CPU, wrong)
