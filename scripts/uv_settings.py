# SPDX-License-Identifier: Apache-2.0
"""`python scripts/uv_settings.py`: prints shell lines giving uv pip's index, wheels, certificates, proxy and timeout.

uv does not read pip's settings. Variables of uv that are already set stay as they are.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from urllib.parse import unquote, urlsplit

# pip's setting -> the environment variable that uv reads.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
# pip skips folders that are not there with a warning; uv fails on them.
FOLDERS = ("extra-index-url", "find-links")


def settings(listed: str) -> dict[str, str]:
    """Value by setting from `pip config list`: pip's variables win over `[install]` in files, that over `[global]`."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        lines = re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.MULTILINE)
        found |= {name: str(literal_eval(value)) for name, value in lines}
    return found


def variables(found: dict[str, str]) -> dict[str, str]:
    """Variables of uv's environment for these settings of pip."""
    named = {}
    for name, variable in VARIABLES.items():
        value = found.get(name, "")
        if name in FOLDERS:
            value = " ".join(place for place in value.split() if _exists(place))
        if value:
            named[variable] = value
    return named


def _exists(place: str) -> bool:
    url = urlsplit(place)
    return url.scheme not in ("", "file") or Path(unquote(url.path)).exists()


def pip_variables() -> dict[str, str]:
    """Variables of uv's environment for the settings of this interpreter's pip."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return variables(settings(listed))


def main() -> None:
    """Prints `export NAME=VALUE` for each variable that is not set."""
    for name, value in pip_variables().items():
        if name not in os.environ:
            print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
