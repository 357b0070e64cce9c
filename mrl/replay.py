# SPDX-License-Identifier: Apache-2.0
"""Starts `python -m mrl.replay`, which lives in mrl/ops/replay.py."""

from __future__ import annotations

from mrl.signals import take_over

if __name__ == "__main__":
    take_over()

from mrl.rooms import command
from mrl.store.loggers.thread import exit_with

if __name__ == "__main__":
    exit_with(command("replay"))
