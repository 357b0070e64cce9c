# SPDX-License-Identifier: Apache-2.0
"""Every config key is on docs/config.md or docs/dialect.md. test_docs.py checks that all pages are up to date."""

from __future__ import annotations

import re

from mrl.config.schema.keys import KEYS
from mrl.nemo.dialect.translate import DIALECT_KEYS
from scripts.render_docs import DOCS

KEYS_TO_SET, REFERENCE = (DOCS / "config.md").read_text().split("<!-- config -->")
DIALECT = (DOCS / "dialect.md").read_text()


def test_every_key_of_the_schema_is_on_the_page():
    shared = dict(re.findall(r"^\| `([\w.]+)` \| keys of `([\w.]+)`", REFERENCE, re.MULTILINE))
    listed = {
        key
        for keys in re.findall(r"^\| (`.*?`) \| ", REFERENCE, re.MULTILINE)
        for key in re.findall(r"`([\w.]+)`", keys)
    }
    below = {of: {name.removeprefix(f"{of}.") for name in KEYS if name.startswith(f"{of}.")} for of in shared.values()}
    found = listed | {f"{key}.{name}" for key, of in shared.items() for name in below[of]}
    assert KEYS.keys() <= found
    # A section that is shared has the keys of the other, no fewer and no more.
    for key, of in shared.items():
        names = {name.removeprefix(f"{key}.") for name in KEYS if name.startswith(f"{key}.")}
        assert names in (below[of], set()), key


def test_the_keys_to_set_exist():
    named = re.findall(r"^\| `([\w.]+)` \|", KEYS_TO_SET, re.MULTILINE)
    assert len(named) >= 30 and set(named) - KEYS.keys() == set()


def test_every_key_of_the_dialect_is_on_the_page():
    assert [key for key in sorted(DIALECT_KEYS) if f"`{key}`" not in DIALECT and f"`{key}.*`" not in DIALECT] == []
