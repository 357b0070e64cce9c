"""Reads JSONL files of questions with known answers. Everything wrong in a file is reported at once, as file:line: reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

Parsed = TypeVar("Parsed")

QUESTION_KEYS = ("question", "problem", "prompt", "input")
ANSWER_KEYS = ("expected_answer", "answer", "output")
GOLD_MARK = "####"
"""GSM8K writes the solution, this mark, and the gold answer."""
MAX_LINE_BYTES = 16 << 20
MAX_ERRORS = 20


@dataclass(frozen=True)
class Row:
    """One row of a data file."""

    prompt_id: str
    line: int
    question: str
    expected_answer: str
    env_name: str | None
    """None: the row names no environment."""


class RowError(Exception):
    """What is wrong with one line."""


def read_rows(path: Path, *, setting: str) -> list[Row]:
    """All rows of a JSONL file, in order; see `read_objects`.

    The question is the first of `QUESTION_KEYS` that is there, the answer the first of `ANSWER_KEYS`, from `####` on if that occurs in it.
    `id` names the prompt, else `<file stem>:<line>`; `env_name` its environment. `setting` is the config key of the file, for messages.

    Raises:
        ValueError: the file cannot be read or has no rows, or naming up to 20 lines that are wrong.
    """
    rows = read_objects(path, lambda number, fields: parse_row(fields, stem=path.stem, line_number=number), setting=setting)
    raise_errors(repeated_ids(path, [(row.line, row.prompt_id) for row in rows]), setting=setting, path=path)
    return rows


def read_objects(path: Path, parse: Callable[[int, dict[str, object]], Parsed], *, setting: str) -> list[Parsed]:
    """`parse(line number, fields)` of every row of a JSONL file, in order; blank lines, a byte order mark and CRLF are no error.

    `parse` raises `RowError` for a row that is wrong. `setting` is the config key of the file, for messages.

    Raises:
        ValueError: the file cannot be read or has no rows, or naming up to 20 lines that are wrong.
    """
    rows: list[Parsed] = []
    errors: list[str] = []
    try:
        with path.open("rb") as file:
            for number, line in _lines(file):
                collect_error(errors, f"{path}:{number}", lambda number=number, line=line: rows.append(parse(number, _json_object(line))))
    except OSError as error:
        raise ValueError(f"{setting}={path} cannot be read: {error.strerror}; give the path of a JSONL file") from error
    raise_errors(errors, setting=setting, path=path)
    if not rows:
        raise ValueError(f"{setting}={path} has no rows")
    return rows


def repeated_ids(path: Path, ids: Iterable[tuple[int, str]]) -> list[str]:
    """What is wrong with the `(line, id)` of rows: ids that were used before."""
    line_of_id: dict[str, int] = {}
    return [
        f"{path}:{line}: id {name!r} was used in line {first} already"
        for line, name in ids
        if (first := line_of_id.setdefault(name, line)) != line
    ]


def collect_error(errors: list[str], place: str, action: Callable[[], None]) -> None:
    """Runs `action`; adds what is wrong with the row at `place` to `errors`."""
    try:
        action()
    except RowError as error:
        errors.append(f"{place}: {error}")


def raise_errors(errors: list[str], *, setting: str, path: Path) -> None:
    """Raises one ValueError that names the first 20 of `errors`; none, no error."""
    if errors:
        shown = "\n".join(f"  {error}" for error in errors[:MAX_ERRORS])
        more = f"\n  and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        raise ValueError(f"{setting}={path} has {len(errors)} bad rows; correct or remove them:\n{shown}{more}")


def parse_row(fields: dict[str, object], *, stem: str, line_number: int) -> Row:
    """The row that the object of one line is.

    Raises:
        RowError: it is none.
    """
    question = text_field(fields, QUESTION_KEYS)
    answer = text_field(fields, ANSWER_KEYS)
    if GOLD_MARK in answer:
        # GSM8K's gold answers are integers with thousands separators.
        answer = answer.rpartition(GOLD_MARK)[2].strip().replace(",", "")
        if not answer:
            raise RowError(f"nothing follows {GOLD_MARK} in the answer")
    prompt_id = row_id(fields, stem=stem, line_number=line_number)
    env_name = text_field(fields, ("env_name",)) if fields.get("env_name") is not None else None
    return Row(prompt_id, line_number, question, answer, env_name)


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """`(line number from 1, line)` of all lines that are not blank; of an overlong line, its beginning."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, line


def _json_object(line: bytes) -> dict[str, object]:
    if len(line) > MAX_LINE_BYTES:
        raise RowError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if b"\0" in line:
        raise RowError(f"NUL byte at column {line.index(0) + 1}")
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 at byte {error.start + 1}: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise RowError(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise RowError("invalid JSON: nested too deeply") from error
    if not isinstance(fields, dict):
        raise RowError(f"a row must be a JSON object, not {type(fields).__name__}")
    return fields


def row_id(fields: Mapping[str, object], *, stem: str, line_number: int) -> str:
    """The `id` of a row, else `<file stem>:<line>`.

    Raises:
        RowError: its `id` is no text.
    """
    return text_field(fields, ("id",)) if fields.get("id") is not None else f"{stem}:{line_number}"


def text_field(fields: Mapping[str, object], keys: tuple[str, ...]) -> str:
    """The text under the first of `keys` that is present, without surrounding white space; numbers count as text."""
    key = next((key for key in keys if fields.get(key) is not None), None)
    if key is None:
        raise RowError(f"no key {' or '.join(keys)} (the row has {', '.join(map(repr, sorted(fields)[:8])) or 'none'})")
    value = fields[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise RowError(f"{key} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise RowError(f"{key} is empty")
    if "\0" in value:
        raise RowError(f"{key} contains a NUL character")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RowError(f"{key} contains half of a surrogate pair")
    return value.strip()
