# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import logging
import tracemalloc
from pathlib import Path

import pytest

from mrl.config.schema.data import DataConfig
from mrl.data import reading
from mrl.data.fields import Fields, RowError
from mrl.data.reading import (
    MAX_ERRORS,
    LeftOut,
    Names,
    NoEnvironment,
    Parsed,
    Reader,
    Rows,
    Spool,
    draw,
    hold_out,
    joined,
    read_rows,
    with_processor,
    write_quarantine,
)

GOOD = b'{"value": 1}\n'
STRICT = DataConfig()
Numbers = Rows[tuple[str, int]]


def parse(fields: Fields) -> Parsed[int]:
    value = fields.get("value")
    if fields.get("agent") is not None:
        raise NoEnvironment(str(fields["agent"]))
    if not isinstance(value, int):
        raise RowError("no value")
    return Parsed(value, None if fields.get("id") is None else str(fields["id"]))


def parse_once(fields: Fields) -> Parsed[int]:
    parsed = parse(fields)
    return Parsed(parsed.value, parsed.row_id, identity=str(parsed.value))


def reader(*files: Path, setting: str = "data.train", repeat: int = 1, drops_repeated: bool = False) -> Reader[int]:
    parsed = parse_once if drops_repeated else parse
    return Reader(setting, str(files[0]), list(files), parsed, repeat, drops_repeats=drops_repeated)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def values(path: Path, *numbers: int) -> Path:
    return write(path, b"".join(json.dumps({"value": number}).encode() + b"\n" for number in numbers))


def read_all(*readers: Reader[int], data: DataConfig = STRICT) -> list[tuple[Numbers, LeftOut]]:
    names, spool = Names(), Spool[int]()
    return [read_rows(each, data, names, spool, lambda row_id, value: (row_id, value)) for each in readers]


def read(*readers: Reader[int], data: DataConfig = STRICT) -> list[Numbers]:
    return [rows for rows, _ in read_all(*readers, data=data)]


def test_rows_are_made_when_asked_for(tmp_path: Path):
    (rows,) = read(reader(values(tmp_path / "a.jsonl", 1, 2), values(tmp_path / "b.jsonl", 3)))
    assert list(rows) == [("a:1", 1), ("a:2", 2), ("b:1", 3)]
    assert rows[-1] == ("b:1", 3)
    assert list(rows[1:]) == [("a:2", 2), ("b:1", 3)]
    assert list(rows.select([2, 0])) == [("b:1", 3), ("a:1", 1)]
    with pytest.raises(IndexError):
        rows[3]


def test_rows_are_known_by_what_is_kept_of_them(tmp_path: Path):
    first, *others = (
        values(tmp_path / name / "a.jsonl", *numbers) for name, numbers in (("x", (1, 2)), ("y", (1, 2)), ("z", (2, 1)))
    )
    others.append(write(tmp_path / "bad.jsonl", first.read_bytes() + b"{}\n"))
    skipping = DataConfig(on_bad_row="skip", max_bad_row_share=1.0)
    (_, known), *read_others = (read_all(reader(path), data=skipping)[0] for path in (first, *others))
    assert [left_out.digest == known.digest for _, left_out in read_others] == [True, False, True]


def test_files_of_one_name_give_rows_names_of_their_own(tmp_path: Path):
    one, two = values(tmp_path / "one" / "train.jsonl", 1), values(tmp_path / "two" / "train.jsonl", 2)
    train, more = read(reader(one), reader(two))
    assert list(joined([train, more])) == [("train:1", 1), ("train~2:1", 2)]
    assert list(joined([more, train.select([])])) == [("train~2:1", 2)]


def test_repeated_rows_are_told_apart(tmp_path: Path):
    (rows,) = read(reader(write(tmp_path / "a.jsonl", GOOD + b'{"value": 2, "id": "own"}'), repeat=3))
    assert (
        [name for name, _ in rows]
        == [rows.id_at(index) for index in range(6)]
        == ["a:1", "a:1/1", "a:1/2", "own", "own/1", "own/2"]
    )


def test_a_data_set_that_repeats_its_rows_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(
        tmp_path / "a.jsonl",
        b"".join(b'{"value": %d, "index": %d}\n' % (value, index) for index, value in enumerate((1, 2, 1, 1, 2))),
    )
    caplog.set_level(logging.INFO)
    (rows,) = read(reader(path, drops_repeated=True))
    assert list(rows) == [("a:1", 1), ("a:2", 2)]
    assert "3 of 5 rows repeat an earlier one" in caplog.text
    assert len(read(reader(path))[0]) == 5


