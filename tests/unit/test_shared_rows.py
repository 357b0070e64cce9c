# SPDX-License-Identifier: Apache-2.0
"""Validation rows that are training rows are said by `--check` and a start, whatever their file, order and format."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from mrl import inputs
from mrl.config.load import load_config
from mrl.data.excerpts import MAX_WHOLE_ROWS
from mrl.data.overlap import Identities
from mrl.inputs import look_at_data

TRAIN = Path("prepared/tiny/data/train.jsonl")


def shuffled(rows: list[dict[str, object]], path: Path) -> None:
    """The same rows from behind, with ids and columns of another order, in the format of the path's suffix."""
    rows = [{"id": f"new-{number}", **dict(reversed(row.items()))} for number, row in enumerate(reversed(rows))]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


@pytest.mark.parametrize("file", ["train.jsonl", "link.jsonl", "other.parquet", "other.jsonl.gz"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_validation_rows_that_are_training_rows_are_said(
    workplace: Path, file: str, is_strict: bool, caplog: pytest.LogCaptureFixture
):
    # More rows than a check looks at of a large file.
    rows: list[dict[str, object]] = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(MAX_WHOLE_ROWS + 200)]
    TRAIN.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (held := TRAIN.parent / file).name == "link.jsonl":
        held.symlink_to(TRAIN.name)
    elif held != TRAIN:
        shuffled([*rows[:3], *rows[-2:], {"question": "new", "answer": "1"}], held)
    said = "5 of 6" if held.name.startswith("other") else "1,200 of 1,200"
    config = load_config("grpo_tiny.yaml", [f"data.validation.data_path={held}"])
    look = look_at_data(config, is_strict=is_strict)
    (line,) = [*look.doubts, *(record.getMessage() for record in caplog.records)]
    assert line.startswith(f"{said} validation rows are training rows, too: ") and not look.problems


def test_no_more_of_a_compressed_file_is_compared_than_of_another(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    rows: list[dict[str, object]] = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(400)]
    TRAIN.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held = TRAIN.with_name("packed.jsonl.gz"), TRAIN.with_name("held.jsonl")
    shuffled(rows, train)
    held.write_text(json.dumps(rows[-1]) + "\n" + json.dumps(rows[0]) + "\n")
    monkeypatch.setattr(inputs, "MAX_WHOLE_BYTES", 10 * train.stat().st_size // 8)
    config = load_config("grpo_tiny.yaml", [f"data.train.data_path={train}", f"data.validation.data_path={held}"])
    (line,) = look_at_data(config, is_strict=False).doubts
    assert line.startswith("1 of 2 validation rows that were looked at are training rows, too: ")


def test_copies_of_a_row_count_and_rows_without_identity_do_not():
    identities = Identities()
    for position, digest in ((0, 7), (30, 2**64 - 1), (50, 7)):
        identities.add(position, digest)
    assert identities.num_shared([50, 50, 40, 60], [0, 30]) == 2
    assert identities.num_shared([40, 60], [40, 60]) == identities.num_shared([], [0]) == 0
    assert Identities().num_shared([3], [3]) == 0


def test_held_out_rows_of_one_file_are_not_training_rows(workplace: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(64)]
    TRAIN.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config("grpo_tiny.yaml", ["data.validation=null", "data.train.split_validation_size=0.25"])
    look = look_at_data(config, is_strict=True)
    assert not (look.doubts or look.problems or caplog.records)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_examples_of_supervised_training_are_compared_as_the_model_sees_them(workplace: Path, name: str):
    config = load_config(f"{name}_tiny.yaml")
    (train,), (held,) = config.data.train_sets.values(), config.data.validation_sets.values()
    shutil.copy(train.source, held.source)
    lines = Path(held.source).read_text().splitlines(keepends=True)
    Path(held.source).write_text("".join(reversed(lines)))
    (line,) = look_at_data(config, is_strict=False).doubts
    assert line.startswith(f"{len(lines)} of {len(lines)} validation rows are training rows, too: ")
