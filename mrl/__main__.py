# SPDX-License-Identifier: Apache-2.0
"""`mrl COMMAND ...`: short for `python -m mrl.COMMAND ...`."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mrl import __version__, rooms

COMMANDS = (
    "train",
    "check",
    "keys",
    "plan",
    "prepare",
    "reward",
    "evaluate",
    "convert",
    "doctor",
    "launch",
    "view",
    "runs",
    "replay",
)


def summary(command: str) -> str:
    """The first sentence of a command's docstring, without its usage. Imports nothing: the libraries take seconds."""
    module = rooms.COMMANDS.get(command, f"mrl.{command}")
    source = Path(__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("`: ")[2].split()).partition(". ")[0].rstrip(".")


def main(arguments: Sequence[str] | None = None) -> None:
    """Becomes the process of the command, so that its exit code and its signals are the command's own."""
    listed = "\n".join(f"  {command:<9} {summary(command)}" for command in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="mrl",
        description="GRPO post-training on Megatron-Core, vLLM and Ray.",
        epilog=(
            f"commands:\n{listed}\n\n`mrl COMMAND --help` says more; it is the same as `python -m mrl.COMMAND --help`."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="what to do, see below")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # as Python writes them: an argument may control a terminal
        parser.error(f"unrecognized arguments: {' '.join(map(repr, unknown))}")
    if sys.platform != "linux":
        parser.error(f"mrl runs on Linux, and not on {sys.platform}; use a Linux host, on Windows WSL 2")
    os.execv(sys.executable, [sys.executable, "-m", f"mrl.{options.command}", *options.words])


if __name__ == "__main__":
    main()
