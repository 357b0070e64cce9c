# SPDX-License-Identifier: Apache-2.0
"""GRPO post-training of mixture-of-experts language models on Megatron-Core, vLLM and Ray."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder


def put_last(paths: list[str], argv0: str) -> list[str]:
    """Puts the working folder behind all libraries in a search path, where `python -m` or Ray has put it in front.

    A user's `tokenize.py` there would replace Python's. The path stays as it is for a user's script, and where another
    mrl would be found.
    """
    num_first = 0
    if argv0 == "-m" and not sys.flags.safe_path:
        num_first = 1
    elif os.path.basename(argv0) == "default_worker.py":
        # Ray puts the driver's folders in front of its own.
        num_first = next((i for i, path in enumerate(paths) if path.endswith("ray/thirdparty_files")), 0)
    first = [os.path.abspath(path) for path in paths[:num_first]]
    found = [path for path in paths if os.path.abspath(path) not in first] + list(dict.fromkeys(first))
    spec = PathFinder.find_spec("mrl", found)
    return found if spec is not None and spec.origin == __file__ else paths


# Before the first library that Python has not imported itself.
sys.path[:] = put_last(sys.path, sys.argv[0] if sys.argv else "")

import pwd  # noqa: E402
import stat  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402
from types import TracebackType  # noqa: E402
from typing import NoReturn  # noqa: E402

STARTED = time.monotonic()
"""Seconds on the clock of time.monotonic. Commands import this first; a process that was a shell before is older than
its command.
"""

__version__ = "0.1.0"

NO_USAGE_STATISTICS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that keep libraries from reporting to their makers; a variable that the shell sets wins."""

# Here, because the libraries look once, when they are imported, and every process of a run imports this first.
for name, value in NO_USAGE_STATISTICS.items():
    os.environ.setdefault(name, value)


def home_instead(home: str) -> str:
    """The user's own folder in place of a home that is unknown (`~`) or cannot be written to or made; "" if it can.

    A home folder that is there stays: it has the user's settings, even if it is read-only. `/` is what containers give
    an unknown user.
    """
    place = next((place for place in (Path(home), *Path(home).parents) if place.exists()), Path())
    can_write = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    if os.path.isabs(home) and (can_write or (place.is_dir() and place == Path(home) != Path("/"))):
        return ""
    import tempfile

    own = Path(tempfile.gettempdir(), f"mrl-home-{os.getuid()}")
    with suppress(FileExistsError):
        own.mkdir(mode=0o700)
    found = own.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return str(own) if is_own else tempfile.mkdtemp(prefix="mrl-home-")


# Libraries ask for the home folder and the user's name while they are imported. A container's user may have neither.
if instead := home_instead(os.path.expanduser("~")):  # noqa: PTH111 -- Path raises where there is none
    lack = (
        f"HOME={os.environ['HOME']!r} cannot be written to"
        if "HOME" in os.environ
        else "HOME is not set, and this user has no entry in passwd"
    )
    print(f"{lack}: caches of libraries go to {instead}; set HOME to a folder that lasts", file=sys.stderr)
    os.environ["HOME"] = instead
    os.environ.setdefault("USER", f"uid{os.getuid()}")

ENVIRONMENT = Path(__file__).parents[1] / ".venv"
"""Virtual environment that scripts/quickstart.sh makes in a checkout."""


def lacking(error: BaseException | None) -> str:
    """Names the package that this Python lacks and the command that installs it; "" for other errors."""
    absent = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    if not absent or absent.partition(".")[0] in ("mrl", "conversion"):
        return ""
    return f"{sys.executable} has no package {absent!r}, which mrl needs; {_way_out()}"


def _way_out() -> str:
    checkout = ENVIRONMENT.parent
    if not (checkout / "scripts/setup.sh").is_file():
        return f"install your wheel with all that it needs: {sys.executable} -m pip install -U mrl-*.whl"
    if Path(sys.prefix) == ENVIRONMENT:
        return f"this checkout is newer than its environment: bash {checkout}/scripts/setup.sh brings it up to date"
    if ENVIRONMENT.is_dir():
        return f"type {ENVIRONMENT}/bin/python in place of python, or once: source {ENVIRONMENT}/bin/activate"
    return "install it: bash scripts/quickstart.sh makes .venv, and docs/install.md has the other ways"


def name_python(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ends a command whose Python lacks a package with code 2 and says what to type; leaves other errors alone."""
    if text := lacking(error):
        refuse(text)
    sys.__excepthook__(kind, error, trace)


def refuse(text: str) -> NoReturn:
    """Ends the command with code 2, as one that this Python cannot run."""
    print(text, file=sys.stderr)
    sys.exit(2)


# The name of the module is not known yet while `python -m` imports its package.
if sys.argv[:1] == ["-m"]:
    if sys.version_info < (3, 11):  # noqa: UP036 -- a Python that no installer has looked at
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        refuse(f"{sys.executable} is Python {version}, and mrl needs 3.11, 3.12 or 3.13; {_way_out()}")
    sys.excepthook = name_python


def barred(error: Exception) -> str:
    """A sentence for a PermissionError of a file: which folder or file bars this user, and whose it is; else ""."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str | os.PathLike):
        return ""
    path = Path(os.fsdecode(error.filename)).absolute()
    bars = next((above for above in reversed(path.parents) if not os.access(above, os.X_OK)), path)
    try:
        found = bars.stat()
    except OSError:
        whose = ""
    else:
        whose = f" (of user {_user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):o})"
    return f"{bars}{whose}: you may not use it; name another, or ask its owner, who can change that by chmod"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
