"""Entry: makes what a first run needs. `python -m mrl.prepare tiny`: a tiny model and its problems; `nano3`: a published blend.

`verify` says whether what was downloaded is whole.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from conversion.storage.files import publish

logger = logging.getLogger(__name__)

# Raised when the same arguments would give other files.
RECIPE_VERSION = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0, or 2 with one message if the input is at fault."""
    parser = argparse.ArgumentParser(prog="python -m mrl.prepare", description="Make a model and its data.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser(
        "tiny", help="a tiny nemotron_h that adds two-digit numbers and forgets the carry, and additions to train it on"
    )
    tiny.add_argument("--out", type=Path, default=Path("prepared/tiny"), help="folder to write (default: %(default)s)")
    tiny.add_argument("--seed", type=int, default=0, help="of the splits and the warm start (default: %(default)s)")
    nano3 = kinds.add_parser(
        "nano3", help="the Nemotron-3-Nano RL blend, its placeholders filled in from the data sets that they stand for"
    )
    nano3.add_argument(
        "--source", type=Path, nargs="+", required=True, metavar="DIR", help="folders into which the data sets were downloaded"
    )
    nano3.add_argument("--out", type=Path, required=True, help="folder for train-split.jsonl and val-split.jsonl")
    nano3.add_argument("--validation-rows", type=int, default=1000, help="last rows of the blend, held out (default: %(default)s)")
    verify = kinds.add_parser("verify", help="say whether downloaded models and prepared data are whole, and disks large enough")
    verify.add_argument("--model", type=Path, nargs="*", default=[], metavar="DIR", help="Hugging Face folders")
    verify.add_argument("--data", type=Path, nargs="*", default=[], metavar="DIR", help="folders that `nano3` has written")
    verify.add_argument("--disk", type=Path, nargs="*", default=[], metavar="DIR", help="folders whose disks need room")
    verify.add_argument("--min-free-gb", type=float, default=200, help="of room on each of them (default: %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
    try:
        if options.kind == "tiny":
            prepare_tiny(options.out, seed=options.seed)
        elif options.kind == "verify":
            from mrl.prepare_verify import verify as verify_folders

            verify_folders(options.model, options.data, options.disk, min_free_bytes=int(options.min_free_gb * 1e9))
        else:
            from mrl.prepare_nano3 import prepare_nano3

            prepare_nano3(options.source, options.out, num_validation=options.validation_rows)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    return 0


def prepare_tiny(out: Path, *, seed: int) -> None:
    """Writes `out`/model (a Hugging Face folder) and `out`/data (JSONL splits), both or neither; a second call finds them there.

    Raises:
        ValueError: `out` exists and was not made with these arguments.
    """
    recipe: dict[str, object] = {"kind": "tiny", "seed": seed, "recipe_version": RECIPE_VERSION}
    if out.exists():
        _accept(out, recipe)
        return
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write_tiny(aside, seed=seed)
        (aside / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        aside.chmod(0o755)
        is_ours = publish(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if is_ours:
        logger.info("%s made in %.0f s", out, time.monotonic() - started)
    else:
        _accept(out, recipe)


def _accept(out: Path, recipe: dict[str, object]) -> None:
    if _recipe_of(out) != recipe:
        raise ValueError(
            f"--out {out} exists and was not made by this version with --seed {recipe['seed']}; remove it or choose another --out"
        )
    logger.info("%s is already there", out)


def _write_tiny(folder: Path, *, seed: int) -> None:
    # Imported here, so that finding everything there takes no seconds of imports.
    from mrl import prepare_arithmetic, prepare_model, prepare_tokenizer

    splits = prepare_arithmetic.split_additions(seed)
    prepare_arithmetic.write_splits(splits, folder / "data")
    tokenizer = prepare_tokenizer.save(folder / "model", model_max_length=prepare_model.MAX_POSITIONS)
    prepare_model.save_warm_started_model(folder / "model", tokenizer, splits.warm_start, splits.probe, seed=seed)


def _recipe_of(folder: Path) -> object:
    path = folder / "recipe.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