def test_all_bad_rows_of_a_data_set_come_at_once_and_many_are_cut(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", (GOOD + b"bad\n") * 30)
    with pytest.raises(ValueError) as caught:
        read(reader(path))
    lines = str(caught.value).splitlines()
    way_out = "correct or remove them, or set data.on_bad_row=skip data.max_bad_row_share=0.5"
    assert lines[0] == f"data.train.data_path={path} has 30 bad rows; {way_out}:"
    # One reason is one line, with the places of the first 20 rows.
    places = ", ".join(str(number) for number in range(4, 41, 2))
    assert lines[1:] == [f"  {path}:2: invalid JSON at column 1: Expecting value; also {places} and 10 more rows"]


def test_of_many_reasons_the_first_are_shown(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", b"".join(b" " * number + b"bad\n" for number in range(MAX_ERRORS + 1)))
    with pytest.raises(ValueError) as caught:
        read(reader(path))
    assert str(caught.value).splitlines()[MAX_ERRORS:] == [
        f"  {path}:{MAX_ERRORS}: invalid JSON at column {MAX_ERRORS}: Expecting value",
        "  and 1 other reason"]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (b'{"value": 3, "id": "x"}', "id 'x' was used in {path}:2 already"),
        (b'{"value": 3, "id": "a:1"}', "id 'a:1' is what a row without id is called in that line; choose another"),
    ],
)
def test_no_two_rows_have_one_id(tmp_path: Path, last: bytes, reason: str):
    path = write(tmp_path / "a.jsonl", GOOD + b'{"value": 2, "id": "x"}\n' + last)
    with pytest.raises(ValueError) as caught:
        read(reader(path))
    assert f"{path}:3: {reason.format(path=path)}" in str(caught.value)
    # Across data sets too: a prompt is known by its id alone.
    other = write(tmp_path / "b.jsonl", last)
    with pytest.raises(ValueError, match="data.validation.data_path=.*has 1 bad row;"):
        read(
            reader(write(tmp_path / "a.jsonl", GOOD + b'{"value": 2, "id": "x"}\n')),
            reader(other, setting="data.validation"),
        )


def test_keys_that_the_model_never_sees_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", GOOD * 3)
    counts = iter([(), ("context", "images"), ("context",)])
    read(
        Reader("data.train", str(path), [path], lambda fields: dataclasses.replace(parse(fields), unshown=next(counts)))
    )
    assert "2 of 3 rows have context, which their text does not repeat, and the model never sees it" in caplog.text
    assert "1 of 3 rows have images" in caplog.text


def test_skipped_rows_go_into_quarantine(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "a.jsonl", GOOD * 98 + b'{"value": "x"}\n' + GOOD + b'{"val\xff\n')
    skipping = DataConfig(on_bad_row="skip", max_bad_row_share=0.02)
    ((rows, left_out),) = read_all(reader(path), data=skipping)
    assert len(rows) == 99 and rows[98] == ("a:100", 1)
    assert f"2 of 101 rows are bad and left out, the first: {path}:99: no value" in caplog.text

    write_quarantine([left_out], tmp_path / "quarantine")
    kept = [json.loads(line) for line in (tmp_path / "quarantine" / "data.train.jsonl").read_text().splitlines()]
    assert [(row["place"], row["line"]) for row in kept] == [
        (f"{path}:99", '{"value": "x"}'),
        (f"{path}:101", '{"val\ufffd'),
    ]
    assert kept[0]["reason"] == "no value" and kept[1]["reason"].startswith("invalid UTF-8 at byte 6")
    counts = json.loads((tmp_path / "quarantine" / "left_out.json").read_text())
    assert counts == {"data.train": {"rows": 101, "bad": 2, "repeated": 0, "too_long": 0, "without_environment": {}}}

    too_many = DataConfig(on_bad_row="skip", max_bad_row_share=0.019)
    with pytest.raises(ValueError, match="has 2 bad rows; more than data.max_bad_row_share=0.019 of 101"):
        read(reader(path), data=too_many)


def test_nothing_left_out_leaves_no_quarantine(tmp_path: Path):
    ((_, left_out),) = read_all(reader(values(tmp_path / "a.jsonl", 1)))
    write_quarantine([left_out], tmp_path / "quarantine")
    assert not (tmp_path / "quarantine").exists()


