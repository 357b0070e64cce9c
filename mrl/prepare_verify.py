"""Whether a downloaded model and its data are whole, and the disk is large enough: every problem at once, before a job waits in a queue.

Needs the standard library only, so that the Python of a login node can do it.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conversion.families.registry import family
from conversion.storage.checkpoint_folder import read_config
from conversion.storage.files import INDEX_FILE, open_file, weight_files
from conversion.storage.safetensors_header import Entry, read_header

logger = logging.getLogger(__name__)

DATA_FILES = ("train-split.jsonl", "val-split.jsonl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What `hf download` calls a file that it has not finished.
UNFINISHED = ".cache/huggingface/download/**/*.incomplete"
PLACEHOLDER = b'"_hf_placeholder"'
AGAIN = "run the download again, which goes on where it was"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    text: str
    is_ok: bool


def verify(models: Sequence[Path], data: Sequence[Path], disks: Sequence[Path], *, min_free_bytes: int) -> None:
    """Logs what was found about model folders, folders of prepared data and the disks of some folders.

    Raises:
        ValueError: something is missing or damaged, or a disk is too full; every problem has been logged by then.
    """
    findings = [finding for folder in models for finding in check_model(folder)]
    findings += [check_rows(folder / name) for folder in data for name in DATA_FILES]
    findings += [check_disk(folder, min_free_bytes) for folder in disks]
    for finding in findings:
        logger.info("%s %s", "ok      " if finding.is_ok else "PROBLEM ", finding.text)
    if count := sum(not finding.is_ok for finding in findings):
        raise ValueError(f"{count} of {len(findings)} checks failed, see above")


def check_model(folder: Path) -> list[Finding]:
    """What is to say of a Hugging Face folder: its config, its weight files against their headers and config.json, its tokenizer."""
    try:
        hf_config = read_config(folder / "config.json")
        shapes = family(hf_config).canonical(hf_config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [Finding(f"{folder}: config.json is missing, damaged or of an unsupported model ({error}); {AGAIN}", False)]
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    findings = [Finding(f"{folder}: {hf_config['model_type']}, {num_parameters / 1e9:.3g} B parameters", True)]
    if unfinished := len(list(folder.glob(UNFINISHED))):
        findings.append(Finding(f"{folder}: {unfinished} files are downloaded in part; {AGAIN}", False))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        findings.append(Finding(f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}); {AGAIN}", False))
    return findings + _check_weights(folder, shapes)


def _check_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    try:
        files = weight_files(folder)
    except ValueError as error:
        return [Finding(f"{error}; {AGAIN}", False)]
    problems: list[str] = []
    stored: dict[str, Entry] = {}
    for path in files:
        try:
            stored |= _header(path)
        except FileNotFoundError:
            problems.append(f"{path} is missing; {AGAIN}")
        except (OSError, ValueError) as error:
            problems.append(f"{error}; remove that file and {AGAIN}")
    # With a file missing, its tensors are no news.
    if not problems:
        problems = [f"{folder}: {problem}; {AGAIN}" for problem in _misfits(stored, shapes)]
    problems += [
        f"{path} is none of the files that {INDEX_FILE} names; remove it"
        for path in sorted(folder.glob("*.safetensors"))
        if path not in files
    ]
    if problems:
        return [Finding(problem, False) for problem in problems]
    num_bytes = sum(path.stat().st_size for path in files)
    return [
        Finding(f"{folder}: {len(files)} of {len(files)} safetensors files, {num_bytes / 1e9:.3g} GB, all tensors of config.json", True)
    ]


def _misfits(stored: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the tensors of a folder."""
    missing, unknown = sorted(shapes.keys() - stored.keys()), sorted(stored.keys() - shapes.keys())
    wrong = sorted(name for name in shapes.keys() & stored.keys() if stored[name].shape != shapes[name])
    return [
        f"{len(names)} tensors {what}, the first is {names[0]}"
        for names, what in (
            (missing, "are missing"),
            (unknown, "are unknown to config.json"),
            (wrong, "have another shape than by config.json"),
        )
        if names
    ]


def check_rows(path: Path) -> Finding:
    """Whether a file of rows is there and whole, without placeholders."""
    try:
        num_rows, last = 0, b""
        with os.fdopen(open_file(path), "rb") as file:
            for last in file:
                num_rows += 1
                if PLACEHOLDER in last:
                    return Finding(f"{path}:{num_rows} is a placeholder; fill the blend in with `python -m mrl.prepare nano3`", False)
    except (OSError, ValueError) as error:
        return Finding(f"{path} cannot be read ({error}); make it with `python -m mrl.prepare nano3`", False)
    if not last.endswith(b"\n"):
        return Finding(f"{path} is empty or its last row is cut off; remove it and make it again with `python -m mrl.prepare nano3`", False)
    return Finding(f"{path}: {num_rows:,} rows, {path.stat().st_size / 1e9:.3g} GB", True)


def check_disk(folder: Path, min_free_bytes: int) -> Finding:
    """Whether the disk of a folder, which need not exist yet, has room."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / 1e9:,.0f} GB are free"
    if free < min_free_bytes:
        return Finding(f"{text}, {min_free_bytes / 1e9:,.0f} GB are asked for (--min-free-gb); free some or choose another disk", False)
    return Finding(text, True)


def _header(path: Path) -> dict[str, Entry]:
    file = open_file(path)
    try:
        return read_header(file, path)
    finally:
        os.close(file)
