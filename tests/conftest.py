# SPDX-License-Identifier: Apache-2.0
"""Rules of all suites: long tests run only on request, only skips of expected_skips.txt pass, models cached apart."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.long import record as records
from tests.long.record import Row, record
from tests.runner.progress import EventWriter
from tests.waiting import PATIENCE

TEST_S = 1200.0 * PATIENCE
EXPECTED_SKIPS = Path(__file__).with_name("expected_skips.txt")

skipped: list[str] = []
passed: set[str] = set()
attacks: dict[str, str] = {}
"""Node id -> group of docs/security.md."""
# Not for the runs of pytest that tests start.
events = EventWriter(os.environ.pop("MRL_TEST_EVENTS", None))


def unexpected_skips(node_ids: Iterable[str], expected: str) -> list[str]:
    """Skipped tests that no line of `expected` (a pattern of node ids, then `# reason`) names."""
    patterns = [line.split("#")[0].strip() for line in expected.splitlines()]
    return [
        node_id for node_id in node_ids if not any(fnmatchcase(node_id, pattern) for pattern in patterns if pattern)
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", metavar="PART", help="run only the tests marked long(PART)")
    parser.addoption("--with-slurm", action="store_true", help="fail where Slurm is missing and could be installed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Before pytest-timeout looks. It ends tests that hang; marks give those of long parts more.
    if config.option.timeout is None:
        config.option.timeout = TEST_S
    records.is_part = bool(config.option.keyword) or any("::" in word for word in config.args)
    # Also for the processes that tests start: none of them may write into the user's home.
    folder = os.environ["MRL_CACHE"] = tempfile.mkdtemp(prefix="mrl-test-cache-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--long")
    attacks.update({item.nodeid: mark.args[0] for item in items if (mark := item.get_closest_marker("attack"))})
    chosen = [item for item in items if _runs_in(part, item)]
    config.hook.pytest_deselected(items=[item for item in items if not _runs_in(part, item)])
    items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    # What has been imported stays to the end; collections that look at it take a twentieth of the unit tests' time,
    # frequent ones more.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    events.write(collected=len(session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    events.write(test=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        skipped.append(report.nodeid)
    if report.passed and report.when == "call":
        passed.add(report.nodeid)
    if report.when == "call" or not report.passed:
        reason = (
            report.longrepr[2].removeprefix("Skipped: ")
            if report.skipped and isinstance(report.longrepr, tuple)
            else ""
        )
        events.write(test=report.nodeid, outcome=report.outcome, reason=reason)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        skipped.append(report.nodeid)


def pytest_keyboard_interrupt() -> None:
    # Fixtures, which end after this, would record the rows of the tests before.
    records.is_part = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if unexpected_skips(skipped, EXPECTED_SKIPS.read_text()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    part = session.config.getoption("--long")
    if part == "hostile" and session.config.args == ["tests"] and session.exitstatus == pytest.ExitCode.OK:
        record(part, attack_rows())


def attack_rows() -> list[Row]:
    """Per group of attacks: how many there were, and how many were held off."""
    groups = sorted(set(attacks.values()))
    counts = {group: [node_id in passed for node_id, of in attacks.items() if of == group] for group in groups}
    return [{"attack": group, "tried": len(outcomes), "held": sum(outcomes)} for group, outcomes in counts.items()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for node_id in unexpected_skips(skipped, EXPECTED_SKIPS.read_text()):
        terminalreporter.write_line(f"FAILED {node_id}: skipped, and not listed in {EXPECTED_SKIPS.name}", red=True)


def _runs_in(part: str | None, item: pytest.Item) -> bool:
    """Tells whether a test runs in the suites (`None`) or a long part; the part hostile repeats the suites' attacks."""
    own = _long_part(item)
    return own == part or (part == "hostile" and own is None and item.nodeid in attacks)


def _long_part(item: pytest.Item) -> str | None:
    mark = item.get_closest_marker("long")
    return mark.args[0] if mark else None