def test_rows_without_environment_are_counted_and_dropped_only_when_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lost = b'{"agent": "workplace"}\n' * 2 + b'{"agent": "judge"}\n'
    path = write(tmp_path / "a.jsonl", GOOD + lost)
    with pytest.raises(ValueError) as caught:
        read(reader(path), data=DataConfig(on_bad_row="skip"))
    assert "3 of 4 rows (75.0%) ask for environments that are not there (workplace: 2 rows, judge: 1 row)" in str(
        caught.value
    )
    assert "data.drop_rows_without_environment=true" in str(caught.value)
    ((rows, left_out),) = read_all(reader(path), data=DataConfig(drop_rows_without_environment=True))
    assert list(rows) == [("a:1", 1)]
    assert "3 of 4 rows (75.0%) are left out" in caplog.text
    write_quarantine([left_out], tmp_path / "quarantine")
    counts = json.loads((tmp_path / "quarantine" / "left_out.json").read_text())
    assert counts["data.train"]["without_environment"] == {"workplace": 2, "judge": 1}


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\n\n", "has no rows$"), (b'{"agent": "x"}', "has no rows that can be used")]
)
def test_a_data_set_without_rows_is_an_error(tmp_path: Path, content: bytes, reason: str):
    with pytest.raises(ValueError, match=reason):
        read(reader(write(tmp_path / "a.jsonl", content)), data=DataConfig(drop_rows_without_environment=True))


def test_rows_are_parsed_once_and_survive_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = values(tmp_path / "a.jsonl", 1, 2)
    (rows,) = read(reader(path, repeat=2))
    path.write_text("changed")
    monkeypatch.setattr(reading, "json_object", None)
    assert list(rows) == [("a:1", 1), ("a:1/1", 1), ("a:2", 2), ("a:2/1", 2)]


def test_a_full_disk_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: open("/dev/full", "wb", buffering=0))
    with pytest.raises(ValueError, match=r"no room for the rows in /.*No space left.*TMPDIR"):
        read(reader(values(tmp_path / "a.jsonl", 1)))


def test_rows_stay_on_disk(tmp_path: Path):
    line = json.dumps({"value": 1, "text": "x" * 10_000}).encode() + b"\n"
    path = write(tmp_path / "a.jsonl", line * 3000)
    tracemalloc.start()
    (rows,) = read(reader(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 3000 and rows[2999][1] == 1
    # The file has 30 MB.
    assert peak < 1 << 20


def test_long_reading_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(reading, "PROGRESS_PERIOD_S", 0.0)
    path = values(tmp_path / "a.jsonl", 1, 2, 3, 4)
    with caplog.at_level(logging.INFO):
        read(reader(path))
    shares = [f"data.train: {count} rows of {path} are read and checked ({25 * count}%)" for count in (1, 2, 3, 4)]
    told = [record.getMessage().partition(",")[0] for record in caplog.records]
    assert told == shares, told


def test_what_is_held_out_is_a_function_of_the_seed():
    assert hold_out(100, 0.2, seed=1) == hold_out(100, 0.2, seed=1) != hold_out(100, 0.2, seed=2)
    kept, held = hold_out(100, 0.2, seed=1)
    assert sorted(kept + held) == list(range(100)) and len(held) == 20
    assert draw(5, None, seed=1) == [0, 1, 2, 3, 4]
    drawn = draw(100, 20, seed=1)
    assert len(set(drawn)) == 20 and drawn == sorted(drawn) and drawn == draw(100, 20, seed=1) != draw(100, 20, seed=2)
    assert hold_out(3, 0, seed=1) == ([0, 1, 2], [])
    with pytest.raises(ValueError, match="split_validation_size=3 holds out all rows \\(3\\)"):
        hold_out(3, 3, seed=1)


def unpacked(row):
    return {"question": row["q"], "answer": str(row["a"])}


def unpacked_wrongly(row):
    return [row] if "q" in row else {"question": object()}


def test_an_own_processor_makes_the_row_that_is_parsed():
    seen = []
    parse = with_processor(f"{__name__}:unpacked", lambda row: seen.append(row) or Parsed("", None))
    parse({"q": "1+1=", "a": 2})
    assert seen == [{"question": "1+1=", "answer": "2"}]
    with pytest.raises(RowError, match="unpacked failed with KeyError: 'q'"):
        parse({"question": "1+1="})
    wrong = with_processor(f"{__name__}:unpacked_wrongly", lambda row: Parsed("", None))
    with pytest.raises(RowError, match="returned a list, not a dict"):
        wrong({"q": 1})
    with pytest.raises(
        RowError, match="unpacked_wrongly's row.question is <object .*, a object, for which JSON has no form"
    ):
        wrong({})
