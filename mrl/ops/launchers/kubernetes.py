# SPDX-License-Identifier: Apache-2.0
"""A run as a Kubernetes Indexed Job: one pod per node, each with all GPUs of its node, the head found by a headless
service.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from dataclasses import asdict, dataclass
from string import Template
from typing import Any

import yaml

NAME, MAX_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), 63
SIZE = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTP]i|[kMGTP])?")
GRADERS = "-graders"
"""End of the name of the job that computes rewards alone."""
EFA_NETWORK = {
    "NCCL_NET_PLUGIN": "ofi",
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "RDMAV_FORK_SAFE": "1",
}

# Nodes look for the head before it is ready. Workers of large images take minutes to import their libraries. Memory of
# the network card is pinned; nothing else of the host is needed, but its network where cards do RDMA. Capabilities do
# not reach the image's own user, who can read neither the mounted token nor most claims: DAC_OVERRIDE writes to these.
MANIFEST = """
apiVersion: v1
kind: Service
metadata: {name: $name, namespace: $namespace, labels: {app: $name}}
spec:
  clusterIP: None
  selector: {app: $name}
  publishNotReadyAddresses: true
  ports: [{name: ray, port: 6379}]
---
apiVersion: batch/v1
kind: Job
metadata: {name: $name, namespace: $namespace, labels: {app: $name}}
spec:
  completionMode: Indexed
  completions: $num_nodes
  parallelism: $num_nodes
  backoffLimit: 0
  template:
    metadata: {labels: {app: $name}}
    spec:
      restartPolicy: Never
      subdomain: $name
      hostNetwork: $host_network
      dnsPolicy: $dns_policy
      terminationGracePeriodSeconds: 600
      nodeSelector: $node_selector
      tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - labelSelector: {matchLabels: {app: $name}}
            topologyKey: kubernetes.io/hostname
      containers:
      - name: trainer
        image: $image
        securityContext:
          runAsUser: 0
          allowPrivilegeEscalation: false
          capabilities: {drop: [ALL], add: [DAC_OVERRIDE, IPC_LOCK, SYS_RESOURCE]}
        command: [/bin/bash, /opt/mrl/scripts/ray_node.sh]
        env:
        - {name: COMMAND, value: $command}
        - {name: NUM_NODES, value: "$num_nodes"}
        - {name: GPUS_PER_NODE, value: "$gpus_per_node"}
        - {name: UNITS_PER_NODE, value: "$slots_per_node"}
        - {name: HEAD_HOST, value: $head}
        - {name: RAY_TOKEN_FILE, value: /run/secrets/ray/token}
        - {name: HF_HOME, value: $hub}
        - {name: HF_DATASETS_CACHE, value: $datasets}
        - {name: NCCL_DEBUG, value: WARN}
        - {name: NCCL_SOCKET_IFNAME, value: "^lo,docker,veth,eni"}
        - {name: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, value: "7200"}
        - {name: NCCL_TIMEOUT, value: "7200"}
        - {name: RAY_worker_register_timeout_seconds, value: "1800"}
        $efa_variables
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: $hub_secret, key: token, optional: true}}}
        resources:
          limits: {nvidia.com/gpu: "$gpus_per_node", $efa_devices memory: $memory}
          requests: {nvidia.com/gpu: "$gpus_per_node", $efa_devices memory: $memory, cpu: "$cpus"}
        volumeMounts:
        - {name: shared, mountPath: $mount_path}
        - {name: shm, mountPath: /dev/shm}
        - {name: ray-token, mountPath: /run/secrets/ray, readOnly: true}
      volumes:
      - {name: shared, persistentVolumeClaim: {claimName: $claim}}
      - {name: shm, emptyDir: {medium: Memory, sizeLimit: $shared_memory}}
      - {name: ray-token, secret: {secretName: $join_secret, items: [{key: token, path: token}], defaultMode: 256}}
"""


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
    on_host_network: bool = False
    """Use the nodes' network: EFA does, and other cards with RDMA."""
    num_graders: int = 0
    """Pods without GPUs that compute rewards; see `env.placement`."""
    grader_cpus: int = 1
    grader_memory: str = "1Gi"

    def __post_init__(self) -> None:
        last_pod = f"{self.name}-{self.num_nodes - 1}"
        if self.num_graders:
            last_pod = max(last_pod, f"{self.name}{GRADERS}-{self.num_graders - 1}", key=len)
        if not NAME.fullmatch(self.name) or len(last_pod) > MAX_NAME:
            raise ValueError(
                f"--name {self.name}: pods are called {last_pod}; that takes small letters, digits and -, a letter "
                f"first, and at most {MAX_NAME} in all"
            )
        sizes = {"--memory": self.memory, "--shm": self.shared_memory, "--grader-memory": self.grader_memory}
        for option, size in sizes.items():
            if not SIZE.fullmatch(size):
                raise ValueError(f"{option} {size}: Kubernetes writes sizes as 384Gi or 384G")


