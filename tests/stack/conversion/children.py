# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.stack.conversion.children DIRECTION SOURCE OUT`: converts; prints as JSON how far memory rose."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

from mrl.convert import main


def memory(what: str) -> int:
    """Bytes of this process: `what` is VmRSS, or VmHWM for the most so far."""
    found = re.search(rf"^{what}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    direction, source, out = sys.argv[1:]
    # The kernel counts the most from here on.
    Path("/proc/self/clear_refs").write_text("5")
    base, started = memory("VmRSS"), time.monotonic()
    code = main([direction, "--hf" if direction == "hf-to-mcore" else "--mcore", source, "--out", out])
    seconds = time.monotonic() - started
    print(json.dumps({"code": code, "base": base, "peak": memory("VmHWM"), "seconds": seconds}))
