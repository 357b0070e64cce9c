"""Entry: converts weights. `python -m mrl.convert mcore-to-hf --mcore DIR --out DIR` and `hf-to-mcore --hf DIR --out DIR`."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conversion.checkpoint_folder import HF_CONFIG_FILE, Checkpoint, copy_companions, find_checkpoint
from conversion.families.registry import family
from conversion.safetensors_io import write_safetensors
from conversion.tensors import dtype_name
from conversion.to_megatron import convert_hf_to_mcore, write_aside
from conversion.torch_dist_io import EMBEDDING_KEY, TorchDistFolder, canonical_tensors

logger = logging.getLogger(__name__)

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0, or 2 with one message if the input is at fault."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    started = time.monotonic()
    try:
        if options.direction == "mcore-to-hf":
            mcore_to_hf(options.mcore, options.out, max_shard_bytes=size_in_bytes(options.max_shard_size))
        else:
            convert_hf_to_mcore(options.hf, options.out)
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
            copy_companions(checkpoint.tokenizer, folder)

    write_aside(out, write)


def _padded_vocabulary(source: TorchDistFolder, checkpoint: Checkpoint) -> int:
    rows, vocabulary = source.shape(EMBEDDING_KEY)[0], checkpoint.hf_config.get("vocab_size")
    if not isinstance(vocabulary, int) or rows < vocabulary:
        raise ValueError(f"{checkpoint.iteration}: {EMBEDDING_KEY} has {rows} rows, less than vocab_size={vocabulary} of {HF_CONFIG_FILE}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
