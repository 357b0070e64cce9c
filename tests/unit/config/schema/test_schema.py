# SPDX-License-Identifier: Apache-2.0
from mrl.config.schema.keys import KEYS, fields_of, section_of
from mrl.config.schema.run import RunConfig
from mrl.ops.manual import manuals
from scripts.config_page import unread_keys
from scripts.config_readers import key_readers


def sections(section: type = RunConfig) -> list[type]:
    """The section and all below it."""
    inner = [kind for hint in fields_of(section).values() if (kind := section_of(hint)) is not None]
    return [section, *(found for kind in inner for found in sections(kind))]


def test_every_key_has_a_manual():
    written = {(section.__name__, name) for section in sections() for name in manuals(section)}
    assert {key for key, place in KEYS.items() if place not in written} == set()


def test_every_key_is_read_by_product_code():
    assert unread_keys(key_readers()) == set()


def test_sections_can_be_made_by_hand():
    assert RunConfig().num_slots == 1
