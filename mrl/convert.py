# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.convert`: converts, compares and verifies weights, and empties the cache of converted models."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from conversion.cache import DAY_S, cache_items, collect_garbage
from conversion.convert import (
    convert_hf_to_mcore,
    convert_mcore_to_hf,
    differences,
    export_adapters,
    faults_against_manifest,
)
from conversion.families.common import MegatronParallel
from conversion.progress import log_progress
from mrl import env
from mrl.config.command_line import number
from mrl.config.model import model_folder
from mrl.config.secrets import run_entry, start_logging
from mrl.config.texts import aligned, spell_bytes
from mrl.store.checkpoints import checkpoints_text, find_damage, is_run_folder
from mrl.store.console import bar_progress
from mrl.store.marks import MARKER

logger = logging.getLogger(__name__)

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_TO_MCORE, _TO_HF, _ADAPTERS = "hf-to-mcore", "mcore-to-hf", "adapters"
# Enough to see the pattern; a folder of another model has the same complaint of every tensor.
MAX_ALIKE = 3
_NUMBER = re.compile(r"\b\d[\w.+-]*")
KEY_LENGTH = 12
NEMO_RLS = ("--config", "--megatron-ckpt-path", "--hf-ckpt-path", "--dcp-ckpt-path")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 1 if folders differ or one is damaged; 2 with one message if the input is at fault."""
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    if found := [word for word in words if word.partition("=")[0] in NEMO_RLS]:
        parser.error(
            f"{found[0]}: an option of NeMo RL's converters; write mcore-to-hf --mcore RUN/step_N --out OUT, "
            "which needs no config (of checkpoints that Megatron has written; DTensor's are not read)"
        )
    options = parser.parse_args(words)
    start_logging()
    try:
        return _run(options)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    except OSError as error:
        logger.error("%s", error)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command == "compare":
        return _report(differences(options.first, options.second), "equal: names, shapes, dtypes and values")
    if options.command == "cache":
        if options.cache_command == "list":
            list_cache()
        else:
            max_bytes = None if options.max_size is None else size_in_bytes(options.max_size, option="--max-size")
            clean_cache(older_than_days=options.older_than, max_bytes=max_bytes, is_trial=options.dry_run)
        return 0
    if options.command == "verify" and (options.folder / MARKER).exists():
        damage = find_damage(options.folder)
        found = [f"{options.folder}: {damage}"] if damage else []
        return _report(found, f"{options.folder} is what its manifest says: every file")
    if options.command == "verify":
        return _report(
            faults_against_manifest(options.folder),
            f"{options.folder} is what its manifest says: every file and every tensor",
        )
    if options.command in (_ADAPTERS, _TO_HF) and is_run_folder(options.mcore):
        raise ValueError(f"--mcore {options.mcore} is a run folder; {checkpoints_text(options.mcore)}")
    started = time.monotonic()
    progress = bar_progress(options.command, sys.stderr) if sys.stderr.isatty() else log_progress(options.command)
    if options.command == _ADAPTERS:
        export_adapters(options.mcore, options.out)
    elif options.command == _TO_HF:
        max_shard_bytes = size_in_bytes(options.max_shard_size)
        convert_mcore_to_hf(
            options.mcore,
            options.out,
            max_shard_bytes=max_shard_bytes,
            dtype=_DTYPES.get(options.dtype),
            progress=progress,
        )
    else:
        parallel = MegatronParallel(
            tp=options.tp,
            pp=options.pp,
            ep=options.ep,
            etp=options.etp,
            num_layers_in_first_pipeline_stage=options.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=options.num_layers_in_last_pipeline_stage,
        )
        convert_hf_to_mcore(
            model_folder(options.hf),
            options.out,
            parallel=parallel,
            dtype=_DTYPES.get(options.dtype),
            progress=progress,
        )
    logger.info("%s written in %.1f s", options.out, time.monotonic() - started)
    return 0


def list_cache() -> None:
    """Logs one line for each cache entry, for entries that are being built, and for leftovers of killed processes."""
    root = cache_folder()
    lines = [("key", "size", "unused for", "state", "model")]
    items = cache_items(root)
    for item in items:
        if item.entry is not None:
            model, state = item.entry.model, "in use" if item.is_live else "complete"
        else:
            model, state = "", "being built" if item.is_live else "leftover"
        seconds = time.time() - item.used
        age = f"{seconds / DAY_S:.1f} days" if seconds >= DAY_S else f"{max(seconds, 0) / 3600:.1f} hours"
        lines.append((item.key[:KEY_LENGTH], spell_bytes(item.num_bytes), age, state, model))
    for line in aligned(lines):
        logger.info("%s", line)
    logger.info("%s in %s", spell_bytes(sum(item.num_bytes for item in items)), root)


def clean_cache(*, older_than_days: float | None, max_bytes: int | None, is_trial: bool) -> None:
    """Removes the entries and leftovers that `conversion.cache.collect_garbage` finds; logs each, also in a trial."""
    removals = collect_garbage(
        cache_folder(), now=time.time(), older_than_days=older_than_days, max_bytes=max_bytes, is_trial=is_trial
    )
    removed = "to be removed" if is_trial else "removed"
    for removal in removals:
        model = removal.item.entry.model if removal.item.entry else ""
        logger.info(
            "%s  %s  %s (%s)  %s",
            removal.item.key[:KEY_LENGTH],
            spell_bytes(removal.item.num_bytes),
            removed,
            removal.reason,
            model,
        )
    logger.info("%s %s", spell_bytes(sum(removal.item.num_bytes for removal in removals)), removed)


def cache_folder() -> Path:
    root = env.cache_root()
    if root is None:
        raise ValueError(
            f"{env.MRL_CACHE.name}=off: there is no cache to look at; unset it, or set it to the folder of the cache"
        )
    return root


def _report(lines: Iterable[str], if_none: str) -> int:
    """Logs lines `name: complaint`, a few of each complaint and the number of others; returns 1 if any."""
    counts = Counter[str]()
    for line in lines:
        complaint = _NUMBER.sub("N", line.partition(": ")[2])
        counts[complaint] += 1
        if counts[complaint] <= MAX_ALIKE:
            logger.info("%s", line)
    for complaint, count in counts.items():
        if count > MAX_ALIKE:
            logger.info("and %d more: %s", count - MAX_ALIKE, complaint)
    if not counts:
        logger.info("%s", if_none)
    return min(len(counts), 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mrl.convert",
        description="Convert, compare and verify weights of Hugging Face folders and Megatron checkpoints.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_mcore = commands.add_parser(_TO_MCORE, help="a Hugging Face folder to a Megatron torch_dist checkpoint")
    to_mcore.add_argument(
        "--hf", required=True, help="folder with config.json and safetensors files, or the id of a model on the Hub"
    )
    for axis, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        to_mcore.add_argument(
            f"--{axis}",
            type=number(int, least=1),
            default=1,
            help=f"{what} parallel size of the ranks that each get a file of their own (default: 1)",
        )
    for stage in ("first", "last"):
        option = f"--num-layers-in-{stage}-pipeline-stage"
        to_mcore.add_argument(
            option,
            type=number(int, least=1),
            metavar="N",
            help=f"layers of the {stage} stage (default: as many as the others)",
        )
    to_hf = commands.add_parser(
        _TO_HF, help="a Megatron torch_dist checkpoint to a Hugging Face folder, adapters merged"
    )
    to_hf.add_argument(
        "--mcore", type=Path, required=True, help="a step_N folder of a run, its policy/weights, or an iter_ folder"
    )
    to_hf.add_argument(
        "--max-shard-size",
        default="5GB",
        help="of one safetensors file, with MB, GB, MiB or GiB (default: %(default)s)",
    )
    for direction in (to_mcore, to_hf):
        direction.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
        direction.add_argument("--dtype", choices=sorted(_DTYPES), help="of all tensors (default: each keeps its own)")
    adapters = commands.add_parser(
        _ADAPTERS, help="the LoRA adapters of a Megatron checkpoint to a folder of the library PEFT"
    )
    adapters.add_argument(
        "--mcore", type=Path, required=True, help="a step_N folder of a run, its policy/weights, or an iter_ folder"
    )
    adapters.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    compare = commands.add_parser(
        "compare", help="names, shapes, dtypes and values of two folders; exit code 1 if they differ"
    )
    compare.add_argument("first", type=Path, metavar="A", help="a Hugging Face folder or a Megatron checkpoint")
    compare.add_argument("second", type=Path, metavar="B", help="another one")
    verify = commands.add_parser(
        "verify", help="files and tensors of a converted folder against its manifest; exit code 1 if one is damaged"
    )
    verify.add_argument("folder", type=Path, metavar="DIR", help="a step_N of a run, or a converted folder")
    cache = commands.add_parser("cache", help="the cache of converted models that training runs fill")
    cache_commands = cache.add_subparsers(dest="cache_command", required=True)
    cache_commands.add_parser("list", help="entries and leftovers: key, size, time since the last use, state, model")
    clean = cache_commands.add_parser(
        "gc", help="remove what killed processes left, and entries as asked for, but none that is in use"
    )
    clean.add_argument(
        "--older-than", type=number(float, least=0), metavar="DAYS", help="entries that were not used for so long"
    )
    clean.add_argument(
        "--max-size", metavar="SIZE", help="the longest unused, until the others take no more, with MB, GB, MiB or GiB"
    )
    clean.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    return parser


def size_in_bytes(text: str, *, option: str = "--max-shard-size") -> int:
    """Bytes of a size such as "5GB" or "512 MiB", the value of `option`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise ValueError(f"{option} {text!r} is not a positive number with one of the units {', '.join(_UNITS)}")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


if __name__ == "__main__":
    sys.exit(run_entry(main))
