import json
from pathlib import Path

import pytest

from mrl.data import jsonl
from mrl.data.jsonl import MAX_ERRORS, Row, read_rows

GSM8K = Path(__file__).parent / "gsm8k" / "rows.jsonl"
GOOD = b'{"question": "1+1=", "answer": "2"}\n'


def write(folder: Path, content: bytes) -> Path:
    path = folder / "train.jsonl"
    path.write_bytes(content)
    return path


def read(folder: Path, content: bytes) -> list[Row]:
    return read_rows(write(folder, content), setting="data.train.data_path")


@pytest.mark.parametrize(
    ("fields", "question", "answer"),
    [
        ({"question": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"problem": "1+1=", "expected_answer": "2"}, "1+1=", "2"),
        ({"prompt": "1+1=", "answer": "2"}, "1+1=", "2"),
        ({"input": "1+1=", "output": "2"}, "1+1=", "2"),
        ({"input": "1+1=", "expected_answer": "2", "output": "because 2"}, "1+1=", "2"),
        ({"question": " 1+1= ", "answer": "one and one\n#### 2\n"}, "1+1=", "2"),
        ({"question": "q", "answer": "a #### 1 #### 1,234,567"}, "q", "1234567"),
        ({"question": "q", "answer": "(1, 2)"}, "q", "(1, 2)"),
        ({"question": "q", "answer": 46}, "q", "46"),
        ({"question": "q", "answer": 0.5}, "q", "0.5"),
        ({"question": "ä\u2028€", "answer": "2"}, "ä\u2028€", "2"),
    ],
)
def test_rows(tmp_path: Path, fields: dict[str, object], question: str, answer: str):
    assert read(tmp_path, json.dumps(fields, ensure_ascii=False).encode()) == [Row("train:1", 1, question, answer, None)]


def test_a_row_may_name_itself_and_its_environment(tmp_path: Path):
    rows = read(tmp_path, GOOD + b'{"question": "q", "answer": "a", "id": 7, "env_name": "math"}\n')
    assert [(row.prompt_id, row.line, row.env_name) for row in rows] == [("train:1", 1, None), ("7", 2, "math")]


def test_mark_line_ends_and_blank_lines_are_no_error(tmp_path: Path):
    rows = read(tmp_path, b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + b"\r\n  \n" + GOOD.rstrip())
    assert [row.line for row in rows] == [1, 4]


def test_real_rows_of_gsm8k():
    rows = read_rows(GSM8K, setting="data.train.data_path")
    assert [row.expected_answer for row in rows[:4]] == ["72", "10", "5", "42"]
    assert rows[4].expected_answer.isdigit() and int(rows[4].expected_answer) >= 1000
    assert rows[0].question.startswith("Natalia sold clips to 48 of her friends")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "q", "answer": "a"', "invalid JSON at column"),
        (b"not json", "invalid JSON at column 1"),
        (b'{"question": "q"} {"answer": "a"}', "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'["q", "a"]', "must be a JSON object, not list"),
        (b"null", "must be a JSON object, not NoneType"),
        (b'{"question": "q\0", "answer": "a"}', "NUL byte at column 16"),
        (b'{"question": "q\\u0000", "answer": "a"}', "question contains a NUL"),
        (b'{"question": "\\ud800", "answer": "a"}', "half of a surrogate pair"),
        (b'{"question": "\xff", "answer": "a"}', "invalid UTF-8 at byte 15"),
        (b'{"answer": "a"}', "no key question or problem or prompt or input (the row has 'answer')"),
        (b'{"question": "q", "solution": "a"}', "no key expected_answer or answer or output"),
        (b"{}", "(the row has none)"),
        (b'{"question": "", "answer": "a"}', "question is empty"),
        (b'{"question": " \\n", "answer": "a"}', "question is empty"),
        (b'{"question": "q", "answer": ""}', "answer is empty"),
        (b'{"question": "q", "answer": "work ####  "}', "nothing follows ####"),
        (b'{"question": ["q"], "answer": "a"}', "question must be a string, not list"),
        (b'{"question": "q", "answer": true}', "answer must be a string, not bool"),
        (b'{"question": "q", "answer": "a", "id": {}}', "id must be a string, not dict"),
        (b'{"question": "q", "answer": "a", "id": "train:1"}', "id 'train:1' was used in line 1 already"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path: Path, line: bytes, reason: str):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, GOOD + line + b"\n" + GOOD)
    message = str(caught.value)
    assert message.startswith(f"data.train.data_path={tmp_path}/train.jsonl has 1 bad rows")
    assert f"train.jsonl:2: {reason}" in message or reason in message.partition("train.jsonl:2: ")[2]


def test_an_overlong_line_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 64)
    with pytest.raises(ValueError, match="has 1 bad rows") as caught:
        read(tmp_path, GOOD + b'{"question": "' + b"x" * 500 + b'"}\n' + GOOD)
    assert "train.jsonl:2: the line is longer than" in str(caught.value)


def test_all_errors_come_at_once_and_many_are_cut(tmp_path: Path):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, (GOOD + b"bad\n") * 30)
    lines = str(caught.value).splitlines()
    assert "has 30 bad rows" in lines[0]
    assert len(lines) == 1 + MAX_ERRORS + 1
    assert lines[2].strip().startswith(f"{tmp_path}/train.jsonl:4:")
    assert lines[-1] == "  and 10 more"


def test_a_file_without_rows_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="has no rows"):
        read(tmp_path, b"\n\n")


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_read_names_its_key(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="data.validation.data_path=.* cannot be read"):
        read_rows(tmp_path / name, setting="data.validation.data_path")
