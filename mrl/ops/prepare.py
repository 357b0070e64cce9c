# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.prepare tiny|tiny_dense|nano3|verify`: first models and data, download checks; see mrl/recipes."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from mrl.config.command_line import number
from mrl.config.secrets import start_logging
from mrl.recipes.tiny import prepare_tiny
from mrl.store.disk import way_out

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0, or 2 with one message if the input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m mrl.prepare", description="Make a model and its data.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, model in {"tiny": "nemotron_h", "tiny_dense": "dense qwen3"}.items():
        tiny = kinds.add_parser(
            kind, help=f"a tiny {model} that adds two-digit numbers and forgets the carry, and additions to train it on"
        )
        tiny.add_argument(
            "--out", type=Path, default=Path("prepared", kind), help="folder to write (default: %(default)s)"
        )
        tiny.add_argument(
            "--seed",
            type=number(int, least=0, most=2**63 - 1),
            default=0,
            help="of the splits and the warm start (default: %(default)s)",
        )
    nano3 = kinds.add_parser(
        "nano3", help="the Nemotron-3-Nano RL blend, its placeholders filled in from the data sets that they stand for"
    )
    nano3.add_argument(
        "--source",
        type=Path,
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders into which the data sets were downloaded",
    )
    nano3.add_argument("--out", type=Path, required=True, help="folder for train-split.jsonl and val-split.jsonl")
    nano3.add_argument(
        "--validation-rows",
        type=number(int, least=0),
        default=1000,
        help="last rows of the blend, held out (default: %(default)s)",
    )
    verify = kinds.add_parser(
        "verify", help="say whether downloaded models and prepared data are whole, and disks large enough"
    )
    verify.add_argument("--model", type=Path, nargs="*", default=[], metavar="DIR", help="Hugging Face folders")
    verify.add_argument(
        "--data", type=Path, nargs="*", default=[], metavar="DIR", help="folders that `nano3` has written"
    )
    verify.add_argument("--disk", type=Path, nargs="*", default=[], metavar="DIR", help="folders whose disks need room")
    verify.add_argument(
        "--min-free-gb", type=number(float, least=0), default=200, help="of room on each of them (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    start_logging()
    try:
        if options.kind == "verify":
            from mrl.ops.doctor.model_files import verify

            verify(options.model, options.data, options.disk, min_free_bytes=int(options.min_free_gb * 1e9))
        elif options.kind == "nano3":
            from mrl.nemo.nano3 import prepare_nano3

            prepare_nano3(options.source, options.out, num_validation=options.validation_rows)
        else:
            prepare_tiny(options.out, seed=options.seed, kind=options.kind)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    except OSError as error:
        out = options.out if options.kind != "verify" else Path()
        logger.error("%s; %s", error, way_out(error, out) or "name another folder")
        return 2
    return 0
