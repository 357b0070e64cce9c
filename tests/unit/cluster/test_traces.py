# SPDX-License-Identifier: Apache-2.0
import logging
from pathlib import Path
from typing import get_args

import pytest

from mrl.cluster.traces import MAX_KINDS, Traces
from mrl.types import Status, Verdict


def test_the_first_reward_of_each_kind_that_fails_without_a_traceback_is_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    traces = Traces("is not scored, as its reward function raised")
    slow = Verdict(0.0, False, "timeout", "", "", reason="timeout of rw:slow, no verdict within 10 s (its timeout_s)")
    flagged = Verdict(0.0, False, "flagged", "", "", reason="the environment masks it")
    for number, verdict in enumerate([Verdict(1.0, True, "ok", "", ""), flagged, slow, slow]):
        traces.log_reason(f"0/train:{number}/0", verdict)
    traces.log_reason("0/train:9/0", Verdict(0.0, False, "error", "", "", reason="\x1b[2J" + "x" * 9000))
    for number in range(3):  # of one status and another reason, which differs in its numbers
        traces.log_reason(f"0/train:1{number}/0", Verdict(0.0, False, "error", "", "", reason=f"returns [{number}]"))
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "train:10" in third and "is not scored: returns [0]" in third
    assert "train:2" in first and "is not scored: timeout of rw:slow, no verdict within 10 s" in first
    assert "train:9" in second and "\x1b" not in second and len(second) < 700


def test_kinds_of_failures_without_a_traceback_take_no_place_of_those_with_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    traces = Traces("is not scored, as its reward function raised")
    for status in get_args(Status):
        for kind in "abcdefghi":
            traces.log_reason("0/train:0/0", Verdict(0.0, False, status, "", "", reason=f"{status} {kind}"))
    assert len(caplog.records) == MAX_KINDS
    for place in range(MAX_KINDS + 2):
        trace = f'Traceback:\n  File "/r.py", line {place}, in f\nValueError'
        verdict = Verdict(0.0, False, "error", "", "", reason="ValueError: x", trace=trace)
        traces.log("0/train:0/0", verdict, tmp_path / "rewards.log", way_out="")
    assert sum("/r.py" in record.getMessage() for record in caplog.records) == MAX_KINDS
