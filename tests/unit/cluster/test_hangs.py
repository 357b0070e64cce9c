# SPDX-License-Identifier: Apache-2.0
"""Readings over time -> who hangs; made by hand, with a clock of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mrl.cluster import hangs
from mrl.cluster.hangs import Hang, HangJudge, ProcessReading, Wait, who_is_to_blame

NOTICE_S = 50.0
STEP_S = 5.0
NAMES = ("driver", "policy rank 0", "policy rank 1", "engine 0", "raylet")
Change = Callable[[float, str], dict]


def reading(
    now: float, name: str, *, state: str = "S", core_share: float = 0.0, bytes_per_s: int = 0, **facts
) -> ProcessReading:
    pid = 100 + NAMES.index(name)
    return ProcessReading(name, pid, "host", state, core_share * now, int(bytes_per_s * now), **facts)


def follow(
    judge: HangJudge, change: Change, waits: Sequence[Wait] = (), *, begin: float = 0.0, end: float = 60.0
) -> tuple[float, Hang] | None:
    """The first finding and its moment, of readings idle but for what `change` says of a moment and a process."""
    now = begin
    while now <= end:
        finding = judge.see(now, [reading(now, name, **change(now, name)) for name in NAMES], waits)
        if finding is not None:
            return now, finding
        now += STEP_S
    return None


def wait(what: str, *names: str, since: float = 0.0) -> Wait:
    return Wait(what, lambda: names, since)


def test_a_run_that_makes_spans_is_left_alone():
    assert (
        follow(
            HangJudge(NOTICE_S), lambda now, _: {"num_done": int(now)}, [wait("train_step", "policy rank 0")], end=600
        )
        is None
    )


@pytest.mark.parametrize("victim", NAMES)
def test_a_stopped_process_is_named_though_others_go_on(victim: str):
    def change(now: float, name: str) -> dict:
        return {"state": "T"} if name == victim else {"num_done": int(now)}

    found = follow(HangJudge(NOTICE_S), change)
    assert found is not None and found[0] == NOTICE_S
    ((suspect, reason),) = found[1].suspects
    assert (suspect.name, found[1].is_hang) == (victim, True) and "state T" in reason


def test_daemons_that_come_up_slowly_do_not_hang_and_one_that_is_stopped_does():
    start = Wait("start of Ray", lambda: hangs.RAY_PROCESSES, 0.0, may_idle=True)
    slow = follow(HangJudge(NOTICE_S), lambda _, __: {}, [start])
    assert slow is not None and (slow[1].suspects[0][0].name, slow[1].is_hang) == ("raylet", False)
    stopped = follow(HangJudge(NOTICE_S), lambda _, name: {"state": "T"} if name == "raylet" else {}, [start])
    assert stopped is not None and stopped[1].is_hang
    asked = follow(HangJudge(NOTICE_S), lambda _, __: {}, [wait("ray.put", "raylet")])
    assert asked is not None and asked[1].is_hang


def test_a_process_that_was_stopped_for_a_while_is_not_named():
    assert (
        follow(HangJudge(NOTICE_S), lambda now, _: {"num_done": int(now), "state": "T" if now % 45 else "S"}, end=600)
        is None
    )


def test_a_file_system_that_does_not_answer_is_told_from_a_busy_one():
    def stuck(now: float, name: str) -> dict:
        return {"state": "D"} if name == "policy rank 1" else {"num_done": int(now)}

    def busy(now: float, name: str) -> dict:
        return stuck(now, name) | {"core_share": 0.01}

    found = follow(HangJudge(NOTICE_S), stuck)
    assert found is not None and "state D" in found[1].suspects[0][1]
    assert follow(HangJudge(NOTICE_S), busy, end=600) is None


def test_the_rank_that_waits_idly_is_named_and_not_the_one_at_work():
    def change(now: float, name: str) -> dict:
        facts = {"doing": "train_step", "phase": "train"} if name.startswith("policy") else {"num_done": int(now)}
        return facts | ({"core_share": 1.0, "state": "R"} if name == "policy rank 0" else {})

    found = follow(HangJudge(NOTICE_S), change, [wait("train_step", "policy rank 0", "policy rank 1")])
    assert found is not None and found[0] == NOTICE_S and found[1].is_hang
    assert [suspect.name for suspect, _ in found[1].suspects] == ["policy rank 1"]
    assert found[1].wait == "train_step, since 50 s, for policy rank 0, policy rank 1"


def test_of_ranks_that_all_wait_the_stopped_one_is_named():
    """It was stopped later than it last gave a sign: no state has lasted for the notice yet."""

    def change(now: float, name: str) -> dict:
        return {"state": "T"} if name == "policy rank 1" and now > 30 else {}

    found = follow(HangJudge(NOTICE_S), change, [wait("train_step", "policy rank 0", "policy rank 1")])
    assert found is not None and found[0] == NOTICE_S
    assert [(suspect.name, "state T" in reason) for suspect, reason in found[1].suspects] == [("policy rank 1", True)]


def test_long_work_is_told_as_work_and_once_known_not_at_all():
    def working(now: float, name: str) -> dict:
        return {"core_share": 0.9, "num_done": int(now > 100)} if name.startswith("policy") else {}

    judge, first = HangJudge(NOTICE_S), [wait("train_step", "policy rank 0")]
    found = follow(judge, working, first)
    assert found is not None and not found[1].is_hang and "at work" in found[1].suspects[0][1]
    judge.see(100.0, [reading(100.0, name) for name in NAMES], first)
    judge.see(105.0, [reading(105.0, name, num_done=1) for name in NAMES], [])
    # The second one may take twice as long as the first.
    found = follow(judge, working, [wait("train_step", "policy rank 0", since=105.0)], begin=105.0, end=1000.0)
    assert found is not None and found[0] == 105.0 + 2 * 105.0


@pytest.mark.parametrize(("bytes_per_s", "is_hang"), [(1_000_000, False), (1_000, True)])
def test_a_process_that_reads_or_writes_is_at_work(bytes_per_s: int, is_hang: bool):
    found = follow(HangJudge(NOTICE_S), lambda *_: {"bytes_per_s": bytes_per_s}, [wait("begin_save", "policy rank 0")])
    assert found is not None and found[1].is_hang == is_hang


def test_a_driver_that_waits_for_nobody_is_named_itself():
    found = follow(HangJudge(NOTICE_S), lambda _, name: {"doing": "after wait: set_batch"} if name == "driver" else {})
    assert found is not None and [suspect.name for suspect, _ in found[1].suspects] == ["driver"]


def test_a_complaint_is_reported_by_the_name_of_who_gave_no_answer(monkeypatch: pytest.MonkeyPatch):
    timed_out = RuntimeError(
        "policy rank 0 failed in begin_save: [gloo] Timed out waiting 30000ms for recv operation to complete"
    )
    own_fault = RuntimeError("policy rank 0 failed in begin_save: no space left")
    assert who_is_to_blame(own_fault, ["policy rank 1"], what="begin_save") is None
    assert who_is_to_blame(timed_out, [], what="begin_save") is None
    text = who_is_to_blame(timed_out, ["policy rank 1"], what="begin_save")
    assert text is not None and text.startswith("begin_save: no answer at all from policy rank 1; policy rank 0 failed")
    judge = HangJudge(NOTICE_S)
    for now in (0.0, 5.0):
        judge.see(now, [reading(now, "policy rank 0"), reading(now, "policy rank 1", state="T")], [])
    monkeypatch.setattr(hangs, "_judge", judge)
    text = who_is_to_blame(own_fault, ["policy rank 1"], what="begin_save")
    assert text is not None and "(policy rank 1 (process 102 on host) is stopped" in text
    assert hangs.explained(["policy rank 0"]) == ""
