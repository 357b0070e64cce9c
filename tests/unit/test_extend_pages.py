# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/extend show the files of examples/, and stay short. tests/learn/test_extend.py runs them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from mrl.algo.advantages import train_sequences
from mrl.config.load import load_config
from tests.sources import ROOT
from tests.unit.algo.groups import group
from tests.unit.config.problems import problems_of

PAGES = sorted((ROOT / "docs" / "extend").glob("*.md"))
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path):
    assert len(page.read_text().splitlines()) <= 70


def test_every_example_stands_on_a_page_as_it_is():
    shown = dict(
        re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", "\n".join(page.read_text() for page in PAGES), re.DOTALL)
    )
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".toml") and "own_" in path.as_posix()]
    # The licence of a file is not what its page is about. `# ...` stands for lines that a page leaves to the file.
    whole = {
        path.relative_to(EXAMPLES).as_posix(): re.sub(r"\A(# SPDX.*\n)+\n*", "", path.read_text()) for path in files
    }
    assert shown.keys() == whole.keys()
    for name, text in shown.items():
        assert all(part in whole[name] for part in text.split("# ...\n")) and (
            text == whole[name] or "# ...\n" in text
        ), name


def test_every_other_example_stands_on_a_page():
    text = "".join((ROOT / "docs" / name).read_text() for name in ("environments.md", "examples.md"))
    assert [
        path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("own_") and path.stem not in text
    ] == []


def test_the_loop_of_ones_own_fits_a_notebook():
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) <= 70


@pytest.mark.parametrize(("invalid", "flagged"), [((), ()), ((1,), ()), ((0, 2), (3,)), ((0, 1, 2), ()), ((), (1,))])
def test_the_loop_of_ones_own_trains_on_what_mrl_trains_on_also_where_rollouts_are_masked(
    monkeypatch: pytest.MonkeyPatch, invalid: tuple[int, ...], flagged: tuple[int, ...]
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    mine = importlib.import_module("own_loop").with_advantages(
        judged := group([0.0, 1.0, 0.25, 0.5], invalid=invalid, flagged=flagged)
    )
    theirs, _ = train_sequences([judged], load_config("grpo_tiny.yaml").rollouts)
    # What is masked has no loss, whatever its advantage.
    assert [one.is_valid for one in mine] == [one.is_valid for one in theirs]
    assert [one.advantage for one in mine if one.is_valid] == pytest.approx(
        [one.advantage for one in theirs if one.is_valid], rel=1e-5
    )


def messages() -> list[tuple[str, str, str]]:
    """(key, path, message) of every problem that a page shows, up to where it is cut."""
    blocks = re.findall(r"```text\n(.*?)```", "\n".join(page.read_text() for page in PAGES), re.DOTALL)
    lines = [" ".join(block.split()) for block in blocks]
    found = [match for line in lines if (match := re.match(r"([a-z_.]+)=([\w:]+): ([^.]*)", line))]
    return [(match[1], match[2], match[3]) for match in found]


@pytest.mark.parametrize(("key", "path", "message"), messages(), ids=lambda part: part[:40])
def test_a_page_shows_what_a_check_says(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str, message: str
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (problem,) = problems_of(f"++{key}={[path] if key == 'logger.own' else path}")
    assert problem.startswith(f"{key}={path}: {message}")


def test_five_pages_show_a_message():
    assert len({key for key, _, _ in messages()}) == 5
