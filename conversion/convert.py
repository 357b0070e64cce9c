# SPDX-License-Identifier: Apache-2.0
"""Converts Hugging Face folders to Megatron checkpoints and back, compares and verifies folders; in bounded memory."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from conversion.boxes import DTYPE_BYTES, Layout, Piece, Slot, SlotLayout, full, lengths
from conversion.families.common import HfConfig, MegatronParallel
from conversion.families.registry import family
from conversion.files.checkpoint_metadata import METADATA_FILE
from conversion.files.durable import IO_TIMEOUT_S, built_aside
from conversion.files.experts import StackedExperts
from conversion.files.hf_folder import (
    EMBEDDING,
    REWARD_HEAD,
    copy_companions,
    stored_tensors,
    without_lost_code,
    write_json,
)
from conversion.files.hf_weights import check_hf, has_output_alone, is_unused, read_model_config
from conversion.files.manifest import (
    HF_CONFIG_FILE,
    MANIFEST,
    RUN_CONFIG_FILE,
    TABLE_VERSION,
    FileRecord,
    TensorRecord,
    check_files,
    check_same_tensors,
    file_faults,
    read_manifest,
    seal,
)
from conversion.files.reading import content_hash, file_state, is_named_by_sha256, read_json
from conversion.files.safetensors import SafetensorsFolder, write_safetensors
from conversion.files.torch_dist import (
    EMBEDDING_KEY,
    ITERATION_FOLDER,
    LATEST_FILE,
    CanonicalTensors,
    CheckpointPaths,
    TorchDistFolder,
    find_checkpoint,
)
from conversion.files.torch_dist_writer import MAX_CHUNK_BYTES, files_of_ranks, files_of_size, write_torch_dist
from conversion.lora_export import CheckpointAdapters, MergedTensors, find_adapters, write_peft
from conversion.progress import Progress, Report, counter
from conversion.tensors import BoxSource, blocks, byte_view, content_checksums, dtype_name, torch_dtype

logger = logging.getLogger(__name__)

NO_RANKS = MegatronParallel()
NUM_NAMED = 4
"""Parts of a checkpoint's path that an export names: step_N/policy/weights/iter_0000000."""
MAX_FILE_BYTES = MAX_SHARD_BYTES = 5 * 10**9

# Every GPTModel has this tensor. Without the index of a layer in its key, Megatron has written all layers as one
# tensor.
_STACKED_LAYERS_KEY = "decoder.layers.self_attention.linear_proj.weight"

QUANTISED = "quantization_config"
"""Key of config.json that says how weights are stored; what this file writes is not."""
REWARD_HEAD_KEY = "reward_head.weight"
"""The head of reward models and critics in Megatron checkpoints."""


