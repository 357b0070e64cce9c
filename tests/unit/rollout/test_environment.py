# SPDX-License-Identifier: Apache-2.0

from mrl.rollout.environment import engine_environment


def test_cpu_hosts_need_more_than_gpu_hosts() -> None:
    gpu, cpu = engine_environment(has_gpu=True), engine_environment(has_gpu=False)
    assert gpu.items() - cpu.items() == {("MRL_DEVICE", "cuda"), ("VLLM_USE_FLASHINFER_SAMPLER", "0")}
    assert cpu["OMP_NUM_THREADS"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in gpu
