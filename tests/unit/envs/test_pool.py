# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mrl.config.schema.env import EnvConfig
from mrl.envs import own, scorer
from mrl.envs.task import Environment, Task
from mrl.types import Verdict
from tests.unit.envs.deadlines import culprits_miss_theirs
from tests.unit.envs.pools import Pool
from tests.waiting import HANG_S, SOON_S, wait_until

HOSTILE = Environment("mrl.envs.own:make", {"function": "tests.unit.envs.hostile:score"}, allowances=("processes",))
ROOT = Path(__file__).resolve().parents[3]


def tasks(pairs: Sequence[tuple[str, str]]) -> list[Task]:
    return [Task((text,), expected) for text, expected in pairs]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(replace(HOSTILE, num_workers=2, timeout_s=HANG_S), memory_bytes=1 << 28) as pool:
        with culprits_miss_theirs("hang", "spin", "fork"):
            yield pool


FAULTS = {
    "timeout": ["hang", "spin", "fork"],
    "crash": ["exit", "segv", "null pointer", "garbage", "huge", "no JSON", "no object", "no text"],
    "error": [
        *(
            "bomb",
            "raise",
            "sys.exit",
            "recursion",
            "nan",
            "inf",
            "no float32",
            "none",
            "str",
            "tuple",
            "object",
            "no reward",
        ),
        *("bad component", "nan component", "bad observation"),
    ],
}


@pytest.mark.parametrize(
    ("fault", "status"), [(fault, status) for status, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_costs_one_verdict(pool: Pool, fault: str, status: str):
    before = pool.counts[status]
    good = [(f"beside {fault} {i}", f"beside {fault} {i % 2}") for i in range(4)]
    verdicts = pool.score(tasks([good[0], (fault, "x"), *good[1:]]))
    assert (verdicts[1].status, verdicts[1].is_valid, verdicts[1].text) == (status, False, fault)
    assert verdicts[1].reason
    rest = [verdicts[0], *verdicts[2:]]
    assert [(verdict.status, verdict.reward, verdict.extracted) for verdict in rest] == [
        ("ok", float(text == expected), text) for text, expected in good
    ]
    assert pool.counts[status] == before + 1


@pytest.mark.parametrize("forged", ["forged reward", "forged observation"])
def test_an_answer_that_no_reward_function_gives_is_refused(forged: str):
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=HANG_S)) as pool:
        (verdict,) = pool.score(tasks([(forged, "x")]))
    assert (verdict.status, verdict.is_valid) == ("error", False)


def test_memory_taken_bit_by_bit_ends_at_the_limit():
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=HANG_S), memory_bytes=1 << 28) as pool:
        verdicts = pool.score(tasks([("grow", "x"), ("good", "good")]))
    assert [verdict.status for verdict in verdicts] == ["error", "ok"]


def test_many_faults_at_once(pool: Pool):
    items = [("exit", str(i)) for i in range(3)] + [(f"many {i}", f"many {i}") for i in range(20)] + [("hang", "y")]
    verdicts = pool.score(tasks(items))
    assert [verdict.status for verdict in verdicts] == ["crash"] * 3 + ["ok"] * 20 + ["timeout"]


def test_prints_of_a_reward_function_do_no_harm(pool: Pool):
    assert pool.score(tasks([("print", "print")]))[0].reward == 1.0


def test_long_and_odd_texts_arrive(pool: Pool):
    texts = ["x" * 3_000_000, "", "\x00", "\ud800", "ä€🙂", "0.1\n"]
    verdicts = pool.score(tasks([(text, text) for text in texts]))
    assert [verdict.reward for verdict in verdicts] == [1.0] * len(texts)
    assert [verdict.extracted for verdict in verdicts[1:]] == ["", "\ufffd", "\ufffd", "ä€🙂", "0.1\n"]
    assert len(verdicts[0].extracted) <= scorer.MAX_EXTRACTED_CHARACTERS


