# SPDX-License-Identifier: Apache-2.0
"""Reward functions that do what the answer says, as one that is taken over by an answer would: see test_workers.py."""

import os
import socket
import subprocess
import tempfile
import threading
from pathlib import Path


def obey(prompt: str, response: str, reference_answer: str) -> float:
    """1.0 if what `response` names was done to `reference_answer`."""
    match response:
        case "connect":
            socket.create_connection(("127.0.0.1", int(reference_answer)), 5).close()
        case "datagram":
            ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            ours.sendto(b"x", reference_answer)
        case "packet":  # UDP, which Landlock does not see
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
                ours.sendto(b"x", ("127.0.0.1", int(reference_answer)))
        case "run":
            subprocess.run(["touch", reference_answer], check=True)
        case "fork":
            if os.fork() == 0:
                os._exit(0)
            os.wait()
        case "kill":
            os.kill(int(reference_answer), 0)
        case "memory":
            Path(f"/proc/{os.getppid()}/mem").open("rb").close()
        case "environment":
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        case "write":
            Path(reference_answer).write_text("x")
        case "delete":
            Path(reference_answer).unlink()
        case "link":
            os.symlink("/", reference_answer)
        case "work":
            import asyncio

            with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nothing:
                (Path(folder) / "file").write_text("x")
                nothing.write(Path(__file__).read_text())
            threads = [threading.Thread(target=sum, args=(range(9),)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            asyncio.run(asyncio.sleep(0))
    return 1.0
