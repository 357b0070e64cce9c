"""Hugging Face folder to Megatron checkpoint, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from conversion.boxes import DTYPE_BYTES, Layout
from conversion.families.common import Family, HfConfig, MegatronParallel
from conversion.families.registry import family
from conversion.progress import Progress, counter
from conversion.storage.attempts import built_aside
from conversion.storage.checkpoint_folder import (
    HF_CONFIG_FILE,
    ITERATION_FOLDER,
    LATEST_FILE,
    copy_companions,
    file_state,
    read_config,
    write_json,
)
from conversion.storage.chunks import Chunk, files_of_ranks, files_of_size
from conversion.storage.file_boxes import content_checksums
from conversion.storage.files import IO_TIMEOUT_S
from conversion.storage.manifest import MANIFEST, TABLE_VERSION, TensorRecord, check_files, check_same_tensors, seal
from conversion.storage.safetensors_io import SafetensorsFolder
from conversion.storage.torch_dist_out import MAX_CHUNK_BYTES, write_torch_dist
from conversion.tensors import dtype_name, torch_dtype

NO_RANKS = MegatronParallel()

MAX_FILE_BYTES = 5 * 10**9
"""What an interruption costs at most: whole files are kept."""

Result = TypeVar("Result")


def convert_hf_to_mcore(
    hf: Path, out: Path, *, parallel: MegatronParallel = NO_RANKS, dtype: str | None = None, progress: Progress | None = None
) -> None:
    """Writes the Megatron checkpoint of a Hugging Face folder, loadable at any parallel layout.

    `parallel` says only how data are cut into files: one for each (tp, pp, ep, etp) rank, which then reads no other; by default, files of
    at most 5 GB. Tensors keep the
    dtypes of the source, unless `dtype` ("bfloat16" or "float32") names one for all. A call that was killed is continued by the next
    with the same arguments.

    Raises:
        ValueError: the folder is missing or incomplete, its model is not supported, or it changes meanwhile; or `out` exists.
    """
    if not (hf / "config.json").exists():
        raise ValueError(f"--hf {hf} has no config.json; name the folder of a Hugging Face model")
    hf_config = read_config(hf / "config.json")
    model = family(hf_config)
    with SafetensorsFolder(hf) as source:
        canonical = model.canonical(hf_config)
        source.check(canonical)
        if dtype is not None and (hf / MANIFEST).exists():
            # The checksums of tensors that are cast say nothing of what they are cast to.
            check_files(hf, [path.name for path in source.files])
        dtypes = {name: dtype or dtype_name(source.dtype(name)) for name in canonical}
        layout = _with_dtypes(model.torch_dist_layout(hf_config, "float32"), dtypes)
        files = _cut_into_files(model, hf_config, parallel, layout)
        origin = {"format": "huggingface", "folder": str(hf.resolve()), "files": _identity(hf, source)}
        plan = {"source": origin, "dtype": dtype, "parallel": asdict(parallel), "table_version": TABLE_VERSION}
        total = sum(math.prod(shape) * DTYPE_BYTES[dtypes[name]] for name, shape in canonical.items())
        with built_aside(out, plan) as folder:
            iteration = folder / ITERATION_FOLDER
            iteration.mkdir(exist_ok=True)
            # Taken from the source by another path than what is written, so that `verify` proves the way from one to the other.
            with _in_background(lambda name: content_checksums(source, name, torch_dtype(dtypes[name])), canonical) as checksums:
                data = write_torch_dist(iteration, layout, files, source, progress=counter(progress, total))
                tensors = {
                    name: TensorRecord(dtypes[name], shape, *checksums[name].result(IO_TIMEOUT_S)) for name, shape in canonical.items()
                }
            check_same_tensors(hf, tensors)
            if _identity(hf, source) != origin["files"]:
                raise ValueError(f"{hf} changed while it was converted; start again when its writer is done")
            write_json(iteration / HF_CONFIG_FILE, hf_config)
            # JSON is YAML too. NeMo RL's loader looks for this file.
            write_json(iteration / "run_config.yaml", {"model": model.megatron_arguments(hf_config)})
            (folder / "tokenizer").mkdir(exist_ok=True)
            copy_companions(hf, folder / "tokenizer")
            (folder / LATEST_FILE).write_text("0", encoding="utf-8")
            seal(folder, origin, tensors, {f"{ITERATION_FOLDER}/{name}": record for name, record in data.items()})


def _cut_into_files(model: Family, hf_config: HfConfig, parallel: MegatronParallel, layout: Layout) -> list[list[Chunk]]:
    if parallel == NO_RANKS:
        return files_of_size(layout, MAX_FILE_BYTES, MAX_CHUNK_BYTES)
    return files_of_ranks(model, hf_config, parallel, layout, MAX_CHUNK_BYTES)


def _identity(hf: Path, source: SafetensorsFolder) -> dict[str, object]:
    """What tells another state of the source; contents are told by the checksums of the tensors."""
    return {path.name: file_state(path) for path in (hf / "config.json", *source.files)}


@contextmanager
def _in_background(work: Callable[[str], Result], names: Iterable[str]) -> Iterator[dict[str, Future[Result]]]:
    """Results by name, made in their order while the `with` block runs."""
    # One thread would be slower than the writing.
    pool = ThreadPoolExecutor(2)
    try:
        yield {name: pool.submit(work, name) for name in names}
    finally:
        pool.shutdown(cancel_futures=True)


def _with_dtypes(layout: Layout, dtypes: Mapping[str, str]) -> Layout:
    """The layout in the dtypes of its canonical tensors."""
    stored: Layout = {}
    for slot, content in layout.items():
        found = {dtypes[piece.name] for piece in content.pieces}
        if len(found) > 1:
            raise ValueError(
                f"tensors of {slot} have several dtypes ({sorted(found)}): {content.pieces[0].name} and others; set --dtype to store one"
            )
        stored[slot] = replace(content, dtype=found.pop())
    return stored
