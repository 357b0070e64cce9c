"""A run as a batch job of DGX Cloud Lepton: what goes into the fields of its form."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def render(command: list[str], *, num_nodes: int, gpus_per_node: int, image: str, secrets: Mapping[str, str]) -> str:
    """The fields, one block each. `secrets` are variables and the names of Lepton's secrets that hold them."""
    variables = {"COMMAND": shlex.join(command), "CLUSTER_NUM_NODES": num_nodes, "CLUSTER_GPU_PER_NODE": gpus_per_node}
    lines = [
        "# Batch Jobs > Create Job > Custom",
        f"# Resources: {gpus_per_node} GPUs per node, {num_nodes} workers",
        f"# Custom Container: {image}",
        "# Run Command:",
        "exec bash /opt/mrl/scripts/ray_node.sh",
        "# Environment Variables:",
        *(f"{name}={value}" for name, value in variables.items()),
        *(f"{name}=<secret {secret}>" for name, secret in secrets.items()),
        "# Mount Storage: a volume that all workers share, at /mnt; keep model, data, checkpoints and HF_HOME there",
    ]
    return "\n".join(lines) + "\n"
