# SPDX-License-Identifier: Apache-2.0
"""One place decides what runs on GPUs: what a host has, what an installation is for, and nobody else who asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl import env, gpus, kernels
from mrl.config.errors import ConfigError
from mrl.config.load import has_automatic_gpus, load_config
from mrl.config.rules.checks import find_problems
from mrl.config.schema.run import RunConfig
from mrl.gpus import Builds, device_variables, find_misfit, find_shortage, host_gpus, on_gpu
from mrl.loop.preflight import check_environment
from mrl.ops.doctor.gpus import read_gpus
from mrl.ops.launch import parse_arguments, train_command
from tests.sources import ROOT, python_files

# Questions whose answer depends on the host's GPUs or on the libraries' builds.
ASKED = re.compile(
    r"cuda\.is_available|cuda\.device_count|version\.cuda\b|nvidia-smi|pynvml\.|/dev/nvidia|current_platform\.|accelerator\."
)
MAY_ASK = {
    "mrl/gpus.py": "decides",
    "mrl/ops/doctor/gpus.py": "reports what the driver and torch say",
    "mrl/ops/doctor/host.py": "names nvidia-smi in a remedy",
    "mrl/cluster/hosts.py": "measures utilisation",
    "mrl/numa.py": "reads which NUMA node a GPU is next to",
    "mrl/plan/hardware.py": "reads which GPU it is that a plan is for",
    "mrl/refit/memory.py": "finds the device of another process's memory on a GPU",
    "mrl/policy/cpu.py": "replaces these functions on CPUs",
    "mrl/rollout/engine.py": "compares vLLM's platform with the config's device, and then follows it",
    "mrl/rollout/engine_arguments.py": "follows vLLM's platform behind that comparison",
    "mrl/rollout/group_worker.py": "follows vLLM's platform behind that comparison",
    "mrl/rollout/worker.py": "follows vLLM's platform behind that comparison",
    "mrl/rollout/cpu.py": "refuses any other platform than CPUs",
}
SMI = "#!/bin/bash\n{0}\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this a host whose nvidia-smi is the given script; None: a host without one."""
    for variable in (env.MRL_CPU, env.CUDA_VISIBLE_DEVICES, env.MRL_DEVICE):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(gpus, "SMI_TIMEOUT_S", 30.0)

    def become(script: str | None) -> None:
        host_gpus.cache_clear()
        (tmp_path / "nvidia-smi").unlink(missing_ok=True)
        if script is not None:
            (tmp_path / "nvidia-smi").write_text(script)
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    yield become
    host_gpus.cache_clear()


def smi(num_gpus: int, *, mig: int = 0) -> str:
    lines = [f"echo 'GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index})'" for index in range(num_gpus)]
    return SMI.format(
        "\n".join([*lines, *[f"echo '  MIG 1g.10gb  Device {index}: (UUID: MIG-{index})'" for index in range(mig)]])
    )


def test_no_other_file_of_the_product_asks_for_gpus():
    asking = {
        str(path.relative_to(ROOT)) for path in python_files(("mrl", "conversion")) if ASKED.search(path.read_text())
    }
    assert asking == set(MAY_ASK)


@pytest.mark.parametrize(
    ("script", "visible", "expected"),
    [
        (None, None, 0),
        (smi(0), None, 0),
        ("", None, 0),
        (SMI.format("echo 'NVIDIA-SMI has failed'; exit 9"), None, 0),
        (smi(1), None, 1),
        (smi(8), None, 8),
        (smi(1, mig=7), None, 1),
        (smi(8), "2,3", 2),
        (smi(8), "", 0),
        (smi(8), "-1", 0),
        (smi(8), "1,9,2", 1),
        (smi(8), "GPU-1, GPU-2", 2),
        (smi(1, mig=7), "MIG-0,MIG-1", 2),
        (smi(1), "0,1", 1),
    ],
)
def test_auto_is_the_gpus_that_a_run_may_use(
    script: str | None, visible: str | None, expected: int, host, monkeypatch: pytest.MonkeyPatch
):
    host(script)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config("grpo_tiny.yaml")
    assert config.cluster.gpus_per_node == expected and has_automatic_gpus(config)
    monkeypatch.setenv("MRL_CPU", "1")
    host_gpus.cache_clear()
    assert load_config("grpo_tiny.yaml").cluster.gpus_per_node == 0
    given = load_config("grpo_tiny.yaml", ["cluster.gpus_per_node=2"])
    assert given.cluster.gpus_per_node == 2 and not has_automatic_gpus(given)


