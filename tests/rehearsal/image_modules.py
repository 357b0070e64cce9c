# SPDX-License-Identifier: Apache-2.0
"""Modules of what only GPU hosts install: Apex at the Dockerfile's commit, and packages of constraints-gpu.txt.

image_modules.json records them. After a change of a pin, make it anew from a clone of https://github.com/NVIDIA/apex
and the package index:

    python -m tests.rehearsal.image_modules CLONE
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypedDict

from mrl.ops.doctor.software import read_pins
from tests.index import download
from tests.sources import ROOT
from tests.waiting import HANG_S

RECORD = Path(__file__).with_suffix(".json")
PACKAGES = ("causal-conv1d", "mamba-ssm", "transformer-engine", "transformer-engine-torch")
# What nothing here imports: no module of it is recorded.
LEFT_OUT = re.compile(r"(^|\.)(test|tests|jax|contrib|debug|tools)\b")


class Modules(TypedDict):
    """Modules that one source offers to `import`."""

    version: str
    """A package's version, or a commit."""
    python: list[str]
    """Dotted names of packages and modules."""
    extensions: dict[str, str]
    """Compiled modules; with the environment variable that setup.py wants for each, or with an empty string."""


def apex_commit(dockerfile: str) -> str:
    """The commit that the Dockerfile checks out."""
    return re.findall(r"^ARG APEX_COMMIT=(\w+)$", dockerfile, re.MULTILINE)[0]


def python_modules(paths: Collection[str]) -> list[str]:
    """Dotted names of a package's files and folders, sorted. Folders without an `__init__.py` and setup.py are none."""
    names = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in paths
        if path.endswith(".py") and "/" in path
    }
    packages = {path.removesuffix("/__init__.py").replace("/", ".") for path in paths if path.endswith("/__init__.py")}
    return sorted(
        name
        for name in names
        if (name in packages or name.rpartition(".")[0] in packages) and not LEFT_OUT.search(name)
    )


def extensions(source: str) -> dict[str, str]:
    """Compiled modules of a setup.py, with the variable of its `if has_flag(FLAG, VARIABLE)`, or an empty string."""
    return dict(_extensions(ast.parse(source), ""))


def _extensions(tree: ast.AST, variable: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, ast.If):
        asked = re.search(r"has_flag\(\S+ '(\w+)'\)", ast.unparse(tree.test))
        variable = asked[1] if asked else variable
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) in ("CUDAExtension", "CppExtension"):
        named = [keyword.value for keyword in tree.keywords if keyword.arg == "name"] or tree.args[:1]
        yield from (
            (name.value, variable) for name in named if isinstance(name, ast.Constant) and isinstance(name.value, str)
        )
    for child in ast.iter_child_nodes(tree):
        yield from _extensions(child, variable)


def apex_modules(clone: Path, commit: str) -> Modules:
    """Modules of Apex at a commit of a clone, whose files need not be checked out."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", clone, *words], check=True, capture_output=True, text=True, timeout=HANG_S
        ).stdout

    files = git("ls-tree", "-r", "--name-only", commit, "apex").splitlines()
    return {
        "version": commit,
        "python": python_modules(files),
        "extensions": extensions(git("show", f"{commit}:setup.py")),
    }


def package_modules(name: str, version: str) -> Modules:
    """Modules of a version on the index: of its sources, or of a wheel for every platform."""
    archive, read = download(name, version, ".tar.gz", "-py3-none-any.whl")
    content, stem = io.BytesIO(read), archive.removesuffix(".tar.gz")
    if archive.endswith(".whl"):
        return {"version": version, "python": python_modules(zipfile.ZipFile(content).namelist()), "extensions": {}}
    with tarfile.open(fileobj=content) as sources:
        members = [member.removeprefix(f"{stem}/") for member in sources.getnames()]
        texts = (
            sources.extractfile(f"{stem}/{path}") for path in ("setup.py", "build_tools/pytorch.py") if path in members
        )
        compiled = {key: value for text in texts if text for key, value in extensions(text.read().decode()).items()}
    python = [module for module in python_modules(members) if not module.startswith("build_tools")]
    return {"version": version, "python": python, "extensions": compiled}


def main() -> None:
    pins = read_pins(ROOT / "constraints-gpu.txt")
    commit = apex_commit((ROOT / "scripts/docker/Dockerfile").read_text())
    record = {
        "apex": apex_modules(Path(sys.argv[1]), commit),
        **{name: package_modules(name, pins[name]) for name in PACKAGES},
    }
    RECORD.write_text(json.dumps(record, indent=0) + "\n")


if __name__ == "__main__":
    main()
