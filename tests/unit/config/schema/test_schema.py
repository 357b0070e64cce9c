import ast
import inspect
import re
from typing import get_type_hints

from mrl.config.rules.ranges import FIXED
from mrl.config.schema.run import KEYS, RunConfig, section_of
from scripts.config_page import manuals
from tests.sources import ROOT


def sections(section: type = RunConfig) -> list[type]:
    """The section and all below it."""
    inner = [kind for hint in get_type_hints(section).values() if (kind := section_of(hint)) is not None]
    return [section, *(found for kind in inner for found in sections(kind))]


def test_every_key_has_a_manual():
    written = {(section.__name__, name) for section in sections() for name in manuals(section)}
    assert {key for key, place in KEYS.items() if place not in written} == set()


def test_every_key_is_read_by_product_code():
    """By its name, by a property of the schema, as the source of another key's value, or fixed to one value by a check."""
    files = [path for path in (ROOT / "mrl").rglob("*.py") if "config" not in path.relative_to(ROOT / "mrl").parts]
    read = {node.attr for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    for section in sections():
        for member in (found for kind in section.__mro__ for found in vars(kind).values()):
            if isinstance(member, property) and member.fget is not None:
                read |= set(re.findall(r"\b\w+", inspect.getsource(member.fget)))
    sources = "".join(path.read_text() for path in (ROOT / "mrl/config/schema").glob("*.py"))
    read |= set(re.findall(r"\w+", " ".join(re.findall(r"\bfollows\((.*)\)", sources))))
    assert {key for key in KEYS if key.rpartition(".")[2] not in read} - FIXED == set()


def test_sections_can_be_made_by_hand():
    assert RunConfig().num_units == 1
