# SPDX-License-Identifier: Apache-2.0
"""Runs the examples of a docstring."""

from __future__ import annotations

import doctest
from collections.abc import Mapping


def run_examples(text: str, names: Mapping[str, object]) -> int:
    """Runs the `>>>` lines of a text with `names`; returns how many there are. AssertionError: one is not true."""
    said = list[str]()
    found = doctest.DocTestParser().get_doctest(text, dict(names), "example", None, 0)
    failed, tried = doctest.DocTestRunner(verbose=False).run(found, out=said.append)
    assert not failed, "".join(said)
    return tried