def convert_hf_to_mcore(
    hf: Path,
    out: Path,
    *,
    parallel: MegatronParallel = NO_RANKS,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the Megatron checkpoint of a Hugging Face folder, loadable at any parallel layout.

    `parallel` only says how data are cut into files: one for each (tp, pp, ep, etp) rank, which then reads no other; by
    default, files of at most 5 GB. Tensors keep the dtypes of the source, unless `dtype` ("bfloat16" or "float32")
    names one for all but those that every holder keeps in float32. Tensors that Megatron has in one are stored in a
    dtype that holds the values of all. The next call with the same arguments continues a call that was killed.
    """
    if not (hf / "config.json").exists():
        raise ValueError(f"--hf {hf} has no config.json; name the folder of a Hugging Face model")
    hf_config = read_model_config(hf)
    model, canonical = family(hf_config), check_hf(hf)
    with SafetensorsFolder(hf) as source:
        head = _head_layout(canonical[REWARD_HEAD]) if REWARD_HEAD in canonical else Layout()
        if dtype is not None and (hf / MANIFEST).exists():
            check_files(hf, [path.relative_to(hf).as_posix() for path in source.files])
        layout, dtypes = _with_dtypes(
            model.torch_dist_layout(hf_config, "float32") | head, _dtypes(source, canonical, dtype, hf_config)
        )
        if parallel == NO_RANKS:
            files = files_of_size(layout, MAX_FILE_BYTES, MAX_CHUNK_BYTES)
        else:
            files = files_of_ranks(model, hf_config, parallel, layout, MAX_CHUNK_BYTES)
        states = _states(hf, [hf / "config.json", *source.files])
        origin = {"format": "huggingface", "folder": str(hf.resolve()), "files": states}
        plan = {"source": origin, "dtype": dtype, "parallel": asdict(parallel), "table_version": TABLE_VERSION}
        total = sum(math.prod(shape) * DTYPE_BYTES[dtypes[name]] for name, shape in canonical.items())
        with built_aside(out, plan, num_bytes=total) as folder:
            iteration = folder / ITERATION_FOLDER
            iteration.mkdir(exist_ok=True)
            # Computed from the source by another path than the written data, so that `verify` proves the conversion.
            # One thread would be slower than the writing.
            pool = ThreadPoolExecutor(2)
            try:
                checksums = {
                    name: pool.submit(content_checksums, source, name, torch_dtype(dtypes[name])) for name in canonical
                }
                data = write_torch_dist(iteration, layout, files, source, progress=counter(progress, total))
                tensors = {
                    name: TensorRecord(dtypes[name], shape, *checksums[name].result(IO_TIMEOUT_S))
                    for name, shape in canonical.items()
                }
            finally:
                pool.shutdown(cancel_futures=True)
            check_same_tensors(hf, tensors)
            for path in filter(is_named_by_sha256, source.files):
                content_hash(path)
            if _states(hf, [hf / "config.json", *source.files]) != states:
                raise ValueError(f"{hf} changed while it was converted; start again when its writer is done")
            hf_config.pop(QUANTISED, None)
            write_json(iteration / HF_CONFIG_FILE, hf_config)
            write_json(iteration / RUN_CONFIG_FILE, {"model": model.megatron_arguments(hf_config)})
            (folder / "tokenizer").mkdir(exist_ok=True)
            copy_companions(hf, folder / "tokenizer")
            (folder / LATEST_FILE).write_text("0", encoding="utf-8")
            seal(folder, origin, tensors, {f"{ITERATION_FOLDER}/{name}": record for name, record in data.items()})


def convert_mcore_to_hf(
    mcore: Path,
    out: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the Hugging Face folder of a Megatron checkpoint: weights, config.json, tokenizer, generation settings.

    Tensors keep the dtypes of the checkpoint, unless `dtype` names one, as for `convert_hf_to_mcore`. If the checkpoint
    has a manifest, all that is read is compared with it. The next call with the same arguments continues a call that
    was killed.
    """
    opened = open_checkpoint(mcore)
    source, iteration = opened.tensors, opened.paths.iteration
    root = iteration.parent
    if (root / MANIFEST).exists():
        described = {f"{iteration.name}/{name}" for name in (METADATA_FILE, HF_CONFIG_FILE)}
        if dtype is not None:
            described |= {name for name in read_manifest(root).files if name.startswith(f"{iteration.name}/")}
        check_files(root, sorted(described))
    states = _states(iteration, [path for path in sorted(iteration.iterdir()) if path.is_file()])
    origin = {"format": "torch_dist", "folder": str(iteration.resolve()), "files": states}
    plan = {"source": origin, "dtype": dtype, "max_shard_bytes": max_shard_bytes, "table_version": TABLE_VERSION}
    config = {**opened.paths.hf_config}
    dtypes = _dtypes(source, source.names, dtype, config)
    total = sum(math.prod(source.shape(name)) * dtypes[name].itemsize for name in source.names)
    report = counter(progress, total)
    with built_aside(out, plan, num_bytes=total) as folder:
        tensors, files = _write_weights(
            folder, source, config, max_shard_bytes=max_shard_bytes, dtypes=dtypes, progress=report
        )
        check_same_tensors(root, tensors)
        # transformers 5 writes "dtype", older versions "torch_dtype"; a folder that both have edited has both.
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = dtype or dtype_name(_common_dtype(source, config))
        config.pop(QUANTISED, None)
        if family(config).leaves_out_mtp:
            config |= dict.fromkeys({"num_nextn_predict_layers", "num_mtp_layers"} & config.keys(), 0)
        if REWARD_HEAD in source.names:
            config["num_labels"] = 1
        if opened.paths.tokenizer is None:
            logger.warning("no tokenizer folder next to %s: the export has none", root)
        else:
            copy_companions(opened.paths.tokenizer, folder)
        write_json(folder / "config.json", without_lost_code(config, folder))
        # Who gets the folder need not know where it was made.
        made_of = "/".join(iteration.resolve().parts[-NUM_NAMED:])
        seal(folder, {"format": origin["format"], "folder": made_of}, tensors, files)


def _write_weights(
    folder: Path,
    source: CanonicalTensors | MergedTensors,
    config: HfConfig,
    *,
    max_shard_bytes: int,
    dtypes: Mapping[str, torch.dtype],
    progress: Report,
) -> tuple[dict[str, TensorRecord], dict[str, FileRecord]]:
    """Writes weights in the family's form; checksums of canonical tensors, and of files."""
    if not family(config).has_transposed_experts:
        return write_safetensors(
            folder, source, source.names, max_shard_bytes=max_shard_bytes, dtypes=dtypes, progress=progress
        )
    stacked = StackedExperts(source, source.names)
    stored = {name: dtypes[parts[0]] for name, parts in stacked.parts.items()}
    _, files = write_safetensors(
        folder, stacked, list(stored), max_shard_bytes=max_shard_bytes, dtypes=stored, progress=progress
    )
    return {
        name: TensorRecord(dtype_name(dtypes[name]), source.shape(name), *content_checksums(source, name, dtypes[name]))
        for name in source.names
    }, files


def export_adapters(mcore: Path, out: Path) -> None:
    """Writes the LoRA adapters of a Megatron checkpoint as a folder of the library PEFT."""
    opened = open_checkpoint(mcore)
    if opened.adapters is None:
        raise ValueError(
            f"--mcore {mcore}: the checkpoint has no adapters (policy.megatron_cfg.peft); mcore-to-hf converts its "
            "weights"
        )
    write_peft(opened.factors, opened.adapters, opened.paths.hf_config, out)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A Megatron checkpoint to read canonical tensors from."""

    paths: CheckpointPaths
    folder: TorchDistFolder
    tensors: CanonicalTensors | MergedTensors
    factors: CanonicalTensors
    adapters: CheckpointAdapters | None


def open_checkpoint(mcore: Path) -> OpenCheckpoint:
    """The checkpoint in a step folder, a weights folder or an iter_ folder."""
    paths = find_checkpoint(mcore)
    if (otherwise := family(paths.hf_config).held_otherwise) and not _is_ours(paths.iteration):
        raise ValueError(
            f"--mcore {paths.iteration}: other trainers than mrl wrote it, and they hold {otherwise}; have its trainer "
            "write a Hugging Face folder, and convert that"
        )
    folder = TorchDistFolder(paths.iteration, verify=not (paths.iteration.parent / MANIFEST).exists())
    rows, vocabulary = folder.shape(EMBEDDING_KEY)[0], paths.hf_config.get("vocab_size")
    if not isinstance(vocabulary, int) or rows < vocabulary:
        raise ValueError(
            f"{paths.iteration}: {EMBEDDING_KEY} has {rows} rows, less than vocab_size={vocabulary} of {HF_CONFIG_FILE}"
        )
    layout = family(paths.hf_config).torch_dist_layout(
        paths.hf_config, "float32", rows, stacked_layers=_STACKED_LAYERS_KEY in folder.keys
    )
    if REWARD_HEAD_KEY in folder.keys:
        layout = layout | _head_layout(folder.shape(REWARD_HEAD_KEY))
    adapters = find_adapters(paths, folder)
    if adapters is None:
        tensors = CanonicalTensors(folder, layout)
        return OpenCheckpoint(paths, folder, tensors, tensors, None)
    factors = CanonicalTensors(folder, layout | adapters.layout)
    return OpenCheckpoint(paths, folder, MergedTensors(factors, adapters), factors, adapters)


def _is_ours(iteration: Path) -> bool:
    """Tells a checkpoint of mrl by its settings in JSON: Megatron-Bridge writes YAML, Megatron-LM nothing."""
    try:
        return isinstance(read_json(iteration / RUN_CONFIG_FILE), dict)
    except (FileNotFoundError, ValueError):
        return False


def _common_dtype(source: CanonicalTensors | MergedTensors, config: HfConfig) -> torch.dtype:
    """The dtype of most values of layers, in which transformers holds all: other tensors may be wider or narrower."""
    numbers = Counter[torch.dtype]()
    for rules in family(config).model(config, None).layers:
        for tensor in (tensor for rule in rules for tensor in rule.cut.tensors):
            numbers[source.dtype(tensor.name)] += math.prod(tensor.shape)
    return max(numbers, key=lambda dtype: (numbers[dtype], dtype.itemsize))


def _head_layout(shape: tuple[int, ...]) -> Layout:
    return {Slot(REWARD_HEAD_KEY): SlotLayout(shape, "float32", (Piece(REWARD_HEAD, full(shape), full(shape)),))}


def _states(root: Path, paths: Iterable[Path]) -> dict[str, list[int]]:
    return {path.relative_to(root).as_posix(): file_state(path) for path in paths}


def _dtypes(source: BoxSource, names: Iterable[str], dtype: str | None, hf_config: HfConfig) -> dict[str, torch.dtype]:
    """The dtype to write tensors in: its own, or `dtype`, which narrows no tensor that all holders keep in float32."""
    if dtype is None:
        return {name: source.dtype(name) for name in names}
    wanted, kept = torch_dtype(dtype), family(hf_config).float32_tensors(hf_config)
    return {name: torch.promote_types(source.dtype(name), wanted) if name in kept else wanted for name in names}


def _with_dtypes(layout: Layout, dtypes: Mapping[str, torch.dtype]) -> tuple[Layout, dict[str, str]]:
    """The layout with each slot in a dtype that holds all values of its tensors, and each tensor's resulting dtype."""
    stored: Layout = {}
    for slot, content in layout.items():
        common = functools.reduce(torch.promote_types, {dtypes[piece.name] for piece in content.pieces})
        stored[slot] = replace(content, dtype=dtype_name(common))
    return stored, {piece.name: content.dtype for content in stored.values() for piece in content.pieces}


def differences(first: Path, second: Path) -> Iterator[str]:
    """Yields a line per difference between canonical tensors of two folders: names, shapes, dtypes, bits of values."""
    with ExitStack() as stack:
        (names, a), (other_names, b) = (_opened(folder, stack) for folder in (first, second))
        yield from (f"{name}: only in {first}" for name in sorted(names - other_names))
        yield from (f"{name}: only in {second}" for name in sorted(other_names - names))
        for name in sorted(names & other_names):
            if a.shape(name) != b.shape(name):
                yield f"{name}: shape {a.shape(name)} and {b.shape(name)}"
                continue
            faults = [_value_fault(a, b, name)]
            if a.dtype(name) != b.dtype(name):
                faults.insert(0, f"dtype {dtype_name(a.dtype(name))} and {dtype_name(b.dtype(name))}")
            if any(faults):
                yield f"{name}: {'; '.join(filter(None, faults))}"


def faults_against_manifest(folder: Path) -> Iterator[str]:
    """Yields one line per difference between a folder and its manifest: every file, then the values of every tensor."""
    files = file_faults(folder)
    yield from files
    if files:
        return
    expected = read_manifest(folder).tensors
    with ExitStack() as stack:
        names, source = _opened(folder, stack)
        yield from (
            f"{name}: in the manifest or in the files, but not in both" for name in sorted(names ^ expected.keys())
        )
        for name in sorted(names & expected.keys()):
            record = expected[name]
            found = (dtype_name(source.dtype(name)), source.shape(name))
            if found != (record.dtype, record.shape):
                yield f"{name}: {found[0]} {found[1]} instead of {record.dtype} {record.shape}"
            elif content_checksums(source, name, torch_dtype(record.dtype)) != (record.sha256, record.crc32):
                yield f"{name}: its values are not those of the model that was converted"


def _opened(folder: Path, stack: ExitStack) -> tuple[set[str], BoxSource]:
    if (folder / "config.json").exists():
        source, config = stack.enter_context(SafetensorsFolder(folder)), read_model_config(folder)
        stored = stored_tensors(folder)
        names = {name for name in stored if not is_unused(name, config)}
        return names | ({EMBEDDING} if has_output_alone(stored, config) else set()), source
    tensors = open_checkpoint(folder).tensors
    return set(tensors.names), tensors


def _value_fault(a: BoxSource, b: BoxSource, name: str) -> str:
    """Describes how two tensors of one shape differ; "" if they are equal. Compares equal dtypes bit by bit."""
    num_different, largest, shape = 0, 0.0, a.shape(name)
    dtype = torch.promote_types(a.dtype(name), b.dtype(name))
    for box in blocks(shape, dtype.itemsize):
        first, second = (torch.empty(lengths(box), dtype=dtype) for _ in range(2))
        a.read_into(name, box, first)
        b.read_into(name, box, second)
        if byte_view(first) == byte_view(second):
            continue
        left, right = (tensor.reshape(-1).view(torch.uint8).view(-1, dtype.itemsize) for tensor in (first, second))
        num_different += int((left != right).any(dim=1).sum())
        largest = max(largest, float((first.double() - second.double()).abs().nan_to_num(float("inf")).max()))
    if num_different:
        return f"{num_different} of {torch.Size(shape).numel()} values differ, by at most {largest:.3g}"
    return ""
