"""Where the parts of a Megatron checkpoint lie on disk. Standard library only."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from conversion.storage.files import INDEX_FILE, SINGLE_FILE, read_file, read_json

ITERATION_FOLDER = "iter_0000000"
LATEST_FILE = "latest_checkpointed_iteration.txt"
HF_CONFIG_FILE = "hf_config.json"

# Files of a Hugging Face folder that describe weights; everything else next to them is tokenizer, template or generation settings.
_WEIGHT_FILES = (SINGLE_FILE, INDEX_FILE, "config.json", "manifest.json")
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja")


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
    return Checkpoint(iteration, read_config(configs[0]), tokenizers[0] if tokenizers else None)


def _latest_iteration(weights: Path) -> Path:
    latest = weights / LATEST_FILE
    if latest.exists():
        number = read_file(latest).decode(errors="replace").strip()
        found = [weights / f"iter_{int(number):07d}"] if number.isdigit() else []
    else:
        found = sorted(weights.glob("iter_*"))
    if not found or not (found[-1] / ".metadata").exists():
        raise ValueError(
            f"--mcore {weights}: no complete Megatron checkpoint there; name a step_N folder, its policy/weights, or an iter_ folder"
        )
    return found[-1]


def read_config(path: Path) -> dict[str, object]:
    """The contents of a config.json.

    Raises:
        ValueError: it is not a readable JSON object.
    """
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}; it must be a model's config.json") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object; it must be a model's config.json")
    return config


def file_state(path: Path) -> list[int]:
    """Changes when the content of a file does, also where a tool gives the new content the old times: size, times and inode."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def write_json(path: Path, content: object) -> None:
    """Writes plain values."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path) -> None:
    """Copies tokenizer, chat template and generation settings of a Hugging Face folder."""
    for pattern in _COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in _WEIGHT_FILES:
                shutil.copyfile(path, folder / path.name)
