# SPDX-License-Identifier: Apache-2.0
"""The repository's own Python files, for tests that read source, and the path on which child processes find them."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT_FOLDERS = ("conversion", "mrl", "scripts")


def python_files(folders: tuple[str, ...] = (*PRODUCT_FOLDERS, "tests")) -> list[Path]:
    """Every Python file below `folders`, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The dotted name under which `path` is imported; a package's `__init__.py` is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(source: str) -> ast.Module:
    """The syntax tree of a source; the lints read the same files, so each is parsed once."""
    return ast.parse(source)


def search_path() -> str:
    """A child's PYTHONPATH in another folder: what this one has, such as another megatron-core, then the repository."""
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
