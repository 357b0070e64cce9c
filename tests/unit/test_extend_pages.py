"""The pages of docs/extend show the files of examples/, and stay short. tests/learn/test_extend.py runs them."""

from __future__ import annotations

import re

import pytest

from tests.sources import ROOT

PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page):
    assert len(page.read_text().splitlines()) <= 60


def test_every_example_stands_on_a_page_as_it_is():
    shown = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", "\n".join(page.read_text() for page in PAGES), re.DOTALL))
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".toml")]
    assert shown == {path.relative_to(EXAMPLES).as_posix(): path.read_text() for path in files}


def test_the_loop_of_ones_own_fits_a_notebook():
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) <= 60