def test_a_driver_that_hangs_is_named(host, monkeypatch: pytest.MonkeyPatch):
    host(SMI.format("sleep 1000"))
    monkeypatch.setattr(gpus, "SMI_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match=r"cluster.gpus_per_node=auto .*nvidia-smi gives no answer.*MRL_CPU=1"):
        load_config("grpo_tiny.yaml")
    found = read_gpus()  # the doctor's, also where there is no device file
    assert found is not None and found.driver is None and "nvidia-smi gives no answer" in found.driver_error


TINY = ("grpo_tiny", "grpo_tiny_dense", "sft_tiny", "dpo_tiny", "rm_tiny", "ppo_tiny", "distillation_tiny", "mopd_tiny")


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("name", TINY)
def test_the_tiny_configs_fit_hosts_with_and_without_gpus(name: str, num_gpus: int, host):
    host(smi(num_gpus))
    config = load_config(f"{name}.yaml")
    # Where a model is not here, rules that need its sizes are not applied; those of slots and batches need none.
    assert [problem for problem in find_problems(config) if problem.kind == "refused"] == []
    assert (
        config.policy.precision
        == config.policy.generation.vllm_cfg.precision
        == ("bfloat16" if num_gpus else "float32")
    )
    assert config.num_policy_ranks == (num_gpus or config.cluster.cpu_units_per_node)
    assert config.policy.megatron_cfg.tensor_model_parallel_size == (1 if num_gpus == 1 else 2)
    assert config.policy.generation.colocated.enabled


def test_jobs_get_the_number_that_their_launcher_has_found(host):
    host(smi(4))
    options = parse_arguments(["slurm", "grpo_tiny.yaml", "grpo.seed=1"])
    assert train_command(load_config("grpo_tiny.yaml"), options)[-2:] == ["grpo.seed=1", "cluster.gpus_per_node=4"]
    assert train_command(load_config("grpo_math_1B.yaml"), options)[-1] == "grpo.seed=1"


CPU, CUDA = Builds("cpu", "cpu"), Builds("13.0", "cuda")


@pytest.mark.parametrize(
    ("gpus_per_node", "builds", "has_engines", "said"),
    [
        (0, CPU, True, None),
        (8, CUDA, True, None),
        (0, CUDA, True, r"a run on CPUs, .* torch and vllm for CUDA; type `MRL_CPU=1 bash scripts/setup.sh`"),
        (1, CPU, True, r"=1, .* torch and vllm for CPUs; type `bash scripts/setup.sh`.*cluster.gpus_per_node=0"),
        (0, Builds("cpu", "cuda"), True, r"has vllm for CUDA"),
        (0, Builds("13.0", "cpu"), True, r"has torch for CUDA"),
        (1, Builds("13.0", "cpu"), True, r"has vllm for CPUs"),
        (1, Builds("13.0", "cpu"), False, None),
        (0, Builds("cpu", None), False, None),
        (1, Builds("13.0", None), True, None),
    ],
)
def test_an_installation_of_the_other_kind_is_refused_with_the_command_to_type(
    gpus_per_node: int, builds: Builds, has_engines: bool, said: str | None
):
    found = find_misfit(gpus_per_node, builds, has_engines=has_engines)
    assert (found is None) if said is None else re.search(said, found or "")


def test_a_config_for_gpus_is_refused_before_ray_on_this_installation(host):
    host(smi(1))
    config = RunConfig()
    config.cluster.gpus_per_node = 1
    assert gpus.read_builds() == CPU
    with pytest.raises(ConfigError, match="torch and vllm for CPUs"):
        check_environment(config)


def test_fewer_gpus_than_the_config_asks_for_are_refused(host, monkeypatch: pytest.MonkeyPatch):
    host(smi(2))
    assert find_shortage(2) is find_shortage(0) is None
    assert find_shortage(8) == "cluster.gpus_per_node=8, but this host has 2; set cluster.gpus_per_node=2"
    monkeypatch.setenv("MRL_CPU", "1")
    host_gpus.cache_clear()
    assert "MRL_CPU is set, so unset it" in str(find_shortage(1))
    host(None)
    monkeypatch.delenv("MRL_CPU")
    assert "no GPU to use: nvidia-smi must list it" in str(find_shortage(1))


def test_a_process_takes_its_device_from_its_run(host, monkeypatch: pytest.MonkeyPatch):
    host(smi(1))
    assert not on_gpu()
    for has_gpu in (True, False):
        for name, value in device_variables(has_gpu=has_gpu).items():
            monkeypatch.setenv(name, value)
        assert on_gpu() == has_gpu
    monkeypatch.setenv("MRL_DEVICE", "cuda")
    with pytest.raises(RuntimeError, match="torch .* is built for CPUs; python -m mrl.doctor"):
        gpus.require_cuda()


def test_kernels_are_used_on_gpus_wherever_they_are_installed(host, monkeypatch: pytest.MonkeyPatch):
    host(None)
    assert not kernels.are_used("json", is_imported=True)
    monkeypatch.setenv("MRL_DEVICE", "cuda")
    assert kernels.are_used("json", is_imported=True)
    assert not kernels.are_used("no_such_library", is_imported=False)
    with pytest.raises(RuntimeError, match="json is installed, but cannot be imported"):
        kernels.are_used("json", is_imported=False)


def test_missing_kernels_are_those_that_the_model_needs():
    assert [found.package for found in kernels.missing_kernels("ME*-")] == [
        "transformer-engine-torch",
        "mamba-ssm",
        "causal-conv1d",
    ]
    assert [found.package for found in kernels.missing_kernels(("*E", "*-"))] == ["transformer-engine-torch"]
    said = kernels.describe_missing(kernels.missing_kernels("*-"))
    assert said.startswith("transformer-engine-torch is not installed: ") and "install_gpu.sh kernels" in said
    assert kernels.describe_missing([]) == ""


def test_one_gpu_gets_the_layout_of_the_run_that_gpu_status_shows(host):
    host(smi(1))
    (command,) = re.findall(
        r"^python -m mrl\.train grpo_tiny\.yaml ((?:.*\\\n)?.*)$",
        (ROOT / "docs/gpu_status.md").read_text(),
        re.MULTILINE,
    )
    assert load_config("grpo_tiny.yaml") == load_config("grpo_tiny.yaml", command.replace("\\\n", " ").split())
