# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

from mrl.rollout.environment import engine_environment
from tests.waiting import HANG_S


def test_cpu_hosts_need_more_than_gpu_hosts() -> None:
    gpu, cpu = engine_environment(has_gpu=True), engine_environment(has_gpu=False)
    assert gpu.items() - cpu.items() == {("MRL_DEVICE", "cuda"), ("VLLM_USE_FLASHINFER_SAMPLER", "0")}
    assert cpu["OMP_NUM_THREADS"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in gpu


def test_the_driver_does_not_import_vllm() -> None:
    code = "import sys, mrl.rollout.environment, mrl.refit.inputs; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False).returncode == 0
