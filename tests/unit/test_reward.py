# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.reward` judges rows by one's own function, in a confined child, and shows what it makes of them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.inputs import look_at_data
from mrl.reward import main

MODULE = """
import os, time
def judge(response, answer, level=1, log_extra=None):
    print("judging", response)
    log_extra("first", response[:1])
    return {"right": float(response == answer), "level": 0.5 * level}

def deep(response, answer):
    return inner(response)

def inner(response):
    return {"5": 1.0}[response]

def writes(response):
    open("/tmp/mrl_reward_writes", "w")

def graded(response, grade): ...

def by_column(response, gold_value, reference_answer, asked, id):
    return float(response == reference_answer == str(gold_value) and asked == "2+3=" and id == "sum")

def by_default(response, gold_value=None):
    return float(response == str(gold_value))

def by_all(response, **others):
    return float(response == str(others["gold_value"]))

def waits(response):
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "heard")):
        time.sleep(0.01)
    return 1.0

async def swapped(row, model_client): ...

def blocking(client, row): ...

def slow(response):
    if response == "4":
        time.sleep(0.1)
    return 1.0

def lengthy(response):
    return len(response)

def misspelt(response, anwser="", level=1, *, bonus=0.5):
    return float(anwser in response) + bonus
"""
DEEP_LINE = 1 + MODULE.splitlines().index('    return {"5": 1.0}[response]')


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    Path(f"{tmp_path.name}_mine.py").write_text(MODULE)
    rows = [{"question": "2+3=", "answer": "5", "level": 2, "env_name": "math"}, {"question": "2+2=", "answer": "4"}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(folder: Path, name: str, *words: str) -> int:
    return main([f"{folder.name}_mine.py:{name}", "rows.jsonl", *words])


def test_each_row_is_judged_by_its_answer_and_by_nothing(folder: Path, capfd: pytest.CaptureFixture[str]):
    assert run(folder, "judge") == 0
    said = capfd.readouterr()
    assert [line.split() for line in said.out.splitlines()[:5]] == [
        ["row", "reply", "reward", "first", "level", "right", "extracted", "verdict"],
        ["rows:1", "5", "2", "5", "1", "1", "-", "ok"],
        ["rows:1", "(empty)", "1", "1", "0", "-", "ok"],
        ["rows:2", "4", "1.5", "4", "0.5", "1", "-", "ok"],
        ["rows:2", "(empty)", "0.5", "0.5", "0", "-", "ok"],
    ]
    assert "4 rewards from 0.5 to 2, mean 1.25" in said.out
    assert said.err.count("judging") == 4


def test_the_seconds_of_verdicts_are_said(folder: Path, capfd: pytest.CaptureFixture[str]):
    assert run(folder, "slow", "env.own.timeout_s=600") == 0
    found = re.search(r"Seconds of a verdict: median (\S+), longest (\S+) \((.*)\); (.*)", capfd.readouterr().out)
    assert found and found[3] in ("rows:1", "rows:2") and float(found[2]) >= 0.1
    assert found[4] == "env.own.timeout_s=600 ends each"


def test_what_it_raises_is_traced_once_for_each_kind(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path("replies.jsonl").write_text('"4"\n{"response": "four"}\n')
    assert run(folder, "deep", "--replies", "replies.jsonl") == 1
    said = capfd.readouterr().out
    file = folder / f"{folder.name}_mine.py"
    # The rows fail at one line, each with its own text: one kind, told once, with its count.
    assert f"2 of 2 replies, first of rows:1: KeyError: '4' ({file}:{DEEP_LINE})" in said
    assert said.count("KeyError: ") == 2 and "'four'" not in said
    assert (
        said.count("Traceback:") == 1
        and f'File "{file}", line {DEEP_LINE}, in inner' in said
        and "mrl/envs" not in said
    )
    assert "2 of 2 replies have no reward" in said


def test_a_function_that_blocks_is_told_while_it_blocks(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The function waits for a file, which the test writes once the line is there."""
    monkeypatch.setattr("mrl.reward.NEWS_S", 0.01)
    heard, told = Path("heard"), list[str]()

    class Told(io.StringIO):
        def write(self, text: str) -> int:
            told.append(text)
            heard.touch()
            return len(text)

    monkeypatch.setattr("sys.stderr", Told())
    assert run(folder, "waits", "env.own.timeout_s=600") == 0
    said = "".join(told)
    assert (
        "mrl.reward: 0 of 4 replies are judged, the function works at rows:1; env.own.timeout_s=600 ends each" in said
    )


def test_parameters_that_keep_their_defaults_are_said(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path("rows.jsonl").write_text('{"question": "2+3=", "answer": "5", "level": 2}\n')
    assert run(folder, "misspelt") == 0
    said = "keeps its default, as it is neither a column of the rows nor a name of mrl's"
    name = f"{folder.name}_mine:misspelt"
    lines = [f"{name}: anwser {said}; the nearest of them is answer", f"{name}: bonus {said}"]
    assert capfd.readouterr().out.splitlines()[-2:] == lines
    judge = f"{folder.name}_mine:judge"
    for function, expected in ((name, [f"env.own.functions.mine={line}" for line in lines[:1]]), (judge, [])):
        words = [f"++env.own.functions.mine={function}", "data.default.env_name=mine", "data.validation=null"]
        config = load_config("grpo_tiny.yaml", [*words, "data.train.data_path=rows.jsonl"])
        assert look_at_data(config, is_strict=False).doubts == expected


def test_rows_without_answers_are_said(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path("rows.jsonl").write_text('{"question": "2+3=", "solution": "5"}\n')
    assert run(folder, "lengthy") == 0
    assert "Only empty replies were judged, as no row has an answer" in capfd.readouterr().out
    Path("mine.yaml").write_text("defaults: grpo_tiny.yaml\ndata: {default: {output_key: solution}}\n")
    Path("replies.txt").write_text("5\n")
    # Overrides may follow options.
    further = (
        ["--config=mine.yaml"],
        ["data.train.output_key=solution"],
        ["--replies=replies.txt", "env.own.timeout_s=900"],
    )
    for words in further:
        assert run(folder, "lengthy", *words) == 0
        said = capfd.readouterr().out
        assert "rows:1  5 " in said and "Only empty replies" not in said


def test_a_column_that_a_key_names_as_the_answer_is_a_column_of_the_reward_too(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    Path("rows.jsonl").write_text('{"asked": "2+3=", "gold_value": 5, "id": "sum"}\n')
    keys = ("data.train.output_key=gold_value", "data.train.input_key=asked")
    for name in ("by_column", "by_default", "by_all"):
        assert run(folder, name, *keys) == 0
        said = capfd.readouterr().out
        assert "2 rewards from 0 to 1, mean 0.5" in said and "keeps its default" not in said
    function = f"++env.own.functions.mine={folder.name}_mine:by_column"
    words = [function, "data.default.env_name=mine", "data.validation=null", "data.train.data_path=rows.jsonl"]
    checked = look_at_data(load_config("grpo_tiny.yaml", [*words, *keys]), is_strict=False)
    assert checked.problems == [] and checked.doubts == []


def test_rows_beyond_the_first_are_counted(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path("rows.jsonl").write_text('{"question": "2+3=", "answer": "5"}\n' * 101)
    assert run(folder, "judge") == 0
    assert capfd.readouterr().out.splitlines()[-1] == "The first 100 of 101 rows were judged"


def test_a_module_that_is_wrong_is_to_be_corrected(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path(f"{folder.name}_mine.py").write_text("def judge(response)\n    return 1.0\n")
    with pytest.raises(SystemExit):
        run(folder, "judge")
    said = capfd.readouterr().err
    assert f"SyntaxError: expected ':' ({folder.name}_mine.py, line 1)); correct its module" in said


def test_it_is_confined_as_in_a_run(folder: Path, capfd: pytest.CaptureFixture[str]):
    assert run(folder, "writes") == 1
    assert "own functions get no network, process or file to write unless env.own.allow" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("graded", (), "graded: it takes grade, which is no value of mrl and no column of data.train; the nearest is "),
        ("nothing", (), "has no attribute 'nothing'"),
        ("judge", ("--replies", "short.txt"), "short.txt has 1 replies for 2 rows"),
        ("judge", ("--replies", "numbers.jsonl"), "numbers.jsonl:1: a reply is a text"),
    ],
)
def test_what_cannot_be_used_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], name: str, words: tuple[str, ...], message: str
):
    Path("short.txt").write_text("4")
    Path("numbers.jsonl").write_text("4\n4\n")
    with pytest.raises(SystemExit) as ended:
        run(folder, name, *words)
    assert ended.value.code == 2 and message in capfd.readouterr().err


def test_answers_that_are_read_in_another_form_are_said(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path(f"{folder.name}_typed.py").write_text(
        "def typed(response, answer: int):\n"
        "    return {'reward': float(response == int(answer)), 'said': 'a line\\n' * 99}\n"
    )
    name = f"{folder.name}_typed"
    assert main([f"{name}.py:typed", "rows.jsonl"]) == 0
    *table, typed, own = capfd.readouterr().out.splitlines()
    assert typed == f"{name}:typed says answer: int, and gets reference_answer as a text; convert it, int(answer)"
    assert own.startswith("A row's own answer gets no more than an empty reply, in 2 of 2 rows")
    # A row is a line of the table, however long the text.
    assert [line.split()[0] for line in table[1:5]] == ["rows:1", "rows:1", "rows:2", "rows:2"]
    assert all(r"a line\na line" in line and "…" in line for line in table[1:5])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["{module}.py", "rows.jsonl"],
            "{module}.py: it names no function; write {module}.py:FUNCTION (it has judge, ",
        ),
        (["{module}", "rows.jsonl"], "is a module, not a function or class; write package.module:name (it has judge, "),
        (["{module}.py:judge", "rows.jsonl", "--replies", "absent"], "--replies absent: no such file in "),
        (["{module}.py:swapped", "rows.jsonl"], "takes (row, model_client), and mrl has no model_client; write async "),
        (
            ["{module}.py:blocking", "rows.jsonl"],
            "is no async function; write async def blocking(client, row) -> float",
        ),
    ],
)
def test_what_is_not_there_is_named(folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str):
    module = f"{folder.name}_mine"
    with pytest.raises(SystemExit, match="2"):
        main([word.format(module=module) for word in words])
    assert message.format(module=module) in capfd.readouterr().err


def test_a_row_without_the_answer_that_a_function_takes_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]):
    Path(f"{folder.name}_needs.py").write_text("def needs(response, answer): return float(len(answer))\n")
    Path("rows.jsonl").write_text('{"question": "2+3=", "answer": null}\n')
    with pytest.raises(SystemExit, match="2"):
        main([f"{folder.name}_needs.py:needs", "rows.jsonl"])
    assert (
        "rows.jsonl:1:" in (said := capfd.readouterr().err) and "takes answer, and the row has no such column" in said
    )
