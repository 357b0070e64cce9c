# SPDX-License-Identifier: Apache-2.0
"""The package index that this host uses: uv's, else pip's."""

from __future__ import annotations

import os
import subprocess
import sys


def index_url() -> str:
    """Address of the index, without a slash at its end: as UV_DEFAULT_INDEX says, else pip's configuration, else PyPI."""
    configured = os.environ.get("UV_DEFAULT_INDEX")
    if not configured:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        configured = os.environ.get("PIP_INDEX_URL") or subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    return (configured or "https://pypi.org/simple").rstrip("/")
