# SPDX-License-Identifier: Apache-2.0
"""Arguments of the libraries that mrl knows are those of the installed libraries."""

from __future__ import annotations

import json

from scripts.library_fields import DATA, library_fields


def test_the_recorded_arguments_are_those_of_the_installed_libraries():
    assert library_fields() == json.loads(DATA.read_text()), "run `python scripts/library_fields.py`"
