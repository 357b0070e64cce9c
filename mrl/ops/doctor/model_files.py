# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.prepare verify`: checks that models and data are whole and disks large enough, before a job is queued.

Needs the standard library only, so that the Python of a login node can run it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from conversion.families.registry import family
from conversion.families.settings import HfConfig
from conversion.files.hf_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    HeaderTensor,
    files_to_hide,
    published,
    read_config,
    read_header,
    weight_files,
)
from conversion.files.hf_weights import is_unused
from conversion.files.reading import open_file
from mrl.config.texts import spell_bytes
from mrl.ops.doctor.findings import Finding
from mrl.ops.doctor.probe import read_disk

logger = logging.getLogger(__name__)

DATA_FILES = ("train-split.jsonl", "val-split.jsonl")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
UNFINISHED = ".cache/huggingface/download/**/*.incomplete"
PLACEHOLDER = b'"_hf_placeholder"'
AGAIN = "run the download again, which goes on where it was"


def verify(models: Sequence[Path], data: Sequence[Path], disks: Sequence[Path], *, min_free_bytes: int) -> None:
    """Logs a line for every check of model folders, folders of prepared data and the disks of `disks`."""
    findings = [finding for folder in models for finding in check_model(folder)]
    findings += [check_rows(folder / name) for folder in data for name in DATA_FILES]
    findings += [check_disk(folder, min_free_bytes) for folder in disks]
    for finding in findings:
        logger.info("%s %s", "ok      " if finding.status == "ok" else "PROBLEM ", finding.found)
    if count := sum(finding.status != "ok" for finding in findings):
        raise ValueError(f"{count} of {len(findings)} checks failed, see above")


def check_model(folder: Path) -> list[Finding]:
    """Findings about a Hugging Face folder: config.json, weight files against headers and config.json, tokenizer."""
    try:
        hf_config = read_config(folder / "config.json")
        shapes = family(hf_config).canonical(hf_config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{folder}: config.json is missing, damaged or of an unsupported model ({error}); {AGAIN}"
        return [Finding("model", "problem", text)]
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    number = f"{num_parameters / 1e9:.3g} B" if num_parameters >= 1e8 else f"{num_parameters:,}"
    findings = [Finding("model", "ok", f"{folder}: {hf_config['model_type']}, {number} parameters")]
    if unfinished := len(list(folder.glob(UNFINISHED))):
        findings.append(Finding("model", "problem", f"{folder}: files downloaded only in part: {unfinished}; {AGAIN}"))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        findings.append(Finding("model", "problem", f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}); {AGAIN}"))
    return findings + _check_weights(folder, hf_config, shapes)


def _check_weights(folder: Path, hf_config: HfConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    try:
        files = weight_files(folder)
    except ValueError as error:
        return [Finding("model", "problem", f"{error}; {AGAIN}")]
    if hidden := files_to_hide(folder):
        text = (
            f"{folder}: {SINGLE_FILE} is read, as in transformers, and these are not: {', '.join(hidden[:3])}; "
            "remove it, or them"
        )
        return [Finding("model", "problem", text)]
    problems: list[str] = []
    stored: dict[str, HeaderTensor] = {}
    is_transposed = family(hf_config).has_transposed_experts
    for path in files:
        try:
            file = open_file(path)
            try:
                found = published(read_header(file, path), path, is_transposed=is_transposed)
                stored |= {name: tensor for name, tensor in found.items() if not is_unused(name, hf_config)}
            finally:
                os.close(file)
        except FileNotFoundError:
            problems.append(f"{path} is missing; {AGAIN}")
        except (OSError, ValueError) as error:
            problems.append(f"{error}; remove that file and {AGAIN}")
    if not problems:
        faults = {
            "are missing": shapes.keys() - stored.keys(),
            "are unknown to config.json": stored.keys() - shapes.keys(),
            "have another shape than by config.json": {
                name for name in shapes.keys() & stored.keys() if stored[name].shape != shapes[name]
            },
        }
        problems = [
            f"{folder}: tensors {fault}: {len(names)}, the first is {min(names)}; {AGAIN}"
            for fault, names in faults.items()
            if names
        ]
    for path in sorted(folder.glob("*.safetensors")):
        if path not in files:
            problems.append(f"{path} is none of the files that {INDEX_FILE} names; remove it")
    if problems:
        return [Finding("model", "problem", problem) for problem in problems]
    num_bytes = sum(path.stat().st_size for path in files)
    text = (
        f"{folder}: {len(files)} of {len(files)} safetensors files, {spell_bytes(num_bytes)}, all tensors of "
        "config.json"
    )
    return [Finding("model", "ok", text)]


def check_rows(path: Path) -> Finding:
    """A finding about a file of rows: it must be there, whole and without placeholders."""
    command = "`python -m mrl.prepare nano3`"
    try:
        num_rows, last = 0, b""
        with os.fdopen(open_file(path), "rb") as file:
            for last in file:
                num_rows += 1
                if PLACEHOLDER in last:
                    return Finding(
                        "data", "problem", f"{path}:{num_rows} is a placeholder; fill the blend in with {command}"
                    )
    except (OSError, ValueError) as error:
        return Finding("data", "problem", f"{path} cannot be read ({error}); make it with {command}")
    if not last.endswith(b"\n"):
        return Finding(
            "data", "problem", f"{path} is empty or its last row is cut off; remove it and make it again with {command}"
        )
    return Finding("data", "ok", f"{path}: {num_rows:,} rows, {spell_bytes(path.stat().st_size)}")


def check_disk(folder: Path, min_free_bytes: int) -> Finding:
    """A finding about the free space for a folder, which need not exist yet."""
    free = read_disk(folder).free_bytes
    text = f"{folder}: {spell_bytes(free)} are free"
    if free >= min_free_bytes:
        return Finding("disk", "ok", text)
    need = f"{spell_bytes(min_free_bytes)} are asked for (--min-free-gb); free some or choose another disk"
    return Finding("disk", "problem", f"{text}, {need}")
