# SPDX-License-Identifier: Apache-2.0
"""The part runner: it ends a part only where nothing moves, leaves no process behind, and says why a part failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.__main__ import choose, host, next_part, parse, report, result_of
from tests.runner.part import STALL_LOAD, STALL_S, Movement, Result
from tests.runner.progress import EventWriter, Progress, read_progress
from tests.sources import ROOT

LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
print(child.pid)
sys.exit(3)
"""


def test_a_part_that_works_or_finishes_tests_never_stalls():
    movement, used = Movement(), 0.0
    for minute in range(100):
        used += 60 * STALL_LOAD * 1.5  # a few per cent of a core, as on a host full of other work
        assert not movement.stalled(60.0 * minute, 0, used)
    for minute in range(100, 200):
        assert not movement.stalled(60.0 * minute, minute, used)


def test_a_part_in_which_nothing_moves_stalls():
    movement = Movement()
    assert not movement.stalled(100.0, 3, 20.0)
    assert not movement.stalled(100.0 + STALL_S, 3, 20.0)
    assert movement.stalled(101.0 + STALL_S, 3, 20.0 + STALL_LOAD * STALL_S / 2)


def test_events_add_up_and_an_unfinished_line_waits(tmp_path: Path):
    path = tmp_path / "events"
    writer = EventWriter(str(path))
    writer.write(collected=4)
    for test, outcome in (("a", "passed"), ("a", "failed"), ("b", "passed"), ("c", "skipped")):
        writer.write(test=test)
        writer.write(test=test, outcome=outcome, reason="no GPU" if outcome == "skipped" else "")
    writer.write(test="d")
    with path.open("a") as file:
        file.write('{"test": "d", "outc')
    progress = read_progress(path)
    assert (progress.num_tests, progress.num_done, progress.current) == (4, 3, "d")
    assert progress.outcomes == {"failed": 1, "passed": 1, "skipped": 1} and progress.failed == ["a"]
    assert progress.skipped == {"no GPU": 1}
    assert read_progress(tmp_path / "none") == Progress()


def test_pytest_writes_what_became_of_each_test(tmp_path: Path):
    tests = (
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n@pytest.mark.skip(reason='why')\ndef "
        "test_not(): pass\n"
    )
    (tmp_path / "test_three.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "MRL_TEST_EVENTS": str(tmp_path / "events"), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=False)
    progress = read_progress(tmp_path / "events")
    assert progress.num_tests == 3 and progress.outcomes == {"passed": 1, "failed": 1, "skipped": 1}
    assert progress.skipped == {"why": 1}


def test_a_part_leaves_no_process_and_tells_its_code(tmp_path: Path):
    command = [sys.executable, "-m", "tests.runner.part", "one", str(tmp_path), sys.executable, "-c", LEAVES_A_CHILD]
    subprocess.run(command, cwd=ROOT, check=True)
    result = Result(**json.loads((tmp_path / "one.result").read_text()))
    assert result.code == 3 and result.processor_s > 0 and result.stalled_in is None
    assert not Path(f"/proc/{int((tmp_path / 'one.txt').read_text())}").exists()


def test_the_last_screen_says_why_a_part_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, outcome in (("unit", "failed"), ("smoke", "passed"), ("proof", "skipped")):
        writer = EventWriter(str(tmp_path / f"{name}.events"))
        writer.write(test=f"test_{name}")
        writer.write(test=f"test_{name}", outcome=outcome, reason="no Chromium")
    results = [
        Result("unit", 1, 61.0, 30.0, 0.0, "", None),
        Result("smoke", -9, 700.0, 9.0, 650.0, "640 s of it in test_x", "test_x"),
        Result("types", 1, 5.0, 5.0, 0.0, "", None),
        Result("proof", 0, 5.0, 5.0, 0.0, "", None),
    ]
    report(results, tmp_path, seconds=770.0, others_s=770.0, speed=0.9)
    lines = capsys.readouterr().out.strip().splitlines()
    assert "FAILED: unit: test_unit" in lines
    assert "FAILED: smoke: nothing moved any more in test_x; ended. Its output stands above" in lines
    assert "FAILED: types: exited with 1; its output stands above" in lines
    assert "skipped 1: no Chromium" in lines
    assert any("This host is slow" in line for line in lines)
    assert lines[-1] == "1 passed, 1 failed, 1 skipped"


def test_a_fast_idle_host_is_no_reason():
    assert "slow" not in host(0.33, 0.02)


def test_words_choose_parts(capsys: pytest.CaptureFixture[str]):
    assert set(choose(parse([]))) == {"unit", "smoke", "config", "entries", "proof", "style"}
    assert {"unit", "stack", "proof", "smoke", "config", "entries"} == set(choose(parse(["--busy"])))
    assert (
        "smoke" not in choose(parse(["--full"]))
        and "--with-slurm" in choose(parse(["--full", "--with-slurm"]))["cluster"]
    )
    assert list(choose(parse(["--long", "learning"]))) == ["learning"]
    with pytest.raises(SystemExit):
        parse(["--long", "lerning"])
    assert "no part lerning; parts are " in capsys.readouterr().err


def test_light_parts_run_beside_two_heavy_ones():
    waiting, running = list(choose(parse(["--full"]))), list[str]()
    while len(running) < 3 and (name := next_part(waiting, running)):
        waiting.remove(name)
        running.append(name)
    assert running == ["stack", "learn", "unit"]
    assert next_part(waiting, ["stack", "learn"]) == "config" and next_part(waiting, ["stack", "unit"]) == "policy"
    assert next_part(["policy"], ["stack", "learn"]) is None


def test_a_part_that_somebody_has_killed_has_failed(tmp_path: Path):
    assert result_of("unit", tmp_path, -9).code == -9 and result_of("unit", tmp_path, 0).code == 1
