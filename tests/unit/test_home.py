# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from mrl import home_instead


@pytest.mark.parametrize("home", ["~", "", "/dev/null/home"])
def test_a_user_without_a_home_gets_a_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = Path(home_instead(home))
    assert first == tmp_path / f"mrl-home-{os.getuid()}" and first.stat().st_mode & 0o777 == 0o700
    assert home_instead(home) == str(first)
    first.rmdir()
    first.symlink_to("/")
    other = Path(home_instead(home))
    assert other.parent == tmp_path and other != first and other.stat().st_mode & 0o777 == 0o700


def test_a_home_stays(tmp_path: Path):
    assert home_instead(str(tmp_path)) == home_instead(str(tmp_path / "not" / "yet")) == ""
