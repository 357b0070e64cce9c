# SPDX-License-Identifier: Apache-2.0
"""Policy ranks and engines start with the allocator and the precision that each needs; the user has the last word."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cluster.environment import engine_variables, importing, policy_variables
from mrl.config.fields import Precision
from mrl.config.schema.run import ClusterConfig, RunConfig
from mrl.env import FULL_FLOAT32
from mrl.gpus import device_variables
from tests.sources import ROOT
from tests.waiting import HANG_S

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def bare_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def run_config(*, gpus_per_node: int = 8, policy: Precision = "bfloat16", engine: Precision = "bfloat16") -> RunConfig:
    config = RunConfig(cluster=ClusterConfig(gpus_per_node=gpus_per_node))
    config.policy.precision = policy
    config.policy.generation.vllm_cfg.precision = engine
    return config


def allocators(variables: dict[str, str]) -> set[str | None]:
    return {variables.get(name) for name in NAMES}


def test_only_policy_ranks_use_expandable_segments():
    config = run_config()
    assert allocators(policy_variables(config, {})) == {"expandable_segments:True"}
    assert allocators(engine_variables(config, {})) == {"expandable_segments:False"}
    on_cpu = run_config(gpus_per_node=0)
    assert allocators(policy_variables(on_cpu, {})) == allocators(engine_variables(on_cpu, {})) == {None}


def test_hybridep_gets_the_domain_that_the_config_names():
    """The names that deep_ep's HybridEPBuffer and NeMo RL's setup.py read."""
    config, names = run_config(), ("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "USE_MNNVL")
    megatron = config.policy.megatron_cfg
    megatron.hybridep_num_ranks_per_nvlink_domain, megatron.hybridep_use_mnnvl = 32, True
    assert not set(names) & set(policy_variables(config, {}))
    megatron.moe_token_dispatcher_type, megatron.moe_flex_dispatcher_backend = "flex", "hybridep"
    assert [policy_variables(config, {})[name] for name in names] == ["32", "1"]
    megatron.hybridep_num_ranks_per_nvlink_domain = megatron.hybridep_use_mnnvl = None
    assert not set(names) & set(policy_variables(config, {}))


@pytest.mark.parametrize("name", NAMES)
def test_engines_do_not_inherit_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
):
    inherited = f"expandable_segments:True,max_split_size_mb:{100 + len(name)}"
    monkeypatch.setenv(name, inherited)
    rest = inherited.removeprefix("expandable_segments:True,")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert allocators(engine_variables(run_config(), {})) == {f"{rest},expandable_segments:False"}
    assert allocators(policy_variables(run_config(), {})) == {f"{rest},expandable_segments:True"}
    (message,) = (record.getMessage() for record in caplog.records if "engines get" in record.getMessage())
    assert inherited in message and "cannot use them" in message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["", "backend:cudaMallocAsync"])
def test_the_configs_own_settings_win_over_ours_and_the_shells(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    for other in NAMES:
        monkeypatch.setenv(other, "expandable_segments:True")
    given = {name: value, "CUDA_DEVICE_MAX_CONNECTIONS": "8", "VLLM_LOGGING_LEVEL": "INFO"}
    for variables in (policy_variables, engine_variables):
        found = variables(run_config(), given)
        assert allocators(found) == {value} and given.items() <= found.items()


def test_float32_on_gpus_is_not_tf32():
    mixed = run_config(policy="float32")
    assert FULL_FLOAT32.items() <= policy_variables(mixed, {}).items()
    assert not FULL_FLOAT32.keys() & engine_variables(mixed, {}).keys()
    assert FULL_FLOAT32.items() <= engine_variables(run_config(engine="float32"), {}).items()
    assert not FULL_FLOAT32.keys() & policy_variables(run_config(), {}).keys()
    on_cpu = run_config(gpus_per_node=0, policy="float32", engine="float32")
    assert not FULL_FLOAT32.keys() & (policy_variables(on_cpu, {}).keys() | engine_variables(on_cpu, {}).keys())
    chosen = policy_variables(mixed, {"TRITON_F32_DEFAULT": "tf32"})
    assert chosen["TRITON_F32_DEFAULT"] == "tf32" and chosen["NVIDIA_TF32_OVERRIDE"] == "0"


def test_a_start_times_no_kernel_of_mamba_unless_it_is_asked_to():
    """Follows the rules of mamba_ssm 2.3.1 and Triton 3.7.1: the one compares text, the other reads a truth value."""
    pinned = policy_variables(run_config(), {})
    # mamba_ssm.utils.determinism.autotune_configs keeps all configurations where this is "1".
    assert pinned["MAMBA_DETERMINISTIC"] == "1" and pinned["TRITON_CACHE_AUTOTUNING"] != "1"
    code = "import triton; print(triton.knobs.autotuning.cache)"
    for variables in (pinned, engine_variables(run_config(), {})):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.stdout == "True\n", done.stderr
    tuned = run_config()
    tuned.policy.megatron_cfg.tune_kernels = True
    assert "MAMBA_DETERMINISTIC" not in policy_variables(tuned, {})
    assert policy_variables(run_config(), {"MAMBA_DETERMINISTIC": "0"})["MAMBA_DETERMINISTIC"] == "0"
    assert "MAMBA_DETERMINISTIC" not in policy_variables(run_config(gpus_per_node=0), {})


def test_a_rank_takes_its_gpu_before_it_imports_what_opens_a_context():
    code = """