def test_equal_items_are_scored_once(pool: Pool):
    before = pool.counts["cached"]
    assert pool.score(tasks([("twin", "twin")] * 5 + [("twin", "other")]))[4].reward == 1.0
    assert pool.counts["cached"] == before + 4
    pool.score(tasks([("twin", "twin")]))
    assert pool.counts["cached"] == before + 5


def test_what_is_not_repeatable_judges_equal_items_one_by_one():
    with Pool(replace(HOSTILE, is_repeatable=False, timeout_s=HANG_S)) as pool:
        (task,) = tasks([("twin", "twin")])

        async def judged() -> list[float]:
            jobs = [pool.pool.submit(task) for _ in range(3)]
            return [(await job.verdict).reward for job in jobs]

        assert pool.run(judged()) == [1.0] * 3
        assert pool.pool.num_begun == 3 and not pool.pool._jobs
    assert not own.environment("mine", EnvConfig(), None).is_repeatable


def test_faults_are_not_remembered(pool: Pool):
    before = pool.counts["crash"]
    pool.score(tasks([("exit", "z")] * 2))
    pool.score(tasks([("exit", "z")]))
    assert pool.counts["crash"] == before + 3


def test_long_texts_are_not_remembered(pool: Pool):
    before = pool.counts["cached"]
    for _ in range(2):
        pool.score(tasks([("y" * 1001, "")]))
    assert pool.counts["cached"] == before


def test_memory_of_verdicts_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scorer, "MAX_REMEMBERED", 3)
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=HANG_S)) as pool:
        items = [(f"bounded {i}", "") for i in range(5)]
        pool.score(tasks(items))
        pool.score(tasks(items[2:]))
        assert pool.counts["cached"] == 3
        assert [verdict.text for verdict in pool.score(tasks(items))] == [text for text, _ in items]


def test_a_deadline_starts_when_a_child_begins_and_not_when_the_text_comes():
    items = [("nap", str(index)) for index in range(5)]
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=HANG_S)) as pool, culprits_miss_theirs() as deadlines_s:
        verdicts = pool.score(tasks(items))
    assert [verdict.status for verdict in verdicts] == ["ok"] * 5
    # The last one has waited for all others, and has the whole time.
    assert (
        pool.told == [(name, is_judged) for _, name in items for is_judged in (False, True)]
        and deadlines_s == [HANG_S] * 5
    )


def test_an_idle_child_begins_what_comes_while_another_is_slow():
    with Pool(replace(HOSTILE, num_workers=2, timeout_s=HANG_S)) as pool:

        async def score() -> list[Verdict]:
            slow = asyncio.ensure_future(pool.judge(tasks([("hang", "a")])))
            while not pool.told:
                await asyncio.sleep(0.01)
            return [*await pool.judge(tasks([("late", "late"), ("hang", "a")])), *await slow]

        with culprits_miss_theirs("hang", when=lambda: len(pool.told) == 3):
            verdicts = pool.run(score())
    assert [verdict.status for verdict in verdicts] == ["ok", "timeout", "timeout"]
    # The second `hang` is the same task, and gets the verdict of the first.
    assert pool.told == [("a", False), ("late", False), ("late", True), ("a", True)]


