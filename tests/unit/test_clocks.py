# SPDX-License-Identifier: Apache-2.0
"""No test verdict depends on how fast the host is: none compares with a clock, and no limit is shorter than a hang.

`tests/waiting.py` has what to use instead. Tests of long parts may measure, and the runner does; tests of GPUs run
elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.sources import ROOT, tree_of

NOT_READ = ("tests/long/", "tests/gpu/", "tests/runner/", "tests/waiting.py", "tests/unit/test_clocks.py")
AHEAD, RANKS = "tests/stack/ahead/test_ahead.py", "tests/stack/refit/test_refit_processes.py"
EXCEPTIONS: Mapping[str, str] = {
    f"{AHEAD}::test_a_silent_environment_is_not_waited_for_forever_when_an_engine_is_lost": (
        "the deadline expires: the environment hangs"
    ),
    f"{RANKS}::test_a_rank_or_worker_that_hangs_in_a_later_round_is_named_and_all_others_leave": (
        "the deadline expires: a rank is stopped"
    ),
    "tests/faults/test_hangs.py::test_a_frozen_run_folder_is_named_and_the_run_goes_on_after_the_thaw": (
        "it expires: the disk is frozen"
    ),
    "tests/stack/cluster/test_reward_actors.py::<module>": (
        "a lower bound: the batch takes longer, and no rollout has this deadline"
    ),
    "tests/unit/plan/test_deadlines.py::test_a_tiny_model_has_the_five_minutes_of_its_processes": (
        "computed seconds, not waited for"
    ),
    "tests/unit/plan/test_deadlines.py::test_a_folder_without_weights_is_judged_by_its_config": (
        "computed seconds, not waited for"
    ),
    "tests/unit/plan/test_deadlines.py::test_what_the_config_says_wins": "computed seconds, not waited for",
}
"""File::function -> why it may: its deadline is what is tested, and expires; or a lower bound, which a slower host only
exceeds.
"""

CLOCKS = {"monotonic", "time", "perf_counter", "process_time", "thread_time"}
# Calls that hand on what they are given; what other calls return of a time is no time.
PASSING = {"min", "max", "abs", "round", "float", "int", "sum", "sorted"}
LIMITS = {"timeout", "timeout_s", "deadline_s", "limit_s", "worker_timeout_s"}
WAITS = {"join", "wait", "result", "communicate", "poll", "settimeout"}
LIMIT_NAME = re.compile(r"(^|_)(TIMEOUT|DEADLINE|LIMIT|PATIENCE)(_S)?$")
DURATION = re.compile(r"(^|[_./])(seconds|elapsed|duration|s)$")
OVERRIDE = re.compile(r"(?:timeout_s|deadlines\.\w+_s)=([0-9.]+)")
SHORTEST_S, SHORTEST_MARK_S = 300, 1200
"""Limits are at least `HANG_S`, and a test's own at least pytest's."""


def faults(source: str) -> dict[str, list[str]]:
    """Function -> lines that compare with a clock, bound a duration from above, or limit a wait to less than a hang."""
    found: dict[str, list[str]] = {}
    for name, nodes in _functions(tree_of(source)):
        clocked = _names_of_times(nodes)
        for node in nodes:
            if (isinstance(node, ast.Compare) and _is_hasty(node, clocked)) or _is_short_limit(node):
                found.setdefault(name, []).append(
                    f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0]:.140}"
                )
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Outermost functions and methods with all that is in them, and the rest of the module."""

    def inside(node: ast.AST, own: list[ast.AST]) -> Iterator[tuple[str, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child.name, list(ast.walk(child))
            else:
                own.append(child)
                yield from inside(child, own)

    rest: list[ast.AST] = []
    yield from inside(tree, rest)
    yield "<module>", rest


def _names_of_times(nodes: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    assigned = [(node.targets, node.value) for node in nodes if isinstance(node, ast.Assign)]
    assigned += [
        ([node.target], node.value)
        for node in nodes
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None
    ]
    for _ in range(3):  # names of names of names
        for targets, value in assigned:
            if _is_time(value, names):
                names |= {target.id for whole in targets for target in ast.walk(whole) if isinstance(target, ast.Name)}
    return names


def _is_time(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        module, _, last = called.rpartition(".")
        is_clock = last.removesuffix("_ns") in CLOCKS and (
            module in ("time", "loop") or (not module and last != "time")
        )
        is_clock |= called.endswith(("datetime.now", "get_running_loop().time"))
        return is_clock or (called in PASSING and any(_is_time(argument, names) for argument in node.args))
    if isinstance(node, ast.Name):
        return node.id in names
    return not isinstance(node, ast.Attribute | ast.Lambda) and any(
        _is_time(child, names) for child in ast.iter_child_nodes(node)
    )


def _is_hasty(node: ast.Compare, clocked: set[str]) -> bool:
    sides = [node.left, *node.comparators]
    if any(_is_time(side, clocked) for side in sides):
        return True
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        less, more = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
        if (
            isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            and _is_number(more)
            and DURATION.search(_last_name(less))
        ):
            return True
    return False


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return ""


def _is_short_limit(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr="timeout"), args=[limit]) if (
            ast.unparse(value) == "pytest.mark"
        ):
            return _is_number(limit, SHORTEST_MARK_S)
        case ast.Call(func=ast.Attribute(attr=method), args=[limit]) if method in WAITS and _is_number(
            limit, SHORTEST_S
        ):
            return True
        case ast.Call(keywords=keywords):
            return any(keyword.arg in LIMITS and _is_number(keyword.value, SHORTEST_S) for keyword in keywords)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return bool(LIMIT_NAME.search(name)) and _is_number(value, SHORTEST_S)
        case ast.Constant(value=str(text)):
            return any(0 < float(seconds.rstrip(".")) < SHORTEST_S for seconds in OVERRIDE.findall(text))
    return False


def _is_number(node: ast.AST, below: float = float("inf")) -> bool:
    """True for a number above 0 and `below` another."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and 0 < float(str(node.value)) < below


def test_no_verdict_depends_on_the_speed_of_the_host():
    found: dict[str, list[str]] = {}
    for path in sorted(Path(ROOT, "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith(NOT_READ):
            found |= {f"{name}::{function}": lines for function, lines in faults(path.read_text()).items()}
    assert {place: lines for place, lines in found.items() if place not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() - found.keys() == set(), "exceptions that are none any more"


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - started < 5",
        "started = time.monotonic()\nassert started + 1 > ended",
        "started = time.process_time()\ntook = time.process_time() - started\nassert took < 2",
        "while time.time() < end: time.sleep(1)",
        "assert min(time.perf_counter_ns() - start for start in starts) > 5",
        "if (now := time.monotonic()) and now > end: pass",
        "assert result.seconds < 10",
        "assert 5.0 >= metrics['time/elapsed']",
        "thread.join(30)",
        "queue.get(timeout=10)",
        "subprocess.run(command, timeout=60)",
        "RewardPool(replace(HOSTILE, timeout_s=2.0))",
        "TIMEOUT_S = 20.0",
        "overrides = ['deadlines.reward_s=2']",
        "overrides = ['env.math.timeout_s=60']",
        "@pytest.mark.timeout(900)\ndef test_x(): pass",
        "def test_x():\n    def inner():\n        return time.monotonic() > end",
        "class Attempt:\n    def wait(self):\n        assert time.monotonic() < self.end",
    ],
)
def test_a_verdict_by_the_clock_is_found(line: str):
    assert faults(line)


@pytest.mark.parametrize(
    "line",
    [
        "wait_until(path.exists, 'file')",
        "thread.join(HANG_S)",
        "subprocess.run(command, timeout=3 * HANG_S)",
        "RewardPool(replace(HOSTILE, timeout_s=SOON_S))",
        "worker.wait_until_begun(time.monotonic() + HANG_S)",
        "assert collect_garbage(root, now=time.time()) == []",
        "assert clock.now - started == 5.0",
        "assert scored.seconds > 0",
        "assert load.wait_s < other.wait_s",
        "', '.join(names)",
        "wait_for_nodes(read, timeout_s=0)",
        "overrides = ['env.math.timeout_s=600']",
        "@pytest.mark.timeout(1800)\ndef test_x(): pass",
        "assert path.stat().st_mtime == before",
    ],
)
def test_a_verdict_without_a_clock_passes(line: str):
    assert faults(line) == {}