import sys
from unittest.mock import patch
import torch
from mrl.policy.megatron_import import import_megatron
taken = []
def take(index):
    taken.append((index, "megatron.core" in sys.modules, "transformer_engine" in sys.modules))
    raise SystemExit
with patch("torch.cuda.is_available", lambda: True), patch("torch.cuda.set_device", take):
    try:
        import_megatron(3)
    except SystemExit:
        print(taken)
"""
    shell = os.environ | device_variables(has_gpu=True)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=shell, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout == "[(3, False, False)]\n", done.stderr


def test_triton_makes_three_products_of_one_in_float32():
    def count(variables: dict[str, str]) -> list[int]:
        shell = {name: value for name, value in os.environ.items() if name not in FULL_FLOAT32}
        command = [sys.executable, "-m", "tests.unit.cluster.dot_compile"]
        done = subprocess.run(command, cwd=ROOT, env=shell | variables, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        return [int(line) for line in done.stdout.split()]

    default, ours = count({}), count(FULL_FLOAT32)
    assert len(default) == 3 and min(default) > 0
    assert ours == [3 * number for number in default]


def test_what_an_actor_imports_is_left_out_of_later_collections():
    frozen = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(kept)
    finally:
        gc.unfreeze()


def test_the_temporary_files_of_an_engine_go_with_it(tmp_path: Path):
    """Covers, besides a process ending itself, a killed one: the next engine on its node removes what that leaves."""
    script = """
import os, signal, subprocess, sys, tempfile
from mrl.cluster.environment import own_temporary_folder
kept = own_temporary_folder()
code = "import tempfile; open(f'{tempfile.gettempdir()}/vllm_dist_1', 'w')"
child = subprocess.run([sys.executable, "-c", code], check=True)
open(f"{tempfile.gettempdir()}/vllm_dist_2", "w")
print(kept.path, oct(kept.path.stat().st_mode)[-3:], *sorted(os.listdir(kept.path)), flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
"""

    def start(*words: str) -> Path:
        shell = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            env=shell,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        path, *rest = done.stdout.split()
        assert rest == ["700", "vllm_dist_1", "vllm_dist_2"] and Path(path).parent == tmp_path, done.stderr
        return Path(path)

    assert not start().exists()
    left = start("die")
    os.utime(left, (0, 0))
    start()
    assert list(tmp_path.iterdir()) == []


def test_processes_on_gpus_load_torchs_own_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    folder = tmp_path / "nvidia" / "cudnn"
    for variables in (policy_variables, engine_variables):
        found = variables(run_config(), {})
        assert (found["CUDNN_HOME"], found["LD_LIBRARY_PATH"]) == (str(folder), f"{folder}/lib:/usr/local/cuda/lib64")
        assert variables(run_config(), {"CUDNN_HOME": "/opt/cudnn"})["CUDNN_HOME"] == "/opt/cudnn"
        assert not {"CUDNN_HOME", "LD_BIND_NOW"} & variables(run_config(gpus_per_node=0), {}).keys()
        # ld.so(8): a string that is not empty binds all symbols at once.
        assert found["LD_BIND_NOW"] == ""
