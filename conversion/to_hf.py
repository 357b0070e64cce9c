"""Megatron checkpoint to Hugging Face folder, in bounded memory."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from conversion.families.registry import family
from conversion.merged import CheckpointAdapters, MergedTensors, find_adapters, write_peft
from conversion.progress import Progress, counter
from conversion.storage.attempts import built_aside
from conversion.storage.checkpoint_folder import HF_CONFIG_FILE, Checkpoint, copy_companions, file_state, find_checkpoint, write_json
from conversion.storage.manifest import MANIFEST, TABLE_VERSION, check_files, check_same_tensors, read_manifest, seal
from conversion.storage.safetensors_out import write_safetensors
from conversion.storage.torch_dist_io import EMBEDDING_KEY, METADATA_FILE, CanonicalTensors, TorchDistFolder
from conversion.tensors import dtype_name, torch_dtype

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9

# Every GPTModel has this tensor. Without the index of a layer in its key, Megatron has written all layers as one tensor.
_STACKED_LAYERS_KEY = "decoder.layers.self_attention.linear_proj.weight"


def convert_mcore_to_hf(
    mcore: Path, out: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES, dtype: str | None = None, progress: Progress | None = None
) -> None:
    """Writes the Hugging Face folder of a Megatron checkpoint: weights, config.json, tokenizer files and generation settings.

    Tensors keep the dtypes of the checkpoint, unless `dtype` names one for all. If the checkpoint has a manifest, what is read is checked
    against it. A call that was killed is continued by the next with the same arguments.

    Raises:
        ValueError: the checkpoint is missing, incomplete, damaged, or does not fit its config; or `out` exists.
    """
    opened = open_checkpoint(mcore)
    checkpoint, source = opened.checkpoint, opened.tensors
    iteration, root = checkpoint.iteration, checkpoint.iteration.parent
    if (root / MANIFEST).exists():
        manifest = read_manifest(root)
        described = {f"{iteration.name}/{name}" for name in (METADATA_FILE, HF_CONFIG_FILE)}
        # The checksums of tensors that are cast say nothing of what they are cast to.
        cast = set() if dtype is None else {name for name in manifest.files if name.startswith(f"{iteration.name}/")}
        check_files(root, sorted(described | cast))
    origin = {"format": "torch_dist", "folder": str(iteration.resolve()), "files": _identity(iteration)}
    plan = {"source": origin, "dtype": dtype, "max_shard_bytes": max_shard_bytes, "table_version": TABLE_VERSION}
    target = None if dtype is None else torch_dtype(dtype)
    total = sum(math.prod(source.shape(name)) * (target or source.dtype(name)).itemsize for name in source.names)
    with built_aside(out, plan) as folder:
        tensors, files = write_safetensors(
            folder,
            source,
            source.names,
            max_shard_bytes=max_shard_bytes,
            dtype=target,
            progress=counter(progress, total),
        )
        check_same_tensors(root, tensors)
        config = {**checkpoint.hf_config}
        # transformers 5 writes "dtype", older versions "torch_dtype".
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype or dtype_name(opened.folder.dtype(EMBEDDING_KEY))
        write_json(folder / "config.json", config)
        if checkpoint.tokenizer is None:
            logger.warning("no tokenizer folder beside %s: the export has none", root)
        else:
            copy_companions(checkpoint.tokenizer, folder)
        seal(folder, origin, tensors, files)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A Megatron checkpoint to read canonical tensors from."""

    checkpoint: Checkpoint
    folder: TorchDistFolder
    tensors: CanonicalTensors | MergedTensors
    """Its weights, with adapters merged if it has some."""
    factors: CanonicalTensors
    """Its weights, and the factors of adapters."""
    adapters: CheckpointAdapters | None


def open_checkpoint(mcore: Path) -> OpenCheckpoint:
    """The checkpoint in a step folder, a weights folder or an iter_ folder.

    Raises:
        ValueError: it is missing, incomplete, or does not fit its config.
    """
    checkpoint = find_checkpoint(mcore)
    # The checksums of a manifest are looked at while tensors are read.
    folder = TorchDistFolder(checkpoint.iteration, verify=not (checkpoint.iteration.parent / MANIFEST).exists())
    layout = family(checkpoint.hf_config).torch_dist_layout(
        checkpoint.hf_config, "float32", _padded_vocabulary(folder, checkpoint), stacked_layers=_STACKED_LAYERS_KEY in folder.keys
    )
    adapters = find_adapters(checkpoint, folder)
    if adapters is None:
        tensors = CanonicalTensors(folder, layout)
        return OpenCheckpoint(checkpoint, folder, tensors, tensors, None)
    factors = CanonicalTensors(folder, layout | adapters.layout)
    return OpenCheckpoint(checkpoint, folder, MergedTensors(factors, adapters), factors, adapters)


def export_adapters(mcore: Path, out: Path) -> None:
    """Writes the adapters of a Megatron checkpoint as a folder of the library PEFT.

    Raises:
        ValueError: it has none, is missing, incomplete or damaged, or `out` exists.
    """
    opened = open_checkpoint(mcore)
    if opened.adapters is None:
        raise ValueError(f"--mcore {mcore}: the checkpoint has no adapters (policy.megatron_cfg.peft); mcore-to-hf converts its weights")
    write_peft(opened.factors, opened.adapters, opened.checkpoint.hf_config, out)


def _padded_vocabulary(source: TorchDistFolder, checkpoint: Checkpoint) -> int:
    rows, vocabulary = source.shape(EMBEDDING_KEY)[0], checkpoint.hf_config.get("vocab_size")
    if not isinstance(vocabulary, int) or rows < vocabulary:
        raise ValueError(f"{checkpoint.iteration}: {EMBEDDING_KEY} has {rows} rows, less than vocab_size={vocabulary} of {HF_CONFIG_FILE}")
    return rows


def _identity(iteration: Path) -> dict[str, object]:
    """What tells another state of the source; contents are told by the checksums of the tensors."""
    return {path.name: file_state(path) for path in sorted(iteration.iterdir()) if path.is_file()}
