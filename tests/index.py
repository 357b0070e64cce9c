# SPDX-License-Identifier: Apache-2.0
"""The package index that this host uses, uv's, else pip's, and files from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

from tests.waiting import HANG_S


def index_url() -> str:
    """Address of the index, without a final slash: as UV_DEFAULT_INDEX says, else pip's configuration, else PyPI."""
    configured = os.environ.get("UV_DEFAULT_INDEX")
    if not configured:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        configured = (
            os.environ.get("PIP_INDEX_URL")
            or subprocess.run(command, capture_output=True, text=True, timeout=HANG_S).stdout.strip()
        )
    return (configured or "https://pypi.org/simple").rstrip("/")


def download(name: str, version: str, *endings: str) -> tuple[str, bytes]:
    """Name and content of a release's file: of the first of these endings that it has, such as ".tar.gz"."""
    listing = urllib.request.Request(
        f"{index_url()}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(listing, timeout=HANG_S) as answer:
        files = {entry["filename"]: entry["url"] for entry in json.load(answer)["files"]}
    stem = f"{name.replace('-', '_')}-{version}"
    found = next(f"{stem}{ending}" for ending in endings if f"{stem}{ending}" in files)
    with urllib.request.urlopen(files[found], timeout=HANG_S) as answer:
        return found, answer.read()
