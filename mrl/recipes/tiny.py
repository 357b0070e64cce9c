# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.prepare tiny|tiny_dense`: a tiny model adding two-digit numbers without carry, and training data."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from pathlib import Path

from conversion.files.durable import give_new_modes, publish
from mrl.recipes.additions import Kind, split_additions, write_splits

logger = logging.getLogger(__name__)

# Raise it when the same arguments would give other files.
RECIPE_VERSION = 5


def prepare_tiny(out: Path, *, seed: int, kind: Kind = "tiny") -> None:
    """Writes `out`/model (Hugging Face) and `out`/data (JSONL splits), both or neither; a second call finds them."""
    recipe: dict[str, object] = {"kind": kind, "seed": seed, "recipe_version": RECIPE_VERSION}
    if out.exists():
        _accept(out, recipe)
        return
    started = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        write_tiny(aside, seed=seed, kind=kind)
        (aside / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
        give_new_modes(aside)
        is_ours = publish(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if is_ours:
        logger.info("%s made in %.0f s", out, time.monotonic() - started)
    else:
        _accept(out, recipe)


def _accept(out: Path, recipe: dict[str, object]) -> None:
    path = out / "recipe.json"
    if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != recipe:
        raise ValueError(
            f"--out {out} exists and was not made by this version with --seed {recipe['seed']}; remove it or "
            "choose another --out"
        )
    logger.info("%s is already there", out)


def write_tiny(folder: Path, *, seed: int, kind: Kind) -> None:
    """Writes data and warm-started model into `folder`."""
    # The imports take seconds, which a second call with the same arguments need not spend.
    from mrl.recipes import tiny_model, tokenizer

    splits = split_additions(seed)
    write_splits(splits, folder / "data")
    bytes_tokenizer = tokenizer.save(folder / "model", model_max_length=tiny_model.MAX_POSITIONS)
    tiny_model.save_warm_started_model(
        folder / "model", bytes_tokenizer, splits.warm_start, splits.probe, seed=seed, kind=kind
    )
