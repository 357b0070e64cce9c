# SPDX-License-Identifier: Apache-2.0
"""Run folders of strangers in `mrl.view` and the report: shown or refused in one line, and nothing waits or grows."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest

from mrl.ops.view.server import Runs
from tests.hostile.test_files import place
from tests.reading import read_page
from tests.unit.ops.view.runs import make_run, rollout, write_dump
from tests.waiting import HANG_S

pytestmark = pytest.mark.attack("a run folder of a stranger")

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
)
DUMP = "logs/exp_001/train_data_step1.jsonl.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "run", num_steps=3)
    write_dump(folder, 1, [rollout(0, "12")])
    return folder


def shown(folder: Path) -> dict | str:
    """Data of a folder's page, with the rollouts of a dump, or the refusal. Fails if that does not end."""
    found: list[dict | str] = []

    def show() -> None:
        try:
            runs = Runs([folder])
            (run,) = read_page(runs.page().decode())["runs"]
            runs.rollouts("0", "train_data_step1")
            runs.timeline("0", "1")
            found.append(run)
        except (ValueError, RecursionError) as error:
            found.append(str(error))

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert found, "it hangs, or ends in another error"
    return found[0]


def put(folder: Path, name: str, content: object) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "samples.jsonl", "config.yaml", "about.json", "refit.json", "x.json", "evaluations/x.json",
     "step_1/manifest.json",
     DUMP, "logs/exp_001/actors/driver.spans.json"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
def test_what_is_no_file_is_not_waited_for(folder: Path, name: str, kind: str):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    put(folder, "step_1/COMPLETE", "")
    place(path, kind)
    found = shown(folder)
    assert isinstance(found, dict) or (str(path) in found and "\n" not in found)


@pytest.mark.parametrize(
    "text", [BOMB, "[" * 100_000, "a: " + "9" * 100_000, "a: !!python/object:os.system {}", "- 1", "\0"], ids=range(6)
)
def test_configs_that_never_end_are_left_out(folder: Path, text: str):
    put(folder, "config.yaml", text)
    found = shown(folder)
    assert isinstance(found, dict) and found["about"] == []


ODD = ["x", [1], {"a": 1}, True, -1, 1e300, 10**400, None, [[[]]]]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_odd_values_end_in_one_line(folder: Path, value: object):
    """Each in every place that the page reads; a folder is shown or refused by its name."""
    evaluation = {"metric": "x", "scores": {}, "prompts": [{"prompt": "a", "answers": [{"text": "b"}]}]}
    cases: dict[str, list[object]] = {
        "metrics.jsonl": [{"step": value}, {"step": 1, "train/loss": value}, {"step": 1, "time/total": value}, value],
        "samples.jsonl": [
            dict.fromkeys(["step", "split", "prompt", "text", "extracted", "expected", "reward", "status"], value)
        ],
        "config.yaml": [
            {"grpo": value},
            {"algorithm": value},
            {"cluster": {"num_nodes": value}},
            {"grpo": {"max_num_steps": value}},
        ],
        "about.json": [value, {"plan": value}, {"plan": {"train": value}}],
        "refit.json": [value],
        "x.json": [value, dict.fromkeys(evaluation, value), evaluation, evaluation | {"prompts": [value]}],
        "step_1/manifest.json": [value, {"a": value}, {"a": {"bytes": value}}],
    }
    put(folder, "step_1/COMPLETE", "")
    for name, contents in cases.items():
        before = (folder / name).read_text() if (folder / name).exists() else None
        for content in contents:
            put(folder, name, content)
            found = shown(folder)
            assert isinstance(found, dict) or (str(folder) in found and "\n" not in found and len(found) < 1000), (
                name,
                content,
            )
        (folder / name).unlink() if before is None else (folder / name).write_text(before)


def test_lines_without_an_end_are_cut(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The limits are smaller here, so that the test is quick."""
    monkeypatch.setattr("mrl.ops.view.dumps.MAX_LINE_BYTES", 2**16)
    monkeypatch.setattr("mrl.ops.view.dumps.MAX_DUMP_BYTES", 2**20)
    (folder / DUMP).write_bytes(gzip.compress(b"[" * 2**24 + b"\n"))
    assert isinstance(shown(folder), dict)
