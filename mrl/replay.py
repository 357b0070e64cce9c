# SPDX-License-Identifier: Apache-2.0
"""Starts `python -m mrl.replay`, which lives in mrl/ops/replay.py."""

from __future__ import annotations

from conversion.files.limits import flush_console, limit_console
from mrl.signals import LISTENER

if __name__ == "__main__":
    LISTENER.listen()
    limit_console()
    LISTENER.cleanups.append(flush_console)

from mrl.rooms import command
from mrl.store.loggers.thread import exit_with

if __name__ == "__main__":
    exit_with(command("replay"))
