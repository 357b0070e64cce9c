# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that transformers and vLLM read are those of the installed libraries."""

from __future__ import annotations

import json

from conversion.families.registry import FAMILIES
from scripts.config_keys import DATA, config_keys


def test_the_recorded_keys_are_those_that_the_installed_libraries_read():
    found = config_keys()
    assert json.loads(json.dumps(found)) == json.loads(DATA.read_text()), "run `python scripts/config_keys.py`"
    assert FAMILIES.keys() <= found.keys()
