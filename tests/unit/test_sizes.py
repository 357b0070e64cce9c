# SPDX-License-Identifier: Apache-2.0
"""Files of at most 500 lines, functions of at most 80, at most 20 type errors that are ignored."""

from __future__ import annotations

import ast

from tests.sources import ROOT, python_files, tree_of

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_TYPE_IGNORES = 20


def long_functions(source: str) -> list[tuple[str, int]]:
    """Name and length of every function longer than `MAX_FUNCTION_LINES`, docstring included, decorators not."""
    functions = [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [(name, length) for name, length in lengths if length > MAX_FUNCTION_LINES]


def test_no_file_is_too_long():
    files = [*python_files(), *(ROOT / "scripts").rglob("*.sh")]
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in files}
    assert {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    assert [
        f"{path.relative_to(ROOT)}: {found}" for path in python_files() for found in long_functions(path.read_text())
    ] == []


def test_a_long_function_is_found():
    body = "\n".join(["    x = 1"] * MAX_FUNCTION_LINES)
    assert long_functions(f"def short():\n    return 1\n\ndef long():\n{body}\n") == [("long", MAX_FUNCTION_LINES + 1)]


def test_type_errors_are_ignored_rarely_and_with_a_reason():
    mark = "# type" + ": ignore"
    ignored = [
        f"{path.relative_to(ROOT)}:{number}: {line.partition(mark)[2]}"
        for path in python_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if mark in line
    ]
    assert len(ignored) <= MAX_TYPE_IGNORES, ignored
    assert [line for line in ignored if not line.partition("]")[2].strip().startswith("# ")] == []
