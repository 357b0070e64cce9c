# SPDX-License-Identifier: Apache-2.0
"""The end of Ray in a process whose other threads still hold references."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.sources import ROOT
from tests.waiting import HANG_S

LETS_GO = """
import threading, time
import ray
from mrl.cluster.runtime import end_ray
from mrl.types import PayloadRef

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
references = [PayloadRef(ray.put(number), 0) for number in range(2000)]
is_over = threading.Event()

def let_go():
    while references and not is_over.is_set():
        references.pop()
        time.sleep(0.0005)

thread = threading.Thread(target=let_go)
thread.start()
end_ray()
is_over.set()
thread.join()
print(f"goes on, {ray.is_initialized()}")
"""


def test_a_thread_that_lets_go_of_references_does_not_end_the_process():
    # Earlier tests of this process may have left the address and the token of their Ray, which is gone.
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LETS_GO], cwd=ROOT, env=own, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["goes on, False"]), done.stderr
