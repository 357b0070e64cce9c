# SPDX-License-Identifier: Apache-2.0
"""The entry: both or neither, once, and never over something else."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from mrl.ops import prepare
from mrl.recipes import tiny
from tests.sources import ROOT
from tests.waiting import HANG_S


@pytest.fixture
def fake_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, *, seed: int, kind: str) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "seed").write_text(f"{kind} {seed}")
        if seed == 13:
            raise RuntimeError("no luck")

    monkeypatch.setattr(tiny, "write_tiny", write)


@pytest.mark.usefixtures("fake_work")
def test_a_second_call_changes_nothing(tmp_path: Path):
    out = tmp_path / "a" / "tiny"
    assert prepare.main(["tiny", "--out", str(out)]) == 0
    before = (out / "model" / "seed").stat().st_mtime_ns
    assert prepare.main(["tiny", "--out", str(out)]) == 0
    assert (out / "model" / "seed").stat().st_mtime_ns == before
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]


def test_other_data_has_another_recipe_version(tmp_path: Path):
    """A change of what is written must raise the version, or users keep folders that lack it."""
    tiny.write_splits(tiny.split_additions(0), tmp_path / "data")
    files = sorted((tmp_path / "data").iterdir())
    content = zlib.crc32(b"".join(path.name.encode() + path.read_bytes() for path in files))
    assert (tiny.RECIPE_VERSION, content) == (5, 1636299331)


@pytest.mark.usefixtures("fake_work")
def test_another_seed_or_a_strangers_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert prepare.main(["tiny", "--out", str(tmp_path / "tiny")]) == 0
    assert prepare.main(["tiny", "--out", str(tmp_path / "tiny"), "--seed", "1"]) == 2
    assert "--seed 1" in capsys.readouterr().out
    (tmp_path / "mine").mkdir()
    assert prepare.main(["tiny", "--out", str(tmp_path / "mine")]) == 2
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.usefixtures("fake_work")
def test_each_kind_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("tiny", "tiny_dense"):
        assert prepare.main([kind]) == 0
        assert (tmp_path / "prepared" / kind / "model" / "seed").read_text() == f"{kind} 0"
    assert prepare.main(["tiny", "--out", "prepared/tiny_dense"]) == 2


@pytest.mark.usefixtures("fake_work")
@pytest.mark.parametrize("out", ["/proc/tiny", "/dev/null/tiny"])
def test_a_folder_that_cannot_be_made_is_named(out: str, capsys: pytest.CaptureFixture[str]):
    assert prepare.main(["tiny", "--out", out]) == 2
    printed = capsys.readouterr().out
    assert str(Path(out).parent) in printed and "name another folder" in printed


@pytest.mark.usefixtures("fake_work")
def test_a_failure_leaves_nothing(tmp_path: Path):
    with pytest.raises(RuntimeError, match="no luck"):
        prepare.main(["tiny", "--out", str(tmp_path / "tiny"), "--seed", "13"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("winner_seed", "exit_code"), [(0, 0), (1, 2)])
def test_the_loser_of_a_race_takes_the_winners_folder_if_it_is_what_it_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, winner_seed: int, exit_code: int
):
    writes = []

    def write(folder: Path, *, seed: int, kind: str) -> None:
        writes.append(folder)
        (folder / "model").write_text(str(len(writes)))
        if len(writes) == 1:
            # While the first is at work, another one starts and finishes.
            assert prepare.main(["tiny", "--out", str(tmp_path / "tiny"), "--seed", str(winner_seed)]) == 0

    monkeypatch.setattr(tiny, "write_tiny", write)
    assert prepare.main(["tiny", "--out", str(tmp_path / "tiny")]) == exit_code
    assert (tmp_path / "tiny" / "model").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.usefixtures("fake_work")
def test_finding_it_there_imports_nothing_heavy(tmp_path: Path):
    prepare.main(["tiny", "--out", str(tmp_path / "tiny")])
    code = (
        f"import sys; from mrl.ops.prepare import main; main(['tiny', '--out', {str(tmp_path / 'tiny')!r}]); assert "
        "'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=HANG_S)
