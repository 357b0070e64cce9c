# SPDX-License-Identifier: Apache-2.0
"""Arguments of the libraries that mrl knows are those of the installed libraries."""

from __future__ import annotations

import json

from mrl.config.passthrough import OVERRIDABLE
from scripts.library_fields import DATA, library_fields


def test_the_recorded_arguments_are_those_of_the_installed_libraries():
    found, recorded = library_fields(), json.loads(DATA.read_text())
    if found["TransformerConfig"]["version"] != recorded["TransformerConfig"]["version"]:
        # On the Megatron of newer Pythons, whatever may be set must still be there.
        newer, older = found.pop("TransformerConfig")["fields"], recorded.pop("TransformerConfig")["fields"]
        assert isinstance(newer, dict)
        assert [name for name in OVERRIDABLE if not set(older[name]) <= set(newer.get(name, ()))] == []
    assert found == recorded, "run `python scripts/library_fields.py`"
