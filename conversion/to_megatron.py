"""Hugging Face folder to Megatron checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from conversion.boxes import Layout, full
from conversion.checkpoint_folder import HF_CONFIG_FILE, ITERATION_FOLDER, LATEST_FILE, copy_companions, read_config
from conversion.families.common import MegatronParallel
from conversion.families.registry import family
from conversion.manifest import Manifest, TensorRecord, file_names, file_record, write_manifest
from conversion.safetensors_io import SafetensorsFolder
from conversion.tensors import dtype_name, torch_dtype
from conversion.torch_dist_io import write_torch_dist

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) now and then."""
ONE_FILE = MegatronParallel()


def convert_hf_to_mcore(
    hf: Path, out: Path, *, parallel: MegatronParallel = ONE_FILE, dtype: str | None = None, progress: Progress | None = None
) -> None:
    """Writes the Megatron checkpoint of a Hugging Face folder, loadable at any parallel layout.

    `parallel` says only how data are cut into files. Tensors keep the dtypes of the source, unless `dtype` ("bfloat16" or "float32")
    names one for all.

    Raises:
        ValueError: the folder is missing or incomplete, its model is not supported; or `out` exists.
    """
    if not (hf / "config.json").exists():
        raise ValueError(f"--hf {hf} has no config.json; name the folder of a Hugging Face model")
    hf_config = read_config(hf / "config.json")
    model = family(hf_config)
    with SafetensorsFolder(hf) as source:
        canonical = model.canonical(hf_config)
        source.check(canonical)
        dtypes = {name: dtype or dtype_name(source.dtype(name)) for name in canonical}
        layout = _with_dtypes(model.torch_dist_layout(hf_config, "float32"), dtypes)

        def write(folder: Path) -> None:
            iteration = folder / ITERATION_FOLDER
            iteration.mkdir()
            write_torch_dist(iteration, layout, source.read)
            (iteration / HF_CONFIG_FILE).write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
            # JSON is YAML too. NeMo RL's loader looks for this file.
            (iteration / "run_config.yaml").write_text(
                json.dumps({"model": model.megatron_arguments(hf_config)}, indent=2), encoding="utf-8"
            )
            (folder / "tokenizer").mkdir()
            copy_companions(hf, folder / "tokenizer")
            (folder / LATEST_FILE).write_text("0", encoding="utf-8")
            tensors = {name: _tensor_record(source, name, shape, dtypes[name]) for name, shape in canonical.items()}
            files = {name: file_record(folder / name) for name in file_names(folder)}
            write_manifest(folder, Manifest({"format": "huggingface", "folder": hf.name}, tensors, files))

        write_aside(out, write)


def _tensor_record(source: SafetensorsFolder, name: str, shape: tuple[int, ...], dtype: str) -> TensorRecord:
    tensor = source.read(name, full(shape)).to(torch_dtype(dtype)).contiguous()
    return TensorRecord(dtype, shape, hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest())


def _with_dtypes(layout: Layout, dtypes: dict[str, str]) -> Layout:
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


def write_aside(out: Path, write: Callable[[Path], None]) -> None:
    """Makes the folder `out` by `write`, all of it or nothing."""
    if out.exists():
        raise ValueError(f"--out {out} exists; remove it or choose another")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        write(aside)
        aside.chmod(0o755)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