def graders(job: KubernetesJob, trainer: dict[str, Any]) -> dict[str, Any]:
    """The job of the pods that compute rewards, made of the trainer's: no GPUs, host network or capabilities.

    They join the head with the ranks behind those of the trainer, on nodes of their own, and end with it.
    """
    made = copy.deepcopy(trainer)
    name = f"{job.name}{GRADERS}"
    made["metadata"] |= {"name": name, "labels": {"app": name}}
    made["spec"] |= {"completions": job.num_graders, "parallelism": job.num_graders}
    made["spec"]["template"]["metadata"]["labels"] = {"app": name}
    pod = made["spec"]["template"]["spec"]
    for key in ("subdomain", "nodeSelector", "tolerations"):
        del pod[key]
    pod |= {"hostNetwork": False, "dnsPolicy": "ClusterFirst"}
    (rule,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rule["labelSelector"] = {"matchExpressions": [{"key": "app", "operator": "In", "values": [job.name, name]}]}
    (container,) = pod["containers"]
    container["name"] = "grader"
    # The same user as the trainer's, whose run folder it writes its logs to.
    container["securityContext"]["capabilities"] = {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]}
    rank = f"NODE_RANK=$(({job.num_nodes} + JOB_COMPLETION_INDEX))"
    container["command"] = ["/bin/bash", "-c", f"export {rank}; exec bash /opt/mrl/scripts/ray_node.sh"]
    own = {"NUM_NODES": str(job.num_nodes + job.num_graders), "GPUS_PER_NODE": "0", "UNITS_PER_NODE": "0"}
    container["env"] = [
        variable | ({"value": own[variable["name"]]} if variable["name"] in own else {})
        for variable in container["env"]
        if variable["name"] not in EFA_NETWORK
    ]
    container["resources"] = {
        "limits": {"memory": job.grader_memory},
        "requests": {"memory": job.grader_memory, "cpu": str(job.grader_cpus)},
    }
    return made


def in_bytes(size: str) -> float:
    """Bytes of a size as Kubernetes writes it, such as 384Gi."""
    unit = size.lstrip("0123456789.")
    power = "kMGTP".index(unit[0].replace("K", "k")) + 1 if unit else 0
    return float(size.removesuffix(unit)) * (1024 if unit.endswith("i") else 1000) ** power


def render(job: KubernetesJob) -> str:
    """The service by which nodes find the head, and the job; with commands in a comment that create the secrets they
    need.
    """
    places = {"hub": f"{job.mount_path}/huggingface", "datasets": f"{job.mount_path}/huggingface/datasets"}
    names = {"head": f"{job.name}-0.{job.name}", "join_secret": f"{job.name}-ray", "hub_secret": f"{job.name}-hf"}
    node_selector = {"node.kubernetes.io/instance-type": job.instance_type} if job.instance_type else {}
    # JSON is YAML, whatever signs a value has.
    values = {
        name: json.dumps(value)
        for name, value in (asdict(job) | places | names | {"node_selector": node_selector}).items()
    }
    values |= {
        "host_network": json.dumps(job.on_host_network),
        "dns_policy": "ClusterFirstWithHostNet" if job.on_host_network else "ClusterFirst",
    }
    values |= {"command": json.dumps(shlex.join(job.command)), "efa_variables": "", "efa_devices": ""}
    if job.num_efa:
        values["efa_devices"] = f'vpc.amazonaws.com/efa: "{job.num_efa}",'
        values["efa_variables"] = "\n        ".join(
            f'- {{name: {name}, value: "{value}"}}' for name, value in EFA_NETWORK.items()
        )
    manifests = list(yaml.safe_load_all(Template(MANIFEST).substitute(values)))
    if job.num_graders:
        manifests.append(graders(job, manifests[-1]))
    create = f"kubectl -n {job.namespace} create secret generic"
    head = (
        f"# Before: {create} {job.name}-ray --from-literal=token=$(openssl rand -hex 32)\n"
        f"# For gated models: {create} {job.name}-hf --from-literal=token=HF_TOKEN\n"
        f"# Logs: kubectl -n {job.namespace} logs -f -l app={job.name},batch.kubernetes.io/job-completion-index=0\n"
    )
    return head + yaml.safe_dump_all(manifests, sort_keys=False, width=140)
