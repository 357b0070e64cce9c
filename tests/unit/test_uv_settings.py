# SPDX-License-Identifier: Apache-2.0
"""uv installs from where pip's settings point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT
from tests.waiting import HANG_S

SCRIPT = ROOT / "scripts" / "uv_settings.py"


def printed(tmp_path: Path, config: str, **environment: str) -> list[str]:
    """Output of the script with this pip.conf and these variables, and no other settings."""
    file = tmp_path / "pip.conf"
    file.write_text(config)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "SSL_", "ALL_PROXY"))
    }
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env=clean | {"PIP_CONFIG_FILE": str(file)} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    return done.stdout.splitlines()


def test_pips_file_says_where_uv_looks(tmp_path: Path):
    config = (
        f"[global]\nindex-url = https://mirror.example/simple\nfind-links = {tmp_path} "
        f"{tmp_path}/absent\ncert = /certs/ca.pem\n"
    )
    lines = printed(tmp_path, config)
    assert "export UV_DEFAULT_INDEX=https://mirror.example/simple" in lines
    assert f"export UV_FIND_LINKS={tmp_path}" in lines
    assert "export SSL_CERT_FILE=/certs/ca.pem" in lines


def test_pips_variables_win_over_its_file_and_uvs_over_both(tmp_path: Path):
    config = "[global]\nindex-url = https://mirror.example/simple\n"
    assert "export UV_DEFAULT_INDEX=https://other.example/simple" in printed(
        tmp_path, config, PIP_INDEX_URL="https://other.example/simple"
    )
    lines = printed(tmp_path, config, UV_DEFAULT_INDEX="https://third.example/simple")
    assert not [line for line in lines if "UV_DEFAULT_INDEX" in line]


def test_values_cannot_run_commands(tmp_path: Path):
    lines = printed(tmp_path, "", PIP_INDEX_URL="https://x.example/$(touch${IFS}mark)'\"; false")
    done = subprocess.run(
        ["bash", "-c", "; ".join(lines) + '; printf %s "$UV_DEFAULT_INDEX"'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.stdout == "https://x.example/$(touch${IFS}mark)'\"; false" and not (tmp_path / "mark").exists()
