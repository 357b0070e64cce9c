# SPDX-License-Identifier: Apache-2.0
"""Examples in docstrings of what users write. tests/stack/loop/test_own_loop.py runs that of `mrl.api.Loop`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mrl.config import own
from tests.examples import run_examples


def hooks() -> dict[str, str]:
    """The text below each kind of hook, by its name."""
    lines = ast.parse(Path(own.__file__).read_text()).body
    return {
        target.id: ast.literal_eval(text.value) if isinstance(text, ast.Expr) else ""
        for line, text in zip(lines, lines[1:], strict=False)
        if isinstance(line, ast.Assign) and isinstance(target := line.targets[0], ast.Name)
        if isinstance(getattr(own, target.id), own.Kind)
    }


@pytest.mark.parametrize(("name", "text"), hooks().items(), ids=hooks())
def test_the_example_of_a_hook_is_true(name: str, text: str):
    assert run_examples(text, vars(own)) >= 2, name
