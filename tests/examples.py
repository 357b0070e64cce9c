# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of a docstring."""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
from collections.abc import Callable, Coroutine, Mapping
from types import FunctionType
from typing import Any


def run_examples(
    text: str, names: Mapping[str, object], do: Callable[[Coroutine[Any, Any, Any]], object] | None = None
) -> int:
    """Runs the `>>>` lines of a text with `names`; returns how many there are. AssertionError: one is not true.

    `do` runs those that await.
    """
    known, checker = dict(names), doctest.OutputChecker()
    examples = doctest.DocTestParser().get_examples(text)
    for example in examples:
        code = compile(example.source, "example", "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            ran = FunctionType(code, known)()
            if inspect.iscoroutine(ran):
                assert do is not None, f"it awaits: {example.source}"
                do(ran)
        assert checker.check_output(example.want, said.getvalue(), 0), f"{example.source}gives {said.getvalue()!r}"
    return len(examples)
