# SPDX-License-Identifier: Apache-2.0
"""Exit codes of runs and their meaning: docs/reference.md shows the table, and all other pages use its numbers."""

from collections.abc import Mapping

from mrl.signals import ENDED_AT_ONCE, ENDED_EARLY

DONE, FAILED, REFUSED = 0, 1, 2

CODES: Mapping[int, tuple[str, str]] = {
    DONE: ("done", ""),
    FAILED: (
        "this attempt failed, or learned nothing for several steps; the last line has the reason",
        "the same command resumes",
    ),
    REFUSED: (
        "the input is wrong, and nothing is trained: settings, rows, a model that trainer and engines compute "
        "differently, or checkpoints that are all damaged",
        "correct what the message names",
    ),
    ENDED_EARLY: ("a signal or a time limit: a checkpoint is saved", "the same command resumes"),
    ENDED_AT_ONCE: ("a second Ctrl-C: nothing more is saved", "the same command resumes from the newest checkpoint"),
}
"""Exit code -> its meaning, and what to do next."""
