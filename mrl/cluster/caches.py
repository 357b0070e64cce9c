# SPDX-License-Identifier: Apache-2.0
"""Folders of compiled code of torch, Triton and vLLM: they run what they find there, so nobody else may write to them.

torch's own choice is a folder of the temporary folder whose name anybody can guess, and make first.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from mrl.cluster.lifetime import session_folder

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Folder of each, by the variable that names it; a variable that the shell or the config sets wins."""
HOME = "~/.cache/mrl-compiled"
"""Kept from run to run: models of vLLM take minutes to compile."""


def keep_caches_private() -> str:
    """Sets the variables of this process, and makes their folder. Returns a warning if it is not `HOME`, because others may write there."""
    warning = ""
    try:
        root = Path(HOME).expanduser()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = root.resolve()
        if other := find_writable_by_others(root):
            raise PermissionError(f"others may write to {other}, or it is another user's")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        root = Path(tempfile.mkdtemp(prefix="mrl-compiled-", dir=session_folder()))
        warning = f"{HOME} cannot keep compiled code ({error}); this process compiles anew, into {root}"
    # torch notes its own choice there, and a process hands it on.
    if Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")).name.startswith("torchinductor_"):
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(root / name))
    return warning


def find_writable_by_others(folder: Path) -> Path | None:
    """The folder itself or the one above it that lets another user (not root) put files into `folder`, or another in its place."""
    for place in (folder, *folder.parents):
        found = place.lstat()
        # Of a folder with the sticky bit, others rename only what is theirs.
        is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and (place == folder or not found.st_mode & stat.S_ISVTX)
        if is_open or found.st_uid not in (0, os.getuid()) or (place == folder and found.st_uid != os.getuid()):
            return place
    return None
