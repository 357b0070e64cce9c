# SPDX-License-Identifier: Apache-2.0
"""Starts `python -m mrl.keys`, which lives in mrl/ops/manual.py."""

from __future__ import annotations

import sys

from mrl.config.secrets import run_entry
from mrl.rooms import command

if __name__ == "__main__":
    sys.exit(run_entry(command("keys")))
