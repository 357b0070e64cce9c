# SPDX-License-Identifier: Apache-2.0
"""A run as a Kubernetes Indexed Job: one pod per node, each with all its GPUs, the head found by a headless service."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

import yaml

NAME, MAX_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 63
SIZE = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTP]i|[kMGTP])?")
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
SECRET_KEY = "token"

NETWORK = {
    "NCCL_DEBUG": "WARN",
    "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "7200",
    "NCCL_TIMEOUT": "7200",
    # Workers of large images take minutes to import their libraries.
    "RAY_worker_register_timeout_seconds": "1800",
}
EFA_NETWORK = {
    "NCCL_NET_PLUGIN": "ofi",
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "RDMAV_FORK_SAFE": "1",
}


@dataclass(frozen=True)
class KubernetesJob:
    """Options of the manifest."""

    command: list[str]
    num_nodes: int
    gpus_per_node: int
    slots_per_node: int
    name: str
    namespace: str
    image: str
    claim: str
    mount_path: str
    instance_type: str | None
    num_efa: int
    cpus: int
    memory: str
    shared_memory: str

    def __post_init__(self) -> None:
        last_pod = f"{self.name}-{self.num_nodes - 1}"
        if not NAME.fullmatch(self.name) or len(last_pod) > MAX_NAME:
            raise ValueError(
                f"--name {self.name}: pods are called {last_pod}; that takes small letters, digits and -, a letter first, "
                f"and at most {MAX_NAME} in all"
            )
        for option, size in (("--memory", self.memory), ("--shm", self.shared_memory)):
            if not SIZE.fullmatch(size):
                raise ValueError(f"{option} {size}: Kubernetes writes sizes as 384Gi or 384G")


def in_bytes(size: str) -> float:
    """Bytes of a size as Kubernetes writes it, such as 384Gi."""
    unit = size.lstrip("0123456789.")
    power = "kMGTP".index(unit[0].replace("K", "k")) + 1 if unit else 0
    return float(size.removesuffix(unit)) * (1024 if unit.endswith("i") else 1000) ** power


def render(job: KubernetesJob) -> str:
    """The service by which nodes find the head, and the job; with commands in a comment that create needed secrets."""
    labels = {"app": job.name}
    metadata = {"name": job.name, "namespace": job.namespace, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # Nodes look for the head before it is ready.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True, "ports": [{"name": "ray", "port": 6379}]},
    }
    join_secret, hub_secret = f"{job.name}-ray", f"{job.name}-hf"
    indexed = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.num_nodes,
            "parallelism": job.num_nodes,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": _pod(job, labels, join_secret, hub_secret)},
        },
    }
    create = f"kubectl -n {job.namespace} create secret generic"
    head = (
        f"# Before: {create} {join_secret} --from-literal={SECRET_KEY}=$(openssl rand -hex 32)\n"
        f"# For gated models: {create} {hub_secret} --from-literal={SECRET_KEY}=HF_TOKEN\n"
        f"# Logs: kubectl -n {job.namespace} logs -f -l app={job.name},batch.kubernetes.io/job-completion-index=0\n"
    )
    # JSON knows no references, so YAML writes no anchors for values that occur twice.
    return head + yaml.safe_dump_all(json.loads(json.dumps([service, indexed])), sort_keys=False, width=140)


def _pod(job: KubernetesJob, labels: dict[str, str], join_secret: str, hub_secret: str) -> dict[str, object]:
    same_node = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    devices = {GPU: job.gpus_per_node} | ({EFA: job.num_efa} if job.num_efa else {})
    resources = {name: str(count) for name, count in devices.items()} | {"memory": job.memory}
    variables = {
        "COMMAND": shlex.join(job.command),
        "NUM_NODES": str(job.num_nodes),
        "GPUS_PER_NODE": str(job.gpus_per_node),
        "UNITS_PER_NODE": str(job.slots_per_node),
        "HEAD_HOST": f"{job.name}-0.{job.name}",
        "RAY_TOKEN_FILE": f"/run/secrets/ray/{SECRET_KEY}",
        "HF_HOME": f"{job.mount_path}/huggingface",
        "HF_DATASETS_CACHE": f"{job.mount_path}/huggingface/datasets",
        **NETWORK,
        **(EFA_NETWORK if job.num_efa else {}),
    }
    hub_token = {"secretKeyRef": {"name": hub_secret, "key": SECRET_KEY, "optional": True}}
    container = {
        "name": "trainer",
        "image": job.image,
        # Memory of the network card is pinned; nothing else of the host is needed. Capabilities do not reach the image's own user, who
        # can read neither the mounted token nor most claims.
        "securityContext": {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK", "SYS_RESOURCE"]}},
        "command": ["/bin/bash", "/opt/mrl/scripts/ray_node.sh"],
        "env": [*({"name": name, "value": value} for name, value in variables.items()), {"name": "HF_TOKEN", "valueFrom": hub_token}],
        "resources": {"limits": resources, "requests": resources | {"cpu": str(job.cpus)}},
        "volumeMounts": [
            {"name": "shared", "mountPath": job.mount_path},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "ray-token", "mountPath": "/run/secrets/ray", "readOnly": True},
        ],
    }
    token_file = {"secretName": join_secret, "items": [{"key": SECRET_KEY, "path": SECRET_KEY}], "defaultMode": 0o400}
    return {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": 600,
        "nodeSelector": {"node.kubernetes.io/instance-type": job.instance_type} if job.instance_type else {},
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same_node]}},
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
            {"name": "ray-token", "secret": token_file},
        ],
    }