@pytest.fixture(params=["asyncio", *(["uvloop"] if find_spec("uvloop") else [])])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each kind of event loop: Ray's workers take uvloop's where it is installed."""
    module = import_module(request.param)
    asyncio.set_event_loop_policy(getattr(module, "EventLoopPolicy", asyncio.DefaultEventLoopPolicy)())
    yield
    asyncio.set_event_loop_policy(None)


def test_an_answer_in_time_counts_though_the_parent_is_held_up(loops: None):
    async def answered_while_held_up(ours: socket.socket, theirs: socket.socket) -> bytes:
        ours.setblocking(False)
        answer = asyncio.ensure_future(scorer._within(SOON_S, asyncio.get_running_loop().sock_recv(ours, 1)))
        for _ in range(3):  # until it waits
            await asyncio.sleep(0)
        theirs.send(b"x")
        time.sleep(2 * SOON_S)
        return await answer

    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert asyncio.run(answered_while_held_up(ours, theirs)) == b"x"


def test_a_child_that_dies_idle_costs_nothing(pool: Pool):
    pool.score(tasks([("before", "before")]))
    for child in children(os.getpid()):
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, children(os.getpid()))), "end of the children")
    assert pool.score(tasks([("after", "after")]))[0].status == "ok"


def test_children_that_cannot_start_are_an_error():
    with pytest.raises(RuntimeError, match="no_such_module.*does not start.*3 times"):
        Pool(Environment("no_such_module:make"))


def test_a_closed_pool_refuses():
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=HANG_S)) as pool:
        pool.pool.close()
        with pytest.raises(RuntimeError, match="the reward pool of .* is closed"):
            pool.score(tasks([("a", "a")]))


def test_the_grandchild_of_a_killed_child_is_gone():
    others = set(children(os.getpid()))
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=SOON_S)) as pool:
        (child,) = set(children(os.getpid())) - others
        pool.score(tasks([("fork", "")]))
        wait_until(lambda: members(child) == [], "end of the grandchild")


def test_a_spare_child_waits_once_a_text_has_killed_one():
    others = set(children(os.getpid()))
    with Pool(replace(HOSTILE, num_workers=1, timeout_s=HANG_S, blames_text=True)) as pool:
        assert len(set(children(os.getpid())) - others) == 1
        pool.score(tasks([("exit", "")]))
        first = set(children(os.getpid())) - others
        assert len(first) == 2
        assert pool.score(tasks([("exit", "again"), ("a", "a")]))[1].reward == 1.0
        # The spare has taken the place of the child that died, and died itself in the second try: two others are there.
        assert len(set(children(os.getpid())) - others) == 2
    assert set(children(os.getpid())) <= others


def test_children_die_with_their_parent():
    code = (
        "from tests.unit.envs.pools import Pool; from mrl.envs.task import Environment, Task; "
        f"Pool({replace(HOSTILE, num_workers=2, timeout_s=HANG_S)!r}).score([Task(('spin',))])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(lambda: spinning(parent.pid), "child that computes")
    orphans = children(parent.pid)
    assert len(orphans) == 2
    parent.kill()
    parent.wait(HANG_S)
    wait_until(lambda: not any(map(is_alive, orphans)), "end of the orphans")


def test_mathematics_end_to_end():
    mathematics = Environment("mrl.envs.math:make", {"impl": "hf_math_verify", "is_strict": False}, timeout_s=HANG_S)
    with Pool(mathematics) as pool:
        verdicts = pool.score(
            tasks([("046", "46"), ("47", "46"), ("9^9^9^9^9", "3"), ("46", ""), ("\\boxed{\\frac12}", "0.5")])
        )
    assert [(verdict.status, verdict.reward) for verdict in verdicts] == [
        ("ok", 1.0),
        ("ok", 0.0),
        ("ok", 0.0),
        ("error", 0.0),
        ("ok", 1.0),
    ]


def stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def state(pid: int) -> str:
    return stat(pid)[0] if stat(pid) else "Z"


def is_alive(pid: int) -> bool:
    return state(pid) != "Z"


def processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def children(parent: int) -> list[int]:
    return [pid for pid in processes() if (fields := stat(pid)) and int(fields[1]) == parent]


def members(group: int) -> list[int]:
    return [pid for pid in processes() if (fields := stat(pid)) and int(fields[2]) == group and is_alive(pid)]


def spinning(parent: int) -> list[int]:
    """Children that have used more CPU time than a start takes, in clock ticks."""
    return [pid for pid in children(parent) if (fields := stat(pid)) and int(fields[11]) > 30]
