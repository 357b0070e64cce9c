# SPDX-License-Identifier: Apache-2.0
"""Failures of the user's functions in the driver's log: one of each kind."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mrl.config.texts import rollout_name, safe_text
from mrl.types import Verdict

logger = logging.getLogger(__name__)

MAX_KINDS = 8
MAX_REASON = 500


class Traces:
    """Logs the traceback of a rollout's verdict, unless one of its kind is logged already."""

    def __init__(self, what: str) -> None:
        """`what` ends the first line: `is not scored, as its reward function raised`."""
        self._what, self._kinds, self._reasons = what, set[str](), set[str]()

    def log(self, request_id: str, verdict: Verdict, log_file: Path, *, way_out: str) -> None:
        """Logs the traceback, and names the file that has those of all rollouts."""
        if not verdict.trace or verdict.trace_kind in self._kinds or len(self._kinds) >= MAX_KINDS:
            return
        self._kinds.add(verdict.trace_kind)
        text = "%s %s. %s\nThe log of all such rollouts, and of what the function prints: %s%s"
        logger.warning(text, rollout_name(request_id), self._what, verdict.trace, log_file, way_out)

    def log_reason(self, request_id: str, verdict: Verdict) -> None:
        """Logs a verdict that failed without a traceback: a timeout, a crash, a value that is no reward."""
        kind = re.sub(r"\d+", "", verdict.reason) or verdict.status
        if verdict.has_reward or verdict.trace or kind in self._reasons or len(self._reasons) >= MAX_KINDS:
            return
        self._reasons.add(kind)
        text = "%s %s: %s. Further ones are masked without a word, and counted in the step"
        what = self._what.partition(",")[0]
        logger.warning(text, rollout_name(request_id), what, safe_text(verdict.reason, MAX_REASON))
