"""Entry: converts weights. `python -m mrl.convert mcore-to-hf --mcore DIR --out DIR` and `hf-to-mcore --hf DIR --out DIR`."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conversion.boxes import Layout
from conversion.families.registry import family
from conversion.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsFolder, write_safetensors
from conversion.tensors import dtype_name
from conversion.torch_dist_io import EMBEDDING_KEY, TorchDistFolder, canonical_tensors, write_torch_dist

logger = logging.getLogger(__name__)

ITERATION_FOLDER = "iter_0000000"
LATEST_FILE = "latest_checkpointed_iteration.txt"
HF_CONFIG_FILE = "hf_config.json"

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
# Files of a Hugging Face folder that describe weights; everything else next to them is tokenizer, template or generation settings.
_WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, "config.json")
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0, or 2 with one message if the input is at fault."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    started = time.monotonic()
    try:
        if options.direction == "mcore-to-hf":
            mcore_to_hf(options.mcore, options.out, max_shard_bytes=size_in_bytes(options.max_shard_size))
        else:
            hf_to_mcore(options.hf, options.out)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    logger.info("%s written in %.1f s", options.out, time.monotonic() - started)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mrl.convert", description="Convert weights between Megatron checkpoints and Hugging Face."
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    to_hf = directions.add_parser("mcore-to-hf", help="a Megatron torch_dist checkpoint to a Hugging Face folder")
    to_hf.add_argument("--mcore", type=Path, required=True, help="a step_N folder of a run, its policy/weights, or an iter_ folder")
    to_hf.add_argument("--max-shard-size", default="5GB", help="of one safetensors file, with MB, GB, MiB or GiB (default: %(default)s)")
    to_mcore = directions.add_parser("hf-to-mcore", help="a Hugging Face folder to a Megatron torch_dist checkpoint")
    to_mcore.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors files")
    for direction in (to_hf, to_mcore):
        direction.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    return parser


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as "5GB" or "512 MiB".

    Raises:
        ValueError: it is not a positive number with a unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"--max-shard-size {text!r} is not a positive number with one of the units {', '.join(_UNITS)}")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


@dataclass(frozen=True)
class Checkpoint:
    """Where the parts of a Megatron checkpoint lie."""

    iteration: Path
    hf_config: dict[str, object]
    tokenizer: Path | None


def find_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a step folder, a weights folder or an iter_ folder.

    Raises:
        ValueError: there is none, or no copy of the model's config.json beside it.
    """
    if not folder.is_dir():
        raise ValueError(f"--mcore {folder} is not a folder; name a step_N folder, its policy/weights, or an iter_ folder")
    weights = folder / "policy" / "weights" if (folder / "policy" / "weights").is_dir() else folder
    iteration = weights if (weights / ".metadata").exists() else _latest_iteration(weights)
    configs = [path for path in (iteration / HF_CONFIG_FILE, iteration.parent / HF_CONFIG_FILE) if path.exists()]
    if not configs:
        raise ValueError(f"--mcore {folder}: {iteration} has no {HF_CONFIG_FILE}, a copy of the Hugging Face config.json; put one there")
    tokenizers = [path for path in (iteration.parent / "tokenizer", iteration.parent.parent / "tokenizer") if path.is_dir()]
    return Checkpoint(iteration, _read_config(configs[0]), tokenizers[0] if tokenizers else None)


def _latest_iteration(weights: Path) -> Path:
    latest = weights / LATEST_FILE
    if latest.exists():
        number = latest.read_text(encoding="utf-8").strip()
        found = [weights / f"iter_{int(number):07d}"] if number.isdigit() else []
    else:
        found = sorted(weights.glob("iter_*"))
    if not found or not (found[-1] / ".metadata").exists():
        raise ValueError(
            f"--mcore {weights}: no complete Megatron checkpoint there; name a step_N folder, its policy/weights, or an iter_ folder"
        )
    return found[-1]


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}; it must be a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object; it must be a model's config.json")
    return config


def mcore_to_hf(mcore: Path, out: Path, *, max_shard_bytes: int) -> None:
    """Writes the Hugging Face folder of a Megatron checkpoint: weights in the checkpoint's dtype, config.json, tokenizer files.

    Raises:
        ValueError: the checkpoint is missing, incomplete, or does not fit its config; or `out` exists.
    """
    checkpoint = find_checkpoint(mcore)
    source = TorchDistFolder(checkpoint.iteration)
    layout = family(checkpoint.hf_config).torch_dist_layout(checkpoint.hf_config, "float32", _padded_vocabulary(source, checkpoint))

    def write(folder: Path) -> None:
        write_safetensors(folder, canonical_tensors(source, layout), max_shard_bytes=max_shard_bytes)
        config = {**checkpoint.hf_config}
        # transformers 5 writes "dtype", older versions "torch_dtype".
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(source.dtype(EMBEDDING_KEY))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if checkpoint.tokenizer is None:
            logger.warning("no tokenizer folder beside %s: the export has none", checkpoint.iteration.parent)
        else:
            _copy_companions(checkpoint.tokenizer, folder)

    _write_aside(out, write)


def _padded_vocabulary(source: TorchDistFolder, checkpoint: Checkpoint) -> int:
    rows, vocabulary = source.shape(EMBEDDING_KEY)[0], checkpoint.hf_config.get("vocab_size")
    if not isinstance(vocabulary, int) or rows < vocabulary:
        raise ValueError(f"{checkpoint.iteration}: {EMBEDDING_KEY} has {rows} rows, less than vocab_size={vocabulary} of {HF_CONFIG_FILE}")
    return rows


def hf_to_mcore(hf: Path, out: Path) -> None:
    """Writes the Megatron checkpoint of a Hugging Face folder, loadable at any parallel layout, in the dtypes of the folder.

    Raises:
        ValueError: the folder is missing or incomplete, its model is not supported; or `out` exists.
    """
    if not (hf / "config.json").exists():
        raise ValueError(f"--hf {hf} has no config.json; name the folder of a Hugging Face model")
    hf_config = _read_config(hf / "config.json")
    model = family(hf_config)
    with SafetensorsFolder(hf) as source:
        source.check(model.canonical(hf_config))
        layout = _with_stored_dtypes(model.torch_dist_layout(hf_config, "float32"), source)

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
            _copy_companions(hf, folder / "tokenizer")
            (folder / LATEST_FILE).write_text("0", encoding="utf-8")

        _write_aside(out, write)


def _with_stored_dtypes(layout: Layout, source: SafetensorsFolder) -> Layout:
    """The layout in the dtypes of the source, so that nothing is cast on the way and back."""
    stored: Layout = {}
    for slot, content in layout.items():
        dtypes = {dtype_name(source.dtype(piece.name)) for piece in content.pieces}
        if len(dtypes) > 1:
            raise ValueError(
                f"tensors of {slot} have several dtypes ({sorted(dtypes)}): {content.pieces[0].name} and others; store them in one"
            )
        stored[slot] = replace(content, dtype=dtypes.pop())
    return stored


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in _COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in _WEIGHT_FILES:
                shutil.copyfile(path, folder / path.name)


def _write_aside(out: Path, write: Callable[[Path], None]) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
