"""How long a run may take to start: deadlines.start_s, or a time that follows the size of the model's weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.hf_folder import weight_files
from mrl.config.model import read_model
from mrl.config.schema.run import RunConfig

# Ray, the imports of vLLM and Megatron, and process groups, on a host that is busy.
PROCESSES_S = 300.0
# With empty caches vLLM, Triton and FlashInfer compile kernels of a GPU, and CUDA graphs are captured.
KERNELS_S = 300.0
# One node's share of a file system that all nodes read at once: 1.6 GB/s over 32 nodes.
READ_BYTES_PER_S = 50e6
# bfloat16, in which large models are published.
BYTES_PER_PARAMETER = 2


@dataclass(frozen=True)
class StartDeadline:
    """Seconds, and how they add up."""

    seconds: float
    reason: str

    def __str__(self) -> str:
        return f"start deadline {self.seconds:,.0f} s: {self.reason}"


def start_deadline(config: RunConfig) -> StartDeadline:
    """The deadline of each wait at the start: for slots, engines, policy ranks and rewards.

    Without deadlines.start_s it is `PROCESSES_S`, `KERNELS_S` where there are GPUs, and the weights read at `READ_BYTES_PER_S`.
    """
    if config.deadlines.start_s is not None:
        return StartDeadline(config.deadlines.start_s, "deadlines.start_s")
    model = config.policy.model_name
    num_bytes = weight_bytes(Path(model))
    parts = {f"{PROCESSES_S:g} s for processes": PROCESSES_S}
    if config.cluster.gpus_per_node:
        parts[f"{KERNELS_S:g} s for kernels of GPUs"] = KERNELS_S
    if num_bytes is None:
        reason = f"{' + '.join(parts)}; the time to read the weights of {model} is added once they are here"
        return StartDeadline(sum(parts.values()), reason)
    seconds = num_bytes / READ_BYTES_PER_S
    parts[f"{seconds:,.0f} s for {num_bytes / 1e9:,.1f} GB of weights at {READ_BYTES_PER_S / 1e6:g} MB/s"] = seconds
    return StartDeadline(sum(parts.values()), " + ".join(parts))


def weight_bytes(folder: Path) -> int | None:
    """Bytes of a Hugging Face folder's safetensors files; by its config.json if there are none; None without a config.json."""
    with suppress(ValueError, OSError):
        return sum(path.stat().st_size for path in weight_files(folder))
    with suppress(ValueError):
        return BYTES_PER_PARAMETER * read_model(folder).num_parameters
    return None
