"""What to do about errors of libraries that say only what has happened."""

from __future__ import annotations

OUT_OF_MEMORY = (
    "; lower policy.generation.vllm_cfg.gpu_memory_utilization, which engines take of a GPU, or policy.generation.vllm_cfg.max_num_seqs; "
    "in training lower policy.sequence_packing.train_mb_tokens or policy.train_micro_batch_size, "
    "or set policy.megatron_cfg.activation_checkpointing=true"
)
BROKEN_NETWORK = (
    "; the ranks do not reach each other: python -m mrl.doctor looks at every node's interfaces and fabric "
    "(NCCL_SOCKET_IFNAME, FI_PROVIDER), NCCL_DEBUG=INFO says which is taken; "
    "EFA needs a security group whose rules for incoming and outgoing traffic name the group itself"
)
# The last two are vLLM's, at its start.
SAID_OF_MEMORY = ("CUDA out of memory", "No available memory for the cache blocks", "Free memory on device")


def way_out(error: Exception) -> str:
    """What to append to the message of an error that a process of a run ended with; "" if it stands for itself."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or any(said in text for said in SAID_OF_MEMORY):
        return OUT_OF_MEMORY
    if "NCCL" in text or "DistBackendError" in type(error).__name__:
        return BROKEN_NETWORK
    return ""
