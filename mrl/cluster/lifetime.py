"""Processes of a run: nothing survives its parent, and every actor's output lands in a file of the run folder."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from mrl.config.secrets import start_logging

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG). Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def start_actor_process(log_file: Path, secrets: Mapping[str, str] | None = None) -> None:
    """First call of every actor: ties its life to its parent's and sends its stdout and stderr to `log_file`.

    `secrets` become environment variables: those of the actor's options are written to Ray's own logs.
    """
    die_with_parent()
    os.environ.update(secrets or {})
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    start_logging("%(asctime)s %(levelname)s %(name)s: %(message)s", sys.stderr)
    logger.info("process %d", os.getpid())
