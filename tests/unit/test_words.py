# SPDX-License-Identifier: Apache-2.0
"""First words of docstrings: each first line is a verb or a noun phrase that is clear alone."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.sources import ROOT, tree_of

# These begin a question, a clause or half a sentence, whose rest is in the name above or in the body below.
UNCLEAR = """And As At Because Beside But By How If Like Nor Of On Or So Than That Then Those Till Until What Whatever
When Where Wherever
Whether Which While Who Whoever Whom Whose Why Yet""".split()
HELD = ("conversion", "mrl", "scripts", "tests")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file; a string below an attribute is one."""
    for node in ast.walk(tree_of(path.read_text())):
        statements = getattr(node, "body", None)
        for statement in statements if isinstance(statements, list) else []:
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.lineno, statement.value.value.strip()


def unclear_lines(path: Path) -> list[str]:
    """Docstrings of a file whose first line is not clear alone."""
    return [
        f"{path}:{line}: {text[:80]}"
        for line, text in docstrings(path)
        if re.split(r"\W", text, maxsplit=1)[0] in UNCLEAR
    ]


def test_a_docstring_begins_with_a_verb_or_a_noun():
    files = [path for folder in HELD for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    assert [line for path in files for line in unclear_lines(path)] == []


def test_the_lint_sees_docstrings_of_modules_attributes_and_methods(tmp_path: Path):
    path = tmp_path / "rows.py"
    text = (
        '"""What a row is."""\nLIMIT = 1\n"""Of a row."""\nclass Row:\n    """A row."""\n    def ok(self):\n    '
        '    """Whether."""\n'
    )
    path.write_text(text)
    assert [line.removeprefix(f"{path}:").partition(":")[0] for line in unclear_lines(path)] == ["1", "3", "7"]


def test_no_class_has_the_name_of_another_and_no_name_of_a_file_stands_three_times():
    files = [path for folder in ("conversion", "mrl") for path in sorted((ROOT / folder).rglob("*.py"))]
    classes = Counter(
        node.name for path in files for node in ast.walk(tree_of(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    names = Counter(path.name for path in files)
    assert [name for name, count in classes.items() if count > 1] == []
    assert [name for name, count in names.items() if count > 2 and not name.startswith("__")] == []
