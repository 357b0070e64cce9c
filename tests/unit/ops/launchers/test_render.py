# SPDX-License-Identifier: Apache-2.0
"""Output of launchers says what the config says, and survives the shell and YAML."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from mrl.ops.launch import main
from mrl.ops.launchers.slurm import SIGNAL_S, in_seconds
from tests.sources import ROOT

TINY = [
    "grpo_tiny.yaml",
    "cluster.num_nodes=2",
    "cluster.gpus_per_node=8",
    "checkpointing.checkpoint_dir=/shared/results",
]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0, capsys.readouterr().out
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _without_a_hub_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)


def test_the_script_hands_sbatch_what_the_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = tmp_path / "logs of runs"
    words = [
        "slurm",
        *TINY,
        "grpo.seed=7",
        "--account",
        "research",
        "--time",
        "4:00:00",
        "--log-dir",
        str(logs),
        "--container",
        "it's.sqsh",
        "--mounts=/scratch/me:/shared:rw",
    ]
    script = tmp_path / "submit.sh"
    script.write_text(printed(capsys, *words))
    # A sbatch that says what it was given.
    (tmp_path / "sbatch").write_text(
        '#!/bin/sh\nprintf "%s\\n" "$COMMAND" "$CONTAINER" "$GPUS_PER_NODE" "$BASE_LOG_DIR" "$HF_HOME" "$@"\n'
    )
    (tmp_path / "sbatch").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(
        ["bash", script], capture_output=True, text=True, check=True, env=os.environ | {"PATH": path}
    ).stdout.splitlines()
    assert said[0] == "python -m mrl.train " + " ".join([*TINY, "grpo.seed=7"])
    assert said[1:5] == ["it's.sqsh", "8", str(logs), "/shared/huggingface"]
    assert {"--nodes=2", "--gres=gpu:8", "--account=research", "--time=4:00:00", f"--output={logs}/slurm-%j.out"} < set(
        said
    )
    assert said[-1] == str(ROOT / "scripts" / "ray.sub")
    assert logs.is_dir()


def test_sites_without_gres_are_asked_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "slurm", *TINY, "--log-dir", str(tmp_path), "--gpus-per-node")
    assert "--gpus-per-node=8" in text and "--gres" not in text


SLOTS = [*TINY[:2], "cluster.cpu_units_per_node=4", *TINY[3:]]


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["slurm", *SLOTS], "export UNITS_PER_NODE=4\n"),
        (["k8s", *SLOTS, "--image=mrl", "--claim=fsx"], "name: UNITS_PER_NODE\n          value: '4'\n"),
        (["lepton", *SLOTS, "--image=mrl", "--mount=/shared"], "\nUNITS_PER_NODE=4\n"),
        (["slurm", *TINY], "export UNITS_PER_NODE=8\n"),
    ],
)
def test_nodes_without_gpus_give_as_many_slots_as_the_config_says(
    capsys: pytest.CaptureFixture[str], words: list[str], written: str
):
    assert written in printed(capsys, *words)


def test_attempts_of_one_run_have_one_name_and_other_runs_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def name(*words: str) -> str:
        (found,) = re.findall(r"--job-name=(\S+)", printed(capsys, "slurm", *TINY, *words, "--log-dir", str(tmp_path)))
        return found

    first = name(f"checkpointing.checkpoint_dir={tmp_path}/a/run")
    assert re.fullmatch(r"mrl-run-[0-9a-f]{8}", first)
    assert first == name(f"checkpointing.checkpoint_dir={tmp_path}/a/run", "grpo.max_num_steps=9")
    assert first != name(f"checkpointing.checkpoint_dir={tmp_path}/b/run")
    assert name("--name=mine") == "mine"
    # Slurm lets jobs of one name wait for each other.
    assert "#SBATCH --dependency=singleton" in (ROOT / "scripts/ray.sub").read_text()


EKS = ["--image", "registry/mrl:1", "--claim", "fsx", "--efa", "4", "--instance-type", "p4d.24xlarge", "--shm", "64Gi"]


def test_every_node_of_a_kubernetes_job_has_a_pod_and_none_is_privileged(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "k8s", *TINY, *EKS)
    service, job = yaml.safe_load_all(text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"], spec["backoffLimit"]) == (
        2,
        2,
        "Indexed",
        0,
    )
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == pod["subdomain"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    container = pod["containers"][0]
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables["HEAD_HOST"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert variables["NUM_NODES"] == "2" and variables["GPUS_PER_NODE"] == "8"
    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"}
    assert (
        devices.items() <= container["resources"]["limits"].items()
        and devices.items() <= container["resources"]["requests"].items()
    )
    assert (pod["hostNetwork"], pod["dnsPolicy"], pod["restartPolicy"]) == (True, "ClusterFirstWithHostNet", "Never")
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (
        rule["labelSelector"]["matchLabels"].items() <= labels.items()
        and rule["topologyKey"] == "kubernetes.io/hostname"
    )
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p4d.24xlarge"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert volumes[mounts["/shared"]] == {"persistentVolumeClaim": {"claimName": "fsx"}}
    assert mounts.keys() == {"/dev/shm", "/shared", str(Path(variables["RAY_TOKEN_FILE"]).parent)}
    assert "privileged" not in text and "&" not in text
    without = printed(capsys, "k8s", *TINY, "--image", "registry/mrl:1", "--claim", "fsx")
    assert "FI_PROVIDER" not in without and "vpc.amazonaws.com" not in without


def capabilities(pod: dict) -> list[str]:
    (container,) = pod["containers"]
    security = container["securityContext"]
    assert security["capabilities"]["drop"] == ["ALL"] and not security["allowPrivilegeEscalation"]
    return security["capabilities"]["add"]


def test_pods_have_the_network_and_the_rights_that_they_need(capsys: pytest.CaptureFixture[str]):
    def pods(*words: str) -> list[dict]:
        _, *jobs = yaml.safe_load_all(printed(capsys, "k8s", *TINY, *words))
        return [job["spec"]["template"]["spec"] for job in jobs]

    plain = ["--image", "registry/mrl:1", "--claim", "fsx"]
    assert [pod["hostNetwork"] for pod in pods(*plain) + pods(*EKS) + pods(*plain, "--host-network")] == [0, 1, 1]
    assert capabilities(pods(*plain)[0]) == ["DAC_OVERRIDE", "IPC_LOCK", "SYS_RESOURCE"]

    sizes = ["env.placement.num_nodes=3", "--grader-cpus=8", "--grader-memory=32Gi"]
    service, trainer, graders = yaml.safe_load_all(printed(capsys, "k8s", *TINY, *EKS, *sizes))
    assert [schema_errors(manifest) for manifest in (service, trainer, graders)] == [[], [], []]
    pod, labels = graders["spec"]["template"]["spec"], graders["spec"]["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    assert (graders["spec"]["completions"], pod["hostNetwork"], capabilities(pod)) == (3, False, ["DAC_OVERRIDE"])
    assert container["resources"]["requests"] == {"memory": "32Gi", "cpu": "8"}
    assert container["resources"]["limits"] == {"memory": "32Gi"}
    assert not {"nodeSelector", "tolerations", "subdomain"} & pod.keys()
    # Neither the head's address nor the commands that show its log mean them.
    assert labels != service["spec"]["selector"] == trainer["spec"]["template"]["metadata"]["labels"]
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert set(rule["labelSelector"]["matchExpressions"][0]["values"]) == {
        labels["app"],
        service["spec"]["selector"]["app"],
    }
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert (variables["NUM_NODES"], variables["GPUS_PER_NODE"], variables["UNITS_PER_NODE"]) == ("5", "0", "0")
    assert not {"FI_PROVIDER", "NCCL_NET_PLUGIN"} & variables.keys()
    assert variables["HEAD_HOST"] == f"{trainer['metadata']['name']}-0.{service['metadata']['name']}"
    # Their ranks follow those of the two nodes of the trainer.
    shell, option, script = container["command"]
    said = subprocess.run(
        [shell, option, script.replace("exec bash /opt/mrl/scripts/ray_node.sh", "env")],
        env={"JOB_COMPLETION_INDEX": "2", "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "NODE_RANK=4" in said.stdout.splitlines()


@pytest.mark.parametrize("words", [["slurm"], ["lepton", "--image=mrl", "--mount=/shared"]])
def test_launchers_name_the_nodes_that_they_do_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
):
    logs = ["--log-dir", str(tmp_path)] if words == ["slurm"] else []
    line = "# Not in this job: the nodes of env.placement.num_nodes=3; they join the head as docs/cluster.md says"
    assert line in printed(capsys, *words, *TINY, *logs, "env.placement.num_nodes=3")
    assert "Not in this job" not in printed(capsys, *words, *TINY, *logs)


def test_the_network_is_the_eks_tutorials(capsys: pytest.CaptureFixture[str]):
    _, job = yaml.safe_load_all(printed(capsys, "k8s", *TINY, *EKS))
    ours = {item["name"]: item.get("value") for item in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert ours.items() >= {
        "NCCL_DEBUG": "WARN", "NCCL_TIMEOUT": "7200", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
        "NCCL_NET_PLUGIN": "ofi",
        "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1", "RDMAV_FORK_SAFE": "1",
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni", "RAY_worker_register_timeout_seconds": "1800",
    }.items()  # fmt: skip


def schema_errors(manifest: dict) -> list[str]:
    """Faults that a strict API server of Kubernetes 1.34 would refuse."""
    schema = json.loads((ROOT / "tests/data/kubernetes/v1.34.json").read_text())
    name = {"Job": "io.k8s.api.batch.v1.Job", "Service": "io.k8s.api.core.v1.Service"}[manifest["kind"]]
    validator = jsonschema.Draft202012Validator(schema | {"$ref": f"#/$defs/{name}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


@pytest.mark.parametrize("words", [EKS, ["--image", "mrl", "--claim", "fsx"]])
def test_the_manifest_fits_the_schemas_of_kubernetes(capsys: pytest.CaptureFixture[str], words: list[str]):
    manifests = list(yaml.safe_load_all(printed(capsys, "k8s", *TINY, *words)))
    assert [manifest["kind"] for manifest in manifests] == ["Service", "Job"]
    assert [schema_errors(manifest) for manifest in manifests] == [[], []]


def test_the_schemas_refuse_what_kubernetes_refuses(capsys: pytest.CaptureFixture[str]):
    _, job = yaml.safe_load_all(printed(capsys, "k8s", *TINY, *EKS))
    spec = job["spec"]["template"]["spec"]
    spec["hostNetworks"] = spec.pop("hostNetwork")
    spec["containers"][0]["env"][0]["value"] = 1
    del spec["containers"][0]["name"]
    job["spec"]["completions"] = "2"
    errors = schema_errors(job)
    for part in (
        "'hostNetworks' was unexpected",
        "1 is not of type 'string'",
        "'name' is a required property",
        "'2' is not of type 'integer'",
    ):
        assert any(part in error for error in errors), part
    assert len(errors) == 4


@pytest.mark.parametrize("name", ["My_Run", "1st", "run-", "r" * 62])
def test_a_name_that_no_pod_can_have_is_refused(capsys: pytest.CaptureFixture[str], name: str):
    assert main(["k8s", *TINY, *EKS, f"--name={name}"]) == 2
    assert f"--name {name}: pods are called {name}-1" in capsys.readouterr().err


def test_a_config_with_an_unknown_key_is_not_launched(capsys: pytest.CaptureFixture[str]):
    assert main(["slurm", "grpo_tiny.yaml", "cluster.num_node=2"]) == 2
    assert "cluster.num_nodes" in capsys.readouterr().err


def test_without_sbatch_nothing_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    # With this environment, which is for CPUs, a job on GPUs is not submitted.
    assert main(["slurm", *TINY, "--log-dir", str(tmp_path), "--submit"]) == 2
    assert "or name another: VENV=FOLDER" in capsys.readouterr().err
    monkeypatch.setenv("VENV", str(tmp_path))
    assert main(["slurm", *TINY, "--log-dir", str(tmp_path), "--submit"]) == 1
    assert "sbatch is not on this host's PATH" in capsys.readouterr().err


def test_what_is_sent_is_what_was_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@"; cat >{tmp_path}/applied; exit ${{CODE:-0}}\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["k8s", *TINY, *EKS, "--submit"]) == 0
    said = capsys.readouterr()
    assert said.err == "apply --filename -\n" and (tmp_path / "applied").read_text().strip() == said.out.strip()
    monkeypatch.setenv("CODE", "3")
    assert main(["k8s", *TINY, *EKS, "--submit"]) == 1
    assert "kubectl refused (code 3)" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["--memory=384GB", "--shm=big", "--shm="])
def test_a_size_that_is_none_to_kubernetes_is_refused(capsys: pytest.CaptureFixture[str], size: str):
    assert main(["k8s", *TINY, *EKS, size]) == 2
    assert f"{size.replace('=', ' ')}: " in capsys.readouterr().err


def test_lepton_gets_the_command_and_the_size(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, "lepton", *TINY, "--image", "registry/mrl:1", "--mount", "/shared")
    assert "RAY_AUTH_TOKEN=<secret RAY_AUTH_TOKEN>" in text
    assert "CLUSTER_NUM_NODES=2" in text and "CLUSTER_GPU_PER_NODE=8" in text
    assert f"COMMAND=python -m mrl.train {' '.join(TINY)}\n" in text and "\nHF_HOME=/shared/huggingface\n" in text


@pytest.mark.parametrize("folder", ["results/run", "/results/run", "/shared/../results"])
@pytest.mark.parametrize(
    "words",
    [
        ["k8s", *EKS],
        ["lepton", "--image", "mrl", "--mount", "/shared"],
        ["slurm", "--container=a", "--mounts=/b:/c,/shared"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_folder_that_ends_with_its_container_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], folder: str
):
    assert main([*words, *TINY, f"checkpointing.checkpoint_dir={folder}"]) == 2
    assert f"checkpointing.checkpoint_dir={folder}: on the container's own disk" in capsys.readouterr().err


def test_a_config_file_that_no_pod_sees_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text("defaults: grpo_tiny.yaml\n")
    words = ["k8s", str(tmp_path / "mine.yaml"), *TINY[1:]]
    assert main([*words, *EKS]) == 2
    assert f"config {tmp_path}/mine.yaml: on the container's own disk" in capsys.readouterr().err
    assert main([*words, f"checkpointing.checkpoint_dir={tmp_path}/results", *EKS, f"--mount={tmp_path}"]) == 0


def test_a_container_on_slurm_sees_config_run_folder_and_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
):
    (tmp_path / "mine.yaml").write_text("defaults: grpo_tiny.yaml\n")
    monkeypatch.chdir(tmp_path)
    words = ["slurm", "mine.yaml", "--log-dir=logs", "--container=a.sqsh"]
    for unseen in ([], ["--mounts=/data:/data"], [f"--mounts={tmp_path}:/work"]):
        assert main([*words, *unseen]) == 2
        assert "config mine.yaml: on the container's own disk" in capsys.readouterr().err
    mounted = [*words, f"--mounts=/data:/data:ro,{tmp_path}:{tmp_path}"]
    assert f"export HF_HOME={tmp_path}/huggingface\n" in printed(capsys, *mounted)
    monkeypatch.setenv("HF_HOME", "/data/hub")
    assert "export HF_HOME=/data/hub\n" in printed(capsys, *mounted)
    monkeypatch.setenv("HF_HOME", "/home/me/hub")
    assert main(mounted) == 2
    assert "HF_HOME=/home/me/hub: on the container's own disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--instance-type=p4d.24xlarge"], "phase train needs at least"),
        (["--instance-type=p5.48xlarge", "--memory=100Gi"], "of host memory and has 100.0 GiB: "),
        (["--instance-type=p5.48xlarge", "--memory=3Ti"], "no pod fits on a node of --instance-type p5.48xlarge"),
        (
            ["cluster.gpus_per_node=16", "--instance-type=p5.48xlarge"],
            "no pod fits on a node of --instance-type p5.48xlarge",
        ),
        (["--memory=384G"], ""),
        (["--instance-type=p5.48xlarge"], ""),
    ],
)
def test_the_plan_is_compared_with_what_a_pod_gets(
    llama_8b: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
):
    words = [
        "k8s",
        "grpo_math_8B.yaml",
        f"policy.model_name={llama_8b}",
        "cluster.num_nodes=2",
        "checkpointing.checkpoint_dir=/shared/run",
    ]
    assert main([*words, *options, "--image=mrl", "--claim=fsx"]) == (2 if message else 0)
    printed = capsys.readouterr()
    said = printed.out + printed.err
    assert message in said and ("not compared" in said) == (options == ["--memory=384G"])


def test_a_config_that_a_start_refuses_is_not_launched(capsys: pytest.CaptureFixture[str]):
    """The check of `--check`, with what the machine that launches may lack left out."""
    assert main(["slurm", "grpo_nanov3.yaml", "policy.megatron_cfg.tensor_model_parallel_size=64"]) == 2
    said = capsys.readouterr()
    assert "tensor_model_parallel_size=64: the 256 slots" in said.err and "--check says more" in said.err
    assert said.out == ""


def test_overrides_may_follow_options_and_nodes_get_the_python_that_launches(capsys: pytest.CaptureFixture[str]):
    script = printed(capsys, "slurm", TINY[0], "--time", "1:00:00", *TINY[1:], "--partition=batch", "grpo.seed=7")
    assert shlex.quote("python -m mrl.train " + " ".join([*TINY, "grpo.seed=7"])) in script
    assert f"export VENV={sys.prefix}\n" in script
    with pytest.raises(SystemExit) as ended:
        main(["slurm", *TINY, "--bogus", "grpo.seed=7"])
    assert ended.value.code == 2 and "unrecognized arguments: --bogus; sbatch reads" in capsys.readouterr().err
    assert (
        printed(
            capsys, "slurm", "--config", *TINY[:1], "--time", "1:00:00", "--partition=batch", *TINY[1:], "grpo.seed=7"
        )
        == script
    )


def test_a_container_has_a_python_of_its_own(capsys: pytest.CaptureFixture[str]):
    assert "VENV" not in printed(capsys, "slurm", *TINY, "--container", "image.sqsh", "--mounts", "/shared:/shared")


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [  # the forms of sbatch's man page
        ("90", 5400), ("90:30", 5430), ("8:00:00", 28800), ("1-12", 129600), ("1-12:30", 131400),
        ("1-12:30:15", 131415), ("0", None), ("unlimited", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_does(limit: str, seconds: float | None):
    assert in_seconds(limit) == seconds


@pytest.mark.parametrize("limit", ["8h", "1:2:3:4", "1-", "-5", ""])
def test_a_time_limit_that_is_none_is_refused(limit: str):
    with pytest.raises(ValueError, match=re.escape(f"--time {limit}: no time limit of Slurm; write for example")):
        in_seconds(limit)


def test_a_run_that_would_save_later_than_its_job_may_last_is_refused(capsys: pytest.CaptureFixture[str]):
    assert f"#SBATCH --signal=B:USR1@{SIGNAL_S}\n" in (ROOT / "scripts/ray.sub").read_text()
    words = ["slurm", *TINY, "checkpointing.checkpoint_must_save_by=00:03:40:00"]
    assert main([*words, "--time=3:44:59"]) == 2
    assert "checkpoint_must_save_by=00:03:40:00: Slurm ends the attempt before, at --time 3:44:59" in (
        capsys.readouterr().err
    )
    assert main([*words, "--time=5"]) == 2  # minutes
    assert "--time 5: 5 minutes, and Slurm asks the run to end 5 minutes before" in capsys.readouterr().err
    note = "# checkpointing.checkpoint_must_save_by=00:03:40:00: an attempt ends there, with most of --time"
    said = [printed(capsys, *words, f"--time={limit}") for limit in ("3:45:00", "7:20:00", "7:20:01", "UNLIMITED")]
    assert [note in text for text in said] == [False, False, True, False]


def test_a_job_with_placeholders_names_them_and_is_not_submitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["slurm", "grpo_nanov3.yaml", "--time=4:00:00", "--log-dir", str(tmp_path)]
    named = (
        "policy.model_name=/path/to/hf_checkpoint, data.train.data_path=/path/to/train.jsonl, "
        "data.validation.data_path=/path/to/validation.jsonl"
    )
    assert printed(capsys, *words).splitlines()[-1] == f"# To be replaced before a start: {named}"
    assert main([*words, "--submit"]) == 2
    assert f"{named}: placeholders; put your own in their place" in capsys.readouterr().err
    rows = [f"data.{part}.data_path=/shared/rows.jsonl" for part in ("train", "validation")]
    assert "To be replaced" not in printed(capsys, *words, "policy.model_name=/shared/model", *rows)
