# SPDX-License-Identifier: Apache-2.0
"""docs/config.md has every key that a config may have. That it is up to date is checked with all other pages."""

from __future__ import annotations

import re

from mrl.config.dialect.translate import DIALECT_KEYS
from mrl.config.schema.run import KEYS
from scripts.render_docs import DOCS

PAGE = (DOCS / "config.md").read_text()


def test_every_key_of_the_schema_is_on_the_page():
    found = set()
    for section in PAGE.split("\n## ")[1:]:
        title = section.partition("\n")[0]
        prefix = "" if title == "The run" else f"{title}."
        found |= {prefix + name for name in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)}
    assert KEYS.keys() <= found


def test_every_key_of_the_dialect_is_on_the_page():
    assert [key for key in sorted(DIALECT_KEYS) if f"\n| `{key}" not in PAGE] == []
