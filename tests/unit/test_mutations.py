# SPDX-License-Identifier: Apache-2.0
"""The table of `scripts/mutations.py`: it names texts and tests that there are."""

from __future__ import annotations

from scripts.mutations import table
from tests.sources import ROOT


def test_every_text_is_found_once_and_every_test_exists():
    mutations, faults = table(), list[str]()
    for mutation in mutations:
        file, _, name = mutation.test.partition("::")
        if (ROOT / mutation.file).read_text().count(mutation.text) != 1:
            faults.append(f"{mutation.file}: {mutation.text}")
        if f"def {name}(" not in (ROOT / file).read_text():
            faults.append(mutation.test)
    assert faults == []
    assert len(mutations) == len({mutation[4:] for mutation in mutations}) == 63
