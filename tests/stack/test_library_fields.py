# SPDX-License-Identifier: Apache-2.0
"""What mrl knows of the libraries' arguments is what the installed libraries have."""

from __future__ import annotations

import json

from scripts.library_fields import DATA, library_fields


def test_the_recorded_arguments_are_those_of_the_installed_libraries():
    assert library_fields() == json.loads(DATA.read_text()), "run `python scripts/library_fields.py`"
